"""docs/performance.md says what the result files say."""

from __future__ import annotations

import pytest

from bench.kernels.family import RESULTS
from bench.kernels.page import PAGE, found, replaced, written

MEASURED = found(RESULTS)


@pytest.mark.parametrize("name", MEASURED)
def test_every_table_is_that_of_its_result_file(name: str) -> None:
    page = PAGE.read_text()
    assert replaced(page, name, written(name, MEASURED[name])) == page, "run python -m bench.kernels.page"


@pytest.mark.parametrize("name", MEASURED)
def test_a_figure_comes_with_its_command_machine_and_commit(name: str) -> None:
    where = MEASURED[name]["environment"]
    assert MEASURED[name]["command"].startswith(("python -m bench.", "tangram bench "))
    assert where["commit"] and not where["commit"].endswith("+") and where["cpu"]


def test_a_table_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- nowhere -->"):
        replaced("a page", "nowhere", "a table")
