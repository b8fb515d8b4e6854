"""Which cases of a run of kernel benchmarks are compared with their floor."""

from __future__ import annotations

from typing import Any

from bench.kernels.summary import floor_cases

NAME = "packing:thrifty"


def row(us: float, by_bytes: float, by_arithmetic: float, name: str = NAME) -> dict[str, Any]:
    counters = {"task_kv_bytes": 400, "merged_bytes": 100, "tasks_per_multiprocessor": 2.5}
    return {
        "labels": {"heads": "32/8", "config": "1,10_4096,416"},
        "byte_floor_us": by_bytes,
        "arithmetic_floor_us": by_arithmetic,
        "unique_bytes": 200,
        "contenders": [{"name": name, "median_us": us, "counters": counters}],
    }


def test_cases_with_a_floor_above_thirty_us_are_held_against_it() -> None:
    rows = [
        row(50.0, 40.0, 10.0),
        row(100.0, 20.0, 50.0),
        row(500.0, 29.0, 29.0),
        row(500.0, 40.0, 10.0, "packing:off"),
    ]
    found = floor_cases({"rows": rows, "ceilings": {"copy_bytes_per_us": 10.0}}, NAME)
    assert [(case.floor_us, case.floors, case.misses) for case in found] == [
        (40.0, 1.25, False),
        (50.0, 2.0, True),
    ]
    assert [case.by_arithmetic for case in found] == [False, True]
    first = found[0]
    assert (first.distinct_us, first.loaded_us, first.merged_us) == (20.0, 40.0, 10.0)
