"""The table at the end of a lease."""

from __future__ import annotations

from typing import Any

from bench.serving.lease_table import COLUMNS, compare_ways, list_speeds


def result(**parts: Any) -> dict[str, Any]:
    return {"cases": {"batch": parts}}


def run(tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {"output_tokens_per_s": tokens_per_s, "tpot_ms": {}, **more}


def test_what_was_measured_over_http_stands_beside_what_was_inside() -> None:
    inside = {
        "tangram-1": result(**{"run 1": run(100.0), "run 2": run(300.0), "run 3": run(200.0)})
    }
    served = {
        "vllm": result(**{"run 1": run(50.0)}),
        "tangram-1": result(**{"run 1": run(150.0, cpu_s={"engine": 2.0, "api": 1.0})}),
    }
    rows = list(compare_ways(inside, served))
    assert [row[:3] for row in rows] == [
        ("batch", "vllm", "HTTP"),
        ("batch", "tangram-1", "inside"),
        ("batch", "tangram-1", "HTTP"),
    ]
    cells = [dict(zip(COLUMNS, row[3], strict=True)) for row in rows]
    assert [one["tokens/s"] for one in cells] == ["50", "200", "150 · 0.75 ×"]
    assert [one["CPU s, engine"] for one in cells] == ["", "", "2"]


def test_turns_that_fill_the_cache_and_what_was_given_up_do_not_count() -> None:
    parts = {"turn 1": run(1.0), "turn 2": run(2.0), "given up": "after 3 s"}
    ((*_, cells),) = compare_ways({"vllm": result(**parts)}, {})
    assert cells[list(COLUMNS).index("tokens/s")] == "2"


def test_variants_stand_behind_the_engines() -> None:
    served = {name: result(**{"run 1": run(1.0)}) for name in ("vllm-api4", "tangram-1", "vllm")}
    engines = [engine for _, engine, _, _ in compare_ways({}, served)]
    assert engines == ["vllm", "tangram-1", "vllm-api4"]


def test_of_a_trace_the_fastest_speed_that_held_is_shown_and_what_was_too_fast() -> None:
    waits = {"ttft_s": {"p50": 0.5, "p90": 2.0}}
    trace = {"speed 2": waits, "speed 1.5": waits, "given up": "speed 2.1: given up after 9 s"}
    found = {"vllm": {"cases": {"trace": trace}}}
    none = {"vllm": {"cases": {"trace": {"given up": "speed 0.1: given up after 9 s"}}}}
    assert list(list_speeds({"inside": found, "HTTP": none})) == [
        ("vllm", "inside", "speed 2 (p50 0.50, p90 2.00)", "speed 2.1: given up after 9 s"),
        ("vllm", "HTTP", "none", "speed 0.1: given up after 9 s"),
    ]
