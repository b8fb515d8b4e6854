"""The quick check has a floor for all it measures, and the page a place for its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import accuracy_page, eval_quick
from tangram.evaluate.results import Cell, Results, Score
from tests.host.test_eval_run import StubBench, measure


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    return measure(tmp_path / "r.json", StubBench())


def test_every_score_that_is_measured_has_a_floor() -> None:
    floors = json.loads(eval_quick.FLOORS.read_text())
    names = {method.name for asked in eval_quick.ASKED for method in eval_quick.GRID.methods(asked.context_tokens)}
    assert {suite: set(own) for suite, own in floors.items()} == {asked.suite: names for asked in eval_quick.ASKED}
    assert all(0.0 <= floor < 1.0 for own in floors.values() for floor in own.values())


def test_a_score_below_its_floor_is_named(cells: list[Cell]) -> None:
    floors = {suite: {"full": 0.9, "uniform": 0.4, "static": 0.8} for suite in ("ruler", "multiturn")}
    assert eval_quick.below(cells, floors) == []
    worse = [cell.model_copy(update={"score": Score(mean=0.75, stderr=None, samples=1)}) for cell in cells]
    said = eval_quick.below(worse, floors)
    assert len(said) == 4 and "static, keydiff, ρ 0.5" in said[-1] and "0.750 is below its floor of 0.8" in said[-1]


def test_the_tables_are_written_into_the_page(cells: list[Cell], tmp_path: Path) -> None:
    page, kept = tmp_path / "accuracy.md", tmp_path / "kept.json"
    page.write_text(accuracy_page.PAGE.read_text())
    Results(command="tangram eval tiny", cells=cells).save(kept)
    for _ in range(2):
        accuracy_page.main([str(kept), "--page", str(page)])
        text = page.read_text()
        assert text.count("| static − full | keydiff | -16.7 ± 8.3 |") == 2 and "`tangram eval tiny`" in text
    assert text.startswith("# Accuracy") and text.rstrip().endswith("<!-- end eval -->")
