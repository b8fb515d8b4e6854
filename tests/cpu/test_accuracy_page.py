"""The quick check has a floor for all it measures, and the page a place for its tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import accuracy_page, eval_quick
from bench.kvpress_table import Control, control_tables
from tangram.evaluate.prompts import SuitePrompts
from tangram.evaluate.results import AnyCell, Fidelity, FidelityCell, Results, Score
from tests.host.test_eval_run import SUITES, StubBench, measure


@pytest.fixture
def cells(tmp_path: Path) -> list[AnyCell]:
    return measure(tmp_path / "r.json", StubBench())


def test_every_score_that_is_measured_has_a_floor() -> None:
    floors = json.loads(eval_quick.FLOORS.read_text())
    names = {method.name for asked in eval_quick.ASKED for method in eval_quick.GRID.methods(asked.context_tokens)}
    assert {suite: set(own) for suite, own in floors.items()} == {asked.suite: names for asked in eval_quick.ASKED}
    assert all(0.0 <= floor < 1.0 for own in floors.values() for floor in own.values())


def test_a_score_below_its_floor_is_named(cells: list[AnyCell]) -> None:
    floors = {suite: {"full": 0.9, "uniform": 0.4, "static": 0.8} for suite in ("ruler", "multiturn")}
    assert eval_quick.below(cells, floors) == []
    worse = [cell.model_copy(update={"score": Score(mean=0.75, stderr=None, samples=1)}) for cell in cells]
    said = eval_quick.below(worse, floors)
    assert len(said) == 4 and "static, keydiff, ρ 0.5" in said[-1] and "0.750 is below its floor of 0.8" in said[-1]


def test_fidelity_has_a_floor_on_agreement(cells: list[AnyCell]) -> None:
    passage = Fidelity(divergence=1.0, agreement=0.5, surprise=2.0, full_surprise=1.0)
    one = cells[0]
    cell = FidelityCell(
        method=one.method, setting=one.setting, basis={}, seconds=1.0, environment={}, passages=(passage,)
    )  # fmt: skip
    assert eval_quick.below([cell], {"ruler": {"full": 0.5}}) == []
    assert "0.500 is below its floor of 0.6" in eval_quick.below([cell], {"ruler": {"full": 0.6}})[0]


def control(prompts: SuitePrompts, known: int) -> Control:
    """kvpress, at half the cache, knowing the first `known` answers of each sample."""
    samples = [
        {"task": one.sample.task, "questions": [asdict(question) for question in one.sample.questions],
         "replies": [", ".join(q.answers) if i < known else "?" for i, q in enumerate(one.sample.questions)]}
        for one in prompts.samples
    ]  # fmt: skip
    cell = {"scorer": "keydiff", "kv_retention": 0.5, "prompts_sha256": prompts.sha256, "suite": prompts.suite}
    content = {"command": "control", "environment": {"kvpress": "0.5.5"}}
    return Control.model_validate({**content, "cells": [{**cell, "seconds": 1.0, "samples": samples}]})


def test_the_control_stands_beside_what_was_asked_the_same(cells: list[AnyCell], tmp_path: Path) -> None:
    found = control(SUITES[0][0], known=2)
    # The stub's settings have digests of their own.
    mine = found.cells[0].model_copy(update={"prompts_sha256": SUITES[0][1].prompts_sha256})
    found = found.model_copy(update={"cells": [mine]})
    text = control_tables(found, cells)
    assert "| kvpress, Ada-KV | keydiff | 50.0 ± 0.0 |" in text
    assert "| static | keydiff | 83.3 ± 8.3 |" in text and "| uniform | keydiff | 50.0 ± 25.0 |" in text
    page, kept, theirs = tmp_path / "accuracy.md", tmp_path / "kept.json", tmp_path / "control.json"
    page.write_text(accuracy_page.PAGE.read_text())
    Results(command="tangram eval tiny", cells=cells).save(kept)
    theirs.write_text(found.model_dump_json())
    accuracy_page.main([str(kept), "--control", str(theirs), "--page", str(page)])
    assert "beside kvpress" in page.read_text()
    other = found.cells[0].model_copy(update={"prompts_sha256": "another"})
    with pytest.raises(ValueError, match="prompts_sha256 another of suite ruler is in no cell"):
        control_tables(found.model_copy(update={"cells": [other]}), cells)


def test_the_tables_are_written_into_the_page(cells: list[AnyCell], tmp_path: Path) -> None:
    page, kept = tmp_path / "accuracy.md", tmp_path / "kept.json"
    page.write_text(accuracy_page.PAGE.read_text())
    Results(command="tangram eval tiny", cells=cells).save(kept)
    for _ in range(2):
        accuracy_page.main([str(kept), "--page", str(page)])
        text = page.read_text()
        assert text.count("| static − full | keydiff | -16.7 ± 8.3 |") == 2 and "`tangram eval tiny`" in text
    assert text.startswith("# Accuracy") and text.rstrip().endswith("<!-- end eval -->")
