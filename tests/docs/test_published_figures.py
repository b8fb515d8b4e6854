"""What is published comes with how it was measured, and is what is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.render.page import DOCS, RESULTS, Page
from tangram.compress.profile import ALPHA

Result = dict[str, Any]


def results(prefix: str) -> dict[str, Result]:
    """The result files of a kind, by what follows the prefix."""
    paths = sorted(RESULTS.glob(f"{prefix}*.json"))
    found = {path.stem.removeprefix(prefix): json.loads(path.read_text()) for path in paths}
    assert found, f"there is no {RESULTS}/{prefix}*.json"
    return found


HTTP, REPORTS = results("http_"), results("calibration_")
BLOCKS = Page("performance").blocks()
KERNELS = {name: result for name, result in results("kernels_").items() if name in BLOCKS}
SERVING = {f"serving{name}": result for name, result in results("serving").items()}
PICTURED = ("keydiff", "fastkvzip", "snapkv")


def assert_told(result: Result, machine: str) -> None:
    """A date's commit, with nothing uncommitted, and the machine."""
    where = result["environment"]
    assert where["commit"] and not where["commit"].endswith("+") and where[machine]


@pytest.mark.parametrize("name", KERNELS)
def test_a_figure_of_kernels_comes_with_its_command_machine_and_commit(name: str) -> None:
    assert KERNELS[name]["command"].startswith(("python -m bench.", "tangram bench "))
    assert_told(KERNELS[name], "cpu")


@pytest.mark.parametrize("kind", HTTP)
def test_a_figure_of_servers_comes_with_its_command_machine_and_commit(kind: str) -> None:
    assert f" make {kind}" in HTTP[kind]["command"]
    assert_told(HTTP[kind], "cpu")


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_comes_with_its_command_machine_and_commit(name: str) -> None:
    assert REPORTS[name]["command"].startswith("tangram calibrate ")
    assert_told(REPORTS[name], "cpu")
    assert REPORTS[name]["environment"]["torch"]


@pytest.mark.parametrize("name", SERVING)
def test_an_engine_comes_with_its_command_machine_and_commit(name: str) -> None:
    assert SERVING[name]["command"].startswith("python -m bench.serving.compare ")
    assert_told(SERVING[name], "gpu")


@pytest.mark.parametrize("kind", HTTP)
def test_a_run_that_is_shorter_than_the_command_says_so(kind: str, tmp_path: Path) -> None:
    def block(seconds: float) -> str:
        changed = HTTP[kind] | {"options": {**HTTP[kind]["options"], "seconds": seconds}}
        (tmp_path / f"http_{kind}.json").write_text(json.dumps(changed))
        return Page("load", tmp_path).blocks()[kind]

    assert "A short run" in block(7) and "A short run" not in block(5000)


def test_what_is_published_kept_every_law() -> None:
    assert HTTP["overload"]["broken"] == []
    assert HTTP["load"]["figures"]["failed"] == 0
    statuses = [status for answers in HTTP["fuzz"]["answers"].values() for status in answers]
    assert statuses and not [status for status in statuses if status.startswith("5")]


@pytest.mark.parametrize("name", REPORTS)
def test_reports_are_of_the_budgets_that_are_served(name: str) -> None:
    assert REPORTS[name]["alpha"] == ALPHA


@pytest.mark.parametrize("name", REPORTS)
def test_a_hundred_samples_are_among_those_that_are_tried(name: str) -> None:
    by_retention = REPORTS[name]["retentions"].values()
    assert by_retention and all("100" in figures["samples_needed"] for figures in by_retention)


@pytest.mark.parametrize("name", PICTURED)
def test_the_picture_of_a_report_is_on_the_page(name: str) -> None:
    picture = DOCS / "pictures" / f"calibration_{name}.png"
    assert f"pictures/{picture.name}" in (DOCS / "calibration.md").read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG")
