"""Which lease a table of docs/serving.md shows for a case."""

from __future__ import annotations

from typing import Any

import pytest

from bench.serving.series import find_series

ROW = {"case": "prefill", "parts": ["run"], "figure": "seconds"}


def lease(date: str, seconds: float, engine: str = "vllm") -> dict[str, Any]:
    cases = {"prefill": {"run 1": {"seconds": seconds}}}
    return {engine: {"environment": {"date": date}, "cases": cases}}


@pytest.mark.parametrize(
    ("leases", "shown"),
    [
        ([lease("2026-11-21", 1.0), lease("2026-11-28", 2.0)], 1),
        ([lease("2026-11-28", 2.0), lease("2026-11-21", 1.0)], 0),
        ([lease("2026-11-28", 2.0), lease("2026-11-28", 1.0), lease("2026-11-28", 3.0)], 1),
        ([lease("2026-11-21", 1.0), lease("2026-11-28", 1.0, "tangram-1")], 0),
        ([{"vllm": {"environment": {"date": "2026-11-28"}, "cases": {}}}], None),
        (
            [
                lease("2026-11-28", 2.0) | lease("2026-11-28", 1.0, "tangram-0.5"),
                lease("2026-11-28", 1.0),
            ],
            0,
        ),
    ],
    ids=[
        *("the last day", "in any order", "that day's best", "one with the peer", "none has it"),
        "that of the most engines",
    ],
)
def test_the_peers_last_day_is_shown_and_its_best_lease(
    leases: list[dict[str, Any]], shown: int | None
) -> None:
    assert find_series(ROW, leases) == shown
