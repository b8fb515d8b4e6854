"""The measurements of speculation: what they force, count and keep."""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from bench.render.page import Page
from bench.speculation import acceptance, cpu_conversation, figures, serving
from bench.speculation.__main__ import main as measure_speculation
from bench.speculation.acceptance import AcceptanceBench, AcceptanceCell, AcceptanceFile
from bench.speculation.engines import (
    SAID,
    FixedPace,
    MeasuredEngine,
    build_measured,
    load_measured,
    with_speculation,
)
from bench.speculation.report import summarise
from bench.speculation.runs import StepTimes, find_differences, measure_run
from bench.speculation.tasks import TASKS
from bench.speculation.text_prompts import REPEATED_TOKENS, repeat_texts
from tangram.compress.scorers import attention_weights
from tangram.config import EngineConfig
from tangram.model.load import LoadedModel
from tangram_lab.load.clock import TimedAnswer
from tests.small_engines import profile_file
from tests.speculation import few

PROMPTS = [tuple(range(3, 83)), tuple(range(50, 120))]
OWN = {"method": "compressed_kv", "kv_retention": 0.25}


@pytest.fixture(scope="module")
def saying(folder: Path) -> LoadedModel:
    """A tiny random model that says the same everywhere."""
    return load_measured(folder, random=True, device="cpu")


def build(saying: LoadedModel, folder: Path, pace: FixedPace, **options: Any) -> MeasuredEngine:
    """Its engine, which drafts for itself."""
    config = EngineConfig(
        kv_retention=1.0,
        profile=(profile_file(saying, folder, retention=0.25, heads_per_page=4),),
        chunk_tokens=32,
        page_tokens=8,
        kv_cache_gib=0.01,
        max_num_seqs=2,
        max_num_batched_tokens=128,
    )
    return build_measured(with_speculation(config, OWN), saying, pace=pace, **options)


@pytest.mark.parametrize("share", few([0.95, 0.5], 0.95))
def test_a_coin_decides_how_many_drafts_are_accepted(
    share: float, saying: LoadedModel, tmp_path: Path
) -> None:
    pace = FixedPace(8)
    measured = build(saying, tmp_path, pace, acceptance=share)
    found, answers = measure_run(measured, PROMPTS, 400, to_the_end=True)
    assert all(set(answer.token_ids) == {SAID} for answer in answers)
    drafts = found["speculation"]
    assert drafts["compared"] > 500 and abs(drafts["acceptance"] - share) < 0.08
    expected = (1 - share**9) / (1 - share)
    assert abs(drafts["tokens_per_iteration"] - expected) < 0.15 * expected
    assert drafts["iterations"] + drafts["accepted"] == 2 * 399


def test_the_number_of_drafts_is_fixed_and_can_be_changed(
    saying: LoadedModel, tmp_path: Path
) -> None:
    pace = FixedPace(8)
    measured = build(saying, tmp_path, pace)
    for drafted in (8, 3, 0):
        pace.drafted = drafted
        found, _ = measure_run(measured, PROMPTS[:1], 200, to_the_end=True)
        # Drafts end with their chunk, of 32 tokens here.
        assert 0.7 * drafted <= found["speculation"]["drafted_per_iteration"] <= drafted


def test_an_engine_that_is_measured_leaves_its_memory_to_the_next(
    saying: LoadedModel, tmp_path: Path
) -> None:
    measured = build(saying, tmp_path, FixedPace(4))
    measure_run(measured, PROMPTS, 20, to_the_end=True)
    engine = weakref.ref(measured.engine)
    del measured
    gc.collect()
    assert engine() is None


def answer(tokens: list[int], times_s: list[float]) -> TimedAnswer:
    return TimedAnswer(0.0, 10, times_s, tokens)


def test_decode_counts_from_the_last_first_token() -> None:
    answers = [answer([1, 2, 3], [1.0, 2.0, 3.0]), answer([1, 2, 3], [2.0, 3.0, 4.0])]
    found = summarise(answers, {"drafts": 2, "drafted": 4, "compared": 3, "accepted": 2})
    assert (found["prefill_s"], found["seconds"], found["decode_tokens"]) == (2.0, 4.0, 3)
    assert found["decode_tokens_per_s"] == 1.5 and found["tpot_ms"]["p50"] == 1000.0
    assert found["speculation"]["iterations"] == 2
    assert found["speculation"]["acceptance"] == 2 / 3
    assert found["speculation"]["tokens_per_iteration"] == 2.0


