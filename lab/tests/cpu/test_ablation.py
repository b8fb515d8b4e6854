"""What each part is worth: the rungs, where their time goes, and the command that measures them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tangram.cli import app
from tangram.engine.llm import LLM
from tangram.engine.loop import Engine
from tangram.errors import ConfigError
from tangram_lab.load.ablation import RUNGS, breakdowns, choose_rungs
from tangram_lab.load.asks import alike
from tangram_lab.load.parts import PARTS, PartClock
from tests.mentions import mentioning, mentions

SMALL = {
    "load_format": "dummy",
    "chunk_tokens": 32,
    "page_tokens": 4,
    "heads_per_page": 2,
    "kv_cache_gib": 0.01,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
}
FLAGS = [
    text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value))
]
LOAD = [
    "--batch",
    "2",
    "--requests",
    "3",
    "--input-tokens",
    "70",
    "--output-tokens",
    "30",
    "--rates",
    "20,80",
]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return LLM(str(folder), kv_retention=1.0, **SMALL).engine  # type: ignore[arg-type]


def test_parts_are_timed_without_those_inside_them_and_then_left_alone(engine: Engine) -> None:
    methods = [vars(owner)[name] for pairs in PARTS.values() for owner, name in pairs]
    begin = time.perf_counter()
    split = breakdowns(engine, alike(2, 70, 40, shared_tokens=0, vocab_size=300))
    elapsed_ms = (time.perf_counter() - begin) * 1e3
    assert [vars(owner)[name] for pairs in PARTS.values() for owner, name in pairs] == methods
    prefill, decode = split["prefill"], split["decode"]
    assert sum(prefill.ms.values()) * 0.14 + sum(decode.ms.values()) * decode.steps < elapsed_ms
    assert prefill.ms == prefill.host_ms and list(prefill.ms) == list(PARTS)
    assert all(
        prefill.ms[part] > 0
        for part in ("model", "attention", "scheduling and reservation", "tables")
    )
    assert 0 < decode.upkeep < decode.outside < 1
    # 70 tokens are two chunks and a rest; 39 more fill one, which stays open.
    assert prefill.sealed_chunks == 4 and decode.sealed_chunks == 0 and decode.steps >= 39


def test_an_error_inside_a_part_leaves_the_clock_usable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = PartClock(torch.device("cpu"))
    with clock.watching(), pytest.raises(AttributeError):
        Engine.step(None)  # type: ignore[arg-type]
    assert clock.split().steps == 0 and clock.split().total_s > 0


def test_rungs_are_named(folder: Path) -> None:
    assert [rung.title for rung in choose_rungs("aot, full-kv")] == ["full KV", "+ AOT"]
    with pytest.raises(ConfigError, match=mentioning("rungs 'paging' full-kv reservation")):
        choose_rungs("aot,paging")


@pytest.mark.parametrize("tokens", ["30", pytest.param("40", marks=pytest.mark.nightly)])
def test_the_command_measures_every_rung_and_keeps_the_figures(
    tokens: str, folder: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    result = CliRunner().invoke(
        app,
        [
            "bench",
            "serving",
            "ablation",
            str(folder),
            *FLAGS,
            *LOAD,
            "--output-tokens",
            tokens,
            "--ttft-limit-s",
            "5",
            "-o",
            str(kept),
        ],
        catch_exceptions=False,
        env={"COLUMNS": "200", "TANGRAM_CACHE": str(tmp_path)},
    )
    assert result.exit_code == 0, result.output
    content = json.loads(kept.read_text())
    assert content["environment"]["cpu"] and content["config"]["load_format"] == "dummy"
    assert [found["title"] for found in content["rungs"].values()] == [rung.title for rung in RUNGS]
    footprint = {name: found["footprint"] for name, found in content["rungs"].items()}
    assert footprint["full-kv"] == 1.0 >= footprint["reservation"] >= footprint["ragged-paging"]
    assert footprint["ragged-paging"] >= footprint["clustering"] == footprint["aot"]
    assert footprint["served"] == footprint["aot"]
    for found in content["rungs"].values():
        assert found["title"] in result.output
        assert list(found["rates"]) == ["20", "80"]
        for summary in found["rates"].values():
            assert summary["requests"] == 3 and summary["preemptions"] == 0
            assert (
                0 < summary["ttft_s"]["p50"] <= summary["ttft_s"]["p99"]
                and summary["limits"]["ttft_s"] == 5
            )
            assert summary["goodput_per_s"] == summary["requests_per_s"]
        assert all("clock" in split["how"] for split in found["breakdown"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-retention", "1.0"], "kv_retention 1.0"),
        (["--rates", "2,none"], "rates 'none'"),
        (["--rungs", "best"], "rungs 'best'"),
        (["--tpot-limit-ms", "-1"], "tpot_limit_ms -1.0"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: list[str], message: str, folder: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "serving", "ablation", str(folder), *FLAGS, *options]
    )
    assert result.exit_code == 2
    assert mentions(result.output, message) and "Traceback" not in result.output


def test_the_picture_is_drawn(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "ttft.png"
    result = CliRunner().invoke(
        app,
        [
            "bench",
            "serving",
            "ablation",
            str(folder),
            *FLAGS,
            *LOAD,
            "--rungs",
            "full-kv",
            "--plot",
            str(picture),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_who_cannot_draw_hears_it_before_anything_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram_lab.accuracy.plot.find_spec", lambda name: None)
    picture = tmp_path / "ttft.png"
    result = CliRunner().invoke(
        app, ["bench", "serving", "ablation", str(folder), *FLAGS, "--plot", str(picture)]
    )
    assert result.exit_code == 2 and "pip install matplotlib" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("ablation", ["--input-tokens", "5000"], "input_tokens 5128 2048"),
        ("throughput", ["--input-tokens", "16777216"], "input_tokens 2048"),
        ("throughput", ["--requests", "1000000"], "1000000 1024 1024000000"),
        ("multi-turn", ["--history-tokens", "16777216"], "history_tokens 2048"),
        ("multi-turn", ["--turns", "10000"], "history_tokens 2048"),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_it_is_made_up(
    command: str, options: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tangram_lab.load.asks.draw_tokens", lambda count, *_: (5,) * min(count, 2048)
    )
    kept = "0.5" if command == "ablation" else "1.0"
    given = ["bench", "serving", command, str(folder), *FLAGS, "--kv-retention", kept, *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2 and mentions(result.stderr, said), result.exception
