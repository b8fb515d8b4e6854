"""docs/calibration.md says what the reports of `tangram calibrate` say."""

from __future__ import annotations

import pytest

from bench.calibration_page import PAGE, PICTURED, found, written
from bench.kernels.family import RESULTS
from bench.kernels.page import replaced
from tangram.compress.profile import ALPHA

REPORTS = found(RESULTS)


@pytest.mark.parametrize("name", written(REPORTS))
def test_every_table_is_that_of_the_reports(name: str) -> None:
    page = PAGE.read_text()
    assert replaced(page, name, written(REPORTS)[name]) == page, "run python -m bench.calibration_page"


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_comes_with_its_command_machine_and_commit(name: str) -> None:
    where = REPORTS[name]["environment"]
    assert REPORTS[name]["command"].startswith("tangram calibrate ")
    assert where["commit"] and not where["commit"].endswith("+") and where["cpu"] and where["torch"]


@pytest.mark.parametrize("name", REPORTS)
def test_reports_are_of_the_budgets_that_are_served(name: str) -> None:
    assert REPORTS[name]["alpha"] == ALPHA


@pytest.mark.parametrize("name", REPORTS)
def test_a_hundred_samples_are_among_those_that_are_tried(name: str) -> None:
    assert all("100" in figures["samples_needed"] for figures in REPORTS[name]["retentions"].values())


@pytest.mark.parametrize("name", PICTURED)
def test_the_picture_of_a_report_is_on_the_page(name: str) -> None:
    picture = PAGE.parent / "pictures" / f"calibration_{name}.png"
    assert f"pictures/{picture.name}" in PAGE.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
