"""docs/load.md says what the result files say."""

from __future__ import annotations

import pytest

from bench.hammer.page import PAGE, RESULTS, found, written
from bench.kernels.page import replaced

MEASURED = found(RESULTS)


@pytest.mark.parametrize("kind", MEASURED)
def test_every_table_is_that_of_its_result_file(kind: str) -> None:
    page = PAGE.read_text()
    assert replaced(page, kind, written(kind, MEASURED[kind])) == page, "run python -m bench.hammer.page"


@pytest.mark.parametrize("kind", MEASURED)
def test_a_figure_comes_with_its_command_machine_and_commit(kind: str) -> None:
    where = MEASURED[kind]["environment"]
    assert f" make {kind}" in MEASURED[kind]["command"]
    assert where["commit"] and not where["commit"].endswith("+") and where["cpu"]


@pytest.mark.parametrize("kind", MEASURED)
def test_a_run_that_is_shorter_than_the_command_says_so(kind: str) -> None:
    result = MEASURED[kind]
    short, whole = ({**result, "options": {**result["options"], "seconds": seconds}} for seconds in (7, 5000))
    assert "A short run" in written(kind, short) and "A short run" not in written(kind, whole)


def test_what_is_published_kept_every_law() -> None:
    assert MEASURED["soak"]["broken"] == [] == MEASURED["overload"]["broken"]
    assert MEASURED["load"]["figures"]["failed"] == 0
    assert not [
        status for answers in MEASURED["fuzz"]["answers"].values() for status in answers if status.startswith("5")
    ]