def test_drafts_behind_an_end_token_make_no_iteration_less() -> None:
    ended = answer([1, 2, 3], [1.0, 2.0, 3.0])
    found = summarise([ended], {"drafts": 1, "drafted": 8, "compared": 8, "accepted": 8})
    assert found["speculation"]["iterations"] == 1
    assert found["speculation"]["tokens_per_iteration"] == 9.0


def test_prompts_that_repeat_end_within_a_repetition(small_codec: Any) -> None:
    prompts = repeat_texts(small_codec, 3, 250, 0)
    assert len(set(prompts)) == 3
    for prompt in prompts:
        assert len(prompt) == 250 and prompt[:150] == prompt[REPEATED_TOKENS:]
    assert prompts != repeat_texts(small_codec, 3, 250, 1)


def test_answers_that_differ_are_named_with_the_place() -> None:
    same, longer = answer([1, 2], [1.0, 2.0]), answer([1, 2, 3], [1.0, 2.0, 3.0])
    other = answer([1, 5], [1.0, 2.0])
    assert find_differences([same, same, same], [same, other, longer]) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("case", few(["shape-8x1k", "shape-40x16k"], "shape-40x16k"))
def test_a_case_of_a_shape_is_measured_and_kept(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.main(["--small", "--cases", case, "--repeats", "2", "-o", str(tmp_path)])
    kept = json.loads((tmp_path / f"speculation-{case}.json").read_text())
    assert any("forced" in note for note in kept["notes"]) and kept["case"]["acceptance"] == 0.95
    assert list(kept["engines"]) == ["plain", "compressed_kv"]
    for engine in kept["engines"].values():
        assert [run["output_tokens"] for run in engine["runs"]] == [48, 48]
        assert engine["fits_tokens"] > 2 * 700
        assert all(run["preemptions"] == 0 for run in engine["runs"])
        assert all(run["cached_tokens"] > 1000 for run in engine["runs"])  # a run is all decode
    assert kept["engines"]["compressed_kv"]["warm_up"][0]["speculation"]["drafted"] > 0
    assert f"# {case}" in capsys.readouterr().out


def test_the_longest_steps_are_kept_with_their_places() -> None:
    times = StepTimes(None)
    for milliseconds in (4, 90, 5, 4, 60, 7, 6):
        times.add(milliseconds / 1e3)
    (found,) = times.figures().values()
    assert [step for _, step in found["longest_ms"]] == [1, 4, 5, 6, 2]
    assert found["longest_ms"][0][0] == pytest.approx(90)


@pytest.mark.parametrize(
    ("command", "case"), [("serving", "nothing"), ("vllm", "nothing"), ("vllm", "real-64x7k")]
)
def test_a_case_that_there_is_not_is_refused(command: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        measure_speculation([command, "--cases", case, "-o", str(tmp_path)])
    assert refused.value.code == 2


def test_where_vllm_is_installed_the_engine_need_not_be() -> None:
    """vLLM's environment has other versions of what the engine's modules import."""
    code = "import sys, bench.speculation.beside_vllm; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign = {"numba", "transformers", "tangram.engine", "tangram.kernels", "tangram.plan"}
    assert not foreign & set(found.stdout.split())


def test_a_file_is_edited_alike_with_lookups_and_drafts_are_accepted(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file that the model copies well: which files there are changes with the tree.
    edited = Path(attention_weights.__file__)
    monkeypatch.setattr("bench.speculation.tasks._files", lambda: [edited])
    config = EngineConfig(
        device="cpu", kv_retention=1.0, kv_cache_gib=0.2, max_num_seqs=1, max_model_len=2000
    )
    engines = {
        name: build_measured(with_speculation(config, cpu_conversation.METHODS[name]), loaded)
        for name in ("plain", "suffix")
    }
    options = argparse.Namespace(small=False, tokens=32)
    found = cpu_conversation._measure(engines, "edit this file", 0, options)
    assert found["suffix"]["differences"] == [] and found["suffix"]["copied"] > 0.5
    assert found["suffix"]["speculation"]["accepted"] > 10


def test_tasks_differ_from_prompt_to_prompt(loaded: LoadedModel, small_codec: Any) -> None:
    for write in TASKS.values():
        tasks = [write(small_codec, number, 50) for number in range(6)]
        assert len({task.prompt for task in tasks}) == 6
        assert all(0 < task.output_tokens <= 50 for task in tasks)


@pytest.fixture(scope="module")
def small_codec(loaded: LoadedModel) -> Any:
    from tangram.engine.text.codec import TextCodec

    return TextCodec(loaded.tokenizer, eos_token_ids=loaded.eos_token_ids)


def test_acceptance_is_counted_and_goes_on_where_it_stopped(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    cell = AcceptanceCell("fastkvzip", 0.5, 4, "story", 600)
    path, session = tmp_path / "acceptance.json", {"command": "once"}
    taken = AcceptanceBench(loaded, 24).measure(cell)
    assert taken["speculation"]["compared"] >= taken["speculation"]["accepted"] > 5
    AcceptanceFile(path, session).add(cell, taken)
    again = AcceptanceFile(path, {"command": "again"})
    assert again.has(cell) and not again.has(AcceptanceCell("fastkvzip", 0.5, 8, "story", 600))
    again.add(AcceptanceCell("keydiff", 0.5, 4, "story", 600), taken)
    kept = json.loads(path.read_text())
    assert [one["command"] for one in kept["sessions"]] == ["once", "again"]
    rows = figures.acceptance_rows(kept["cells"])
    assert [row["scorer"] for row in rows] == ["fastkvzip", "keydiff"]
    assert rows[0]["acceptance"] == taken["speculation"]["acceptance"]
    assert figures.count_answers(kept["cells"]) == (1, 0)


def test_cells_of_one_engine_and_prompt_follow_each_other() -> None:
    options = acceptance._parser().parse_args([])
    cells = acceptance.list_cells(options)
    assert len(cells) == 3 * 3 * 2 * 3 * 4
    engines = [(cell.scorer, cell.kv_retention) for cell in cells]
    assert engines == sorted(engines, key=list(dict.fromkeys(engines)).index)
    prompts = [
        (*engine, cell.kind, cell.context_tokens)
        for engine, cell in zip(engines, cells, strict=True)
    ]
    assert prompts[0::2] == prompts[1::2]


def test_tables_show_what_was_measured_and_name_what_was_not(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    assert Page("speculation", tmp_path).blocks() == {}
    serving.main(["--small", "--cases", "shape-8x1k", "--repeats", "2", "-o", str(tmp_path)])
    blocks = Page("speculation", tmp_path).blocks()
    rows = [line.split(" | ") for line in blocks["serving"].splitlines() if line.startswith("| ")]
    found = {row[0].removeprefix("| "): row for row in rows[2:]}
    assert found["Qwen3-4B shape, 40 × 16K"][2] == "not measured"
    measured = found["Qwen3-4B shape, 8 × 1K"]
    assert (
        float(measured[4].split(" (")[0]) > 0
        and measured[5] == "0.97"
        and measured[-1] == "0 of 4 |"
    )
    assert "says token 0" in blocks["serving"]


def test_bounds_of_a_median_hold_it_in_19_of_20_samples() -> None:
    draws, held = random.Random(1), 0
    for _ in range(2000):
        low, high = figures.median_bounds([draws.random() for _ in range(40)])
        held += low <= 0.5 <= high
    assert 0.93 < held / 2000 < 0.98
    assert figures.median_bounds([3.0, 1.0, 2.0]) == (1.0, 3.0)
    with pytest.raises(ValueError, match="values"):
        figures.median_bounds([])


def test_engines_take_turns_in_orders_that_differ_and_are_compared_with_the_plain_one(
    loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.main(["--small", "--cases", "real-1x1k", "--repeats", "2", "-o", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    turns = [line.split()[0] for line in printed if " run " in line]
    orders = {tuple(turns[at : at + 4]) for at in range(0, 8, 4)}
    assert len(orders) > 1 and all(len(set(order)) == 4 for order in orders)
    kept = json.loads((tmp_path / "speculation-real-1x1k.json").read_text())["engines"]
    assert all(run["differences"] == [] for engine in kept.values() for run in engine["runs"])
    assert all(run["host"]["cpu_s"] > 0 for engine in kept.values() for run in engine["runs"])
