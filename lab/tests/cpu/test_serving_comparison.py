"""Engines under the same loads: what is kept of them, and what docs/serving.md shows of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.render.page import Page
from bench.serving import compare
from bench.serving.competitors import StartedEngine
from tangram.engine.llm import LLM
from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import GivenUpError, Patience, TimedAnswer


def blocks(folder: Path, series: Sequence[dict[str, Any]], kind: str = "serving") -> dict[str, str]:
    """Those of the page, of these results by engine, in the order of their leases."""
    for number, results in enumerate(series):
        for engine, measured in results.items():
            name = f"{kind}-{number + 1}" if number else kind
            (folder / f"{name}_{engine}.json").write_text(json.dumps(measured))
    return Page("serving", folder).blocks()


def result(name: str, seconds: list[float], **where: str) -> dict[str, Any]:
    parts = {
        f"run {n}": {"seconds": value, "prompt_tokens": 1000} for n, value in enumerate(seconds)
    }
    environment = {"commit": "c", "date": "d", "gpu": "g", **where}
    options = {"kv_retention": 0.25, "fits_tokens": 1}
    return {
        "engine": name,
        "command": "x -o y",
        "environment": environment,
        "options": options,
        "cases": {"prefill": parts, "answers-8k": parts},
    }


def test_cells_are_medians_with_their_span_and_how_many_times_as_fast_that_is(
    tmp_path: Path,
) -> None:
    peer, ours = result("vllm", [4.0], vllm="1"), result("tangram-0.25", [1.0, 2.0, 4.0])
    table = blocks(tmp_path, [{"vllm": peer, "tangram-0.25": ours}])["engines"].splitlines()
    assert table[0] == "|  | vLLM 1 | ρ 0.25 |"
    assert table[2] == "| RULER-8K of Qwen3-4B, as published: % | 93.8 | 83.0 |"
    assert (
        table[3]
        == "| prefill, 64 × 8,192 tokens: tokens/s | 250.0 | 500.0 (250.0–1,000) · 2.00 × |"
    )
    assert table[4] == "| 64 × (8,192 in, 512 out): s | 4 | 2 (1–4) · 2.00 × |"


@pytest.mark.parametrize(
    ("later_s", "shown"), [(3.0, "| 3 | 1 · 3.00 × |"), (8.0, "| 4 | 2 · 2.00 × |")]
)
def test_a_case_is_shown_from_the_lease_in_which_the_peer_did_best(
    later_s: float, shown: str, tmp_path: Path
) -> None:
    peer, ours = (
        result(name, [seconds], vllm="1") for name, seconds in (("vllm", 4.0), ("tangram-1", 2.0))
    )
    later = result("vllm", [], vllm="1") | {
        "cases": {"answers-8k": {"run 1": {"seconds": later_s}}}
    }
    faster = result("tangram-1", [1.0])
    leases = [{"vllm": peer, "tangram-1": ours}, {"vllm": later, "tangram-1": faster}]
    table = blocks(tmp_path, leases)["engines"].splitlines()
    assert table[3].endswith("| 250.0 | 500.0 · 2.00 × |") and table[4].endswith(shown)


@pytest.mark.parametrize(("biases", "shown"), [(0, "· 2.00 ×"), (None, "| 500.0 |")])
def test_many_rows_of_gpt_oss_have_a_factor_only_where_the_peer_has_no_biases(
    biases: int | None, shown: str, tmp_path: Path
) -> None:
    peer, ours = result("vllm", [4.0], vllm="1"), result("tangram-1", [2.0])
    for kind in ("llama-3.1-8b", "latent-16"):
        blocks(tmp_path, [{"vllm": peer, "tangram-1": ours}], kind)
    if biases is not None:
        peer["options"]["biases"] = biases
    found = blocks(tmp_path, [{"vllm": peer, "tangram-1": ours}], "gpt-oss-20b")["shapes"]
    llama, oss, latents = [line for line in found.splitlines() if line.startswith("| prefill")]
    assert "· 2.00 ×" in llama and shown in oss and "· 2.00 ×" in latents


def test_an_fp8_cache_stands_beside_the_other_of_its_lease_and_nowhere_else(tmp_path: Path) -> None:
    plain, fp8 = result("tangram-0.25", [4.0]), result("tangram-0.25-fp8", [3.0])
    fp8["options"] = fp8["options"] | {"kv_cache_dtype": "fp8"}
    assert blocks(tmp_path, [{"tangram-0.25": plain}, {"tangram-0.25-fp8": fp8}])["fp8"] == "\n"
    (tmp_path / "one").mkdir()
    one_lease = blocks(tmp_path / "one", [{"tangram-0.25": plain, "tangram-0.25-fp8": fp8}])
    assert "| 4 | 3 · 1.33 × |" in one_lease["fp8"] and "FP8" not in one_lease["engines"]


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-retention", "0.5"],
        ["--chunk-tokens", "256"],
        ["--api-processes", "2"],
        ["--http", "--timeline"],
        ["--http", "--ranks", "2"],
        ["--cases", "trace", "--trace", "trace.jsonl", "--speeds", "2,1"],
    ],
    ids=" ".join,
)
def test_what_would_not_be_measured_is_refused(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        compare.main(["vllm", *given, "-o", str(tmp_path)])
    assert refused.value.code == 2


class RecordingEngine:
    """Answers at once, and records what was asked since which empty cache."""

    def __init__(self) -> None:
        self.options, self.vocab_size, self.costs = dict[str, Any](), 100, {"api_us_a_token": 3.0}
        self.asked: list[tuple[int, set[tuple[int, int]]]] = []
        self.caches = 0

    def clear_cache(self) -> None:
        self.caches += 1

    def answer_all(
        self, asks: Sequence[Ask], patience: Patience | None = None
    ) -> list[TimedAnswer]:
        assert len({ask.tokens for ask in asks}) == len(asks), "prompts are alike"
        self.asked.append((len(asks), {(len(ask.tokens), ask.output_tokens) for ask in asks}))
        return [
            TimedAnswer(
                0.0,
                len(ask.tokens),
                [1.0 + number / 100 for number in range(ask.output_tokens)],
                [1] * ask.output_tokens,
            )
            for ask in asks
        ]


@pytest.mark.parametrize(
    ("case", "load"),
    [
        ("batch-128", (256, {(128, 128)})),
        ("batch-1k", (256, {(1024, 256)})),
        ("batch-8k", (64, {(8192, 256)})),
        ("batch-2k-out", (128, {(512, 2048)})),
        *((f"streams-{count}", (count, {(512, 256)})) for count in (8, 32, 64, 128, 256, 512)),
        ("streams-1024", (1024, {(512, 256)})),
    ],
)
def test_loads_of_many_streams_are_warmed_up_and_run_three_times_with_an_empty_cache(
    case: str, load: tuple[int, set[tuple[int, int]]]
) -> None:
    engine, kept = RecordingEngine(), dict[str, Any]()
    compare.measure_cases(engine, {case: compare.CASES[case]}, kept.update)
    count, ((input_tokens, _),) = load
    assert engine.asked == [(count, {(input_tokens, compare.WARM_TOKENS)}), *[load] * 3]
    assert engine.caches == 4 and list(kept[case]) == ["run 1", "run 2", "run 3"]


def test_time_between_tokens_is_kept_and_what_the_answers_cost() -> None:
    kept: dict[str, Any] = {}
    compare.measure_cases(RecordingEngine(), {"few": compare.requests(2, 5, 11)}, kept.update)
    run = kept["few"]["run 1"]
    assert run["output_tokens_per_s"] == pytest.approx(22 / 1.1)
    assert run["between_tokens_ms"] == pytest.approx({"p50": 10.0, "p90": 10.0, "p99": 10.0})
    assert run["api_us_a_token"] == 3.0


class SlowEngine(RecordingEngine):
    """Sustains a trace until its last request comes sooner than after 2 s."""

    def answer_all(
        self, asks: Sequence[Ask], patience: Patience | None = None
    ) -> list[TimedAnswer]:
        if asks[-1].at_s < 2.0:
            raise GivenUpError("given up after 1 s")
        return super().answer_all(asks, patience)


def test_the_fastest_speed_of_a_trace_is_searched_and_what_is_too_fast_is_named(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 3, "output_length": 2, "hash_ids": [%d]}\n'
    trace.write_text("".join(line % (5000 * number, number) for number in range(2)))
    options = argparse.Namespace(
        trace=trace, seconds=10.0, speeds=[1.0], within=0.1, hold_ttft_s=5.0
    )
    kept: dict[str, Any] = {}
    compare.measure_cases(SlowEngine(), {"trace": compare.make_replay(options)}, kept.update)
    held = [float(part.removeprefix("speed ")) for part in kept["trace"] if part != "given up"]
    too_fast = float(kept["trace"]["given up"].split()[1].rstrip(":"))
    assert held[:2] == [1.0, 2.0] and max(held) <= 2.5 < too_fast <= 1.1 * max(held)


def test_the_comparison_keeps_what_it_measures_and_where_it_stopped(
    small_llm: LLM, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 100, "output_length": 30, "hash_ids": [1]}\n'
    )
    options = argparse.Namespace(
        trace=trace, seconds=10.0, speeds=[1.0, 2.0], within=None, hold_ttft_s=60.0
    )
    hasty = argparse.Namespace(**(vars(options) | {"hold_ttft_s": 1e-9}))
    cases = {
        "some": compare.requests(2, 20, 3, repeats=2),
        "turns": compare.sessions(2, 40, 2, 5, 4),
        "steps": compare.decoding(3, 40, 6, repeats=2),
        "trace": compare.make_replay(options),
        "hasty": compare.make_replay(hasty),
    }

    kept: dict[str, Any] = {}
    compare.measure_cases(StartedEngine(small_llm.engine, {}), cases, kept.update)
    assert {name: list(parts) for name, parts in kept.items()} == {
        "some": ["run 1", "run 2"],
        "turns": ["turn 1", "turn 2"],
        "steps": ["run 1", "run 2"],
        "trace": ["speed 1", "speed 2"],
        "hasty": ["given up"],
    }
    assert (
        kept["turns"]["turn 2"]["cached_share"] > 0.5
        and kept["some"]["run 1"]["output_tokens"] == 6
    )
