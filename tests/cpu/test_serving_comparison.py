"""Engines under the same loads: what is kept of them, and docs/serving.md, which says what the result files say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.kernels.family import RESULTS
from bench.kernels.page import replaced
from bench.serving import compare
from bench.serving.page import ABLATIONS, PAGE, found, halved, parted, traced, written
from tangram.engine.llm import LLM
from tangram.lab.load.asks import Ask
from tangram.lab.load.clock import Patience, TimedAnswer, answered

SERVING, TRACE = found(RESULTS), found(RESULTS, "trace")
MEASURED = [result for series in (*SERVING, *TRACE) for result in series.values()]


def test_the_tables_are_those_of_the_result_files() -> None:
    page = PAGE.read_text()
    assert replaced(page, "engines", written(SERVING)) == page, "run python -m bench.serving.page"
    assert replaced(page, "trace", traced(TRACE)) == page, "run python -m bench.serving.page"
    assert replaced(page, "fp8", halved(SERVING)) == page, "run python -m bench.serving.page"
    for marker, name in ABLATIONS.items():
        parts = json.loads((RESULTS / name).read_text())
        assert replaced(page, marker, parted(parts)) == page, "run python -m bench.serving.page"


@pytest.mark.parametrize("measured", MEASURED)
def test_an_engine_comes_with_its_command_machine_and_commit(measured: dict[str, Any]) -> None:
    where = measured["environment"]
    assert measured["command"].startswith("python -m bench.serving.compare ")
    assert where["commit"] and not where["commit"].endswith("+") and where["gpu"]


def result(name: str, seconds: list[float], **where: str) -> dict[str, Any]:
    parts = {f"run {n}": {"seconds": value, "prompt_tokens": 1000} for n, value in enumerate(seconds)}
    environment = {"commit": "c", "date": "d", "gpu": "g", **where}
    options = {"kv_retention": 0.25, "fits_tokens": 1}
    return {"engine": name, "command": "x -o y", "environment": environment, "options": options,
            "cases": {"prefill": parts, "answers-8k": parts}}  # fmt: skip


def test_cells_are_medians_with_their_span_and_how_many_times_as_fast_that_is() -> None:
    peer = result("vllm", [4.0], vllm="1")
    table = written([{"vllm": peer, "tangram-0.25": result("tangram-0.25", [1.0, 2.0, 4.0])}]).splitlines()
    assert table[0] == "|  | vLLM 1 | ρ 0.25 |"
    assert table[2] == "| prefill, 64 × 8,192 tokens: tokens/s | 250.0 | 500.0 (250.0–1,000) · 2.00 × |"
    assert table[3] == "| 64 × (8,192 in, 512 out): s | 4 | 2 (1–4) · 2.00 × |"


@pytest.mark.parametrize(("later_s", "shown"), [(3.0, "| 3 | 1 · 3.00 × |"), (8.0, "| 4 | 2 · 2.00 × |")])
def test_a_case_is_shown_from_the_lease_in_which_the_peer_did_best(later_s: float, shown: str) -> None:
    peer, ours = (result(name, [seconds], vllm="1") for name, seconds in (("vllm", 4.0), ("tangram-1", 2.0)))
    later = result("vllm", [], vllm="1") | {"cases": {"answers-8k": {"run 1": {"seconds": later_s}}}}
    faster = result("tangram-1", [1.0])
    table = written([{"vllm": peer, "tangram-1": ours}, {"vllm": later, "tangram-1": faster}]).splitlines()
    assert table[2].endswith("| 250.0 | 500.0 · 2.00 × |") and table[3].endswith(shown)


def test_an_fp8_cache_stands_beside_the_other_of_its_lease_and_nowhere_else() -> None:
    plain, fp8 = result("tangram-0.25", [4.0]), result("tangram-0.25-fp8", [3.0])
    fp8["options"] = fp8["options"] | {"kv_cache_dtype": "fp8"}
    assert halved([{"tangram-0.25": plain}, {"tangram-0.25-fp8": fp8}]) == "\n"
    one_lease = [{"tangram-0.25": plain, "tangram-0.25-fp8": fp8}]
    assert "| 4 | 3 |" in halved(one_lease) and "FP8" not in written(one_lease)


@pytest.mark.parametrize("given", [["--kv-retention", "0.5"], ["--chunk-tokens", "256"]])
def test_what_vllm_does_not_have_is_refused(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        compare.main(["vllm", *given, "-o", str(tmp_path)])
    assert refused.value.code == 2


def test_a_trace_says_at_which_speed_it_was_given_up() -> None:
    summary = {
        "ttft_s": {"p50": 0.5, "p90": 2.0}, "tpot_ms": {"p50": 30.0}, "requests_per_s": 3.5, "cached_share": 0.25,
        "goodput_per_s": 3.2, "limits": {"ttft_s": 5.0},
    }  # fmt: skip
    held = result("vllm", [1.0], vllm="1") | {
        "cases": {"trace": {"speed 0.3": summary, "given up": "speed 0.4: given up after 9 s"}}
    }
    table = traced([{"vllm": held}]).splitlines()
    assert table[2] == "| vLLM 1 | 0.3 | 0.50 / 2.00 | 30 | 3.50 | 3.20 | 25% |"
    assert table[3] == "| vLLM 1 | 0.4 | given up after 9 s | – | – | – | – |"


def test_the_comparison_keeps_what_it_measures_and_where_it_stopped(
    small_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "vocab_size", lambda: 300)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 30, "hash_ids": [1]}\n')
    options = argparse.Namespace(trace=trace, seconds=10.0, speeds="1,2", hold_ttft_s=60.0)
    hasty = argparse.Namespace(**(vars(options) | {"hold_ttft_s": 1e-9}))
    cases = {
        "some": compare.requests(2, 20, 3, repeats=2), "turns": compare.sessions(2, 40, 2, 5, 4),
        "trace": compare.replayed(options), "hasty": compare.replayed(hasty),
    }  # fmt: skip

    class Small:
        def __init__(self) -> None:
            self.options: dict[str, Any] = {}

        def clear_cache(self) -> None:
            small_llm.engine.clear_cache()

        def answered(self, asks: Sequence[Ask], patience: Patience | None = None) -> list[TimedAnswer]:
            return answered(small_llm.engine, asks, patience=patience)

    kept: dict[str, Any] = {}
    compare.measured(Small(), cases, kept.update)
    assert {name: list(parts) for name, parts in kept.items()} == {
        "some": ["run 1", "run 2"], "turns": ["turn 1", "turn 2"], "trace": ["speed 1", "speed 2"],
        "hasty": ["given up"],
    }  # fmt: skip
    assert kept["turns"]["turn 2"]["cached_share"] > 0.5 and kept["some"]["run 1"]["output_tokens"] == 6
