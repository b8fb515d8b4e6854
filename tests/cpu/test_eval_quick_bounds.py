"""The quick check has bounds for all it measures; the control stands beside what was asked the same."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import eval_quick
from bench.accuracy.kvpress_table import Control, control_tables
from tangram.evaluate.prompts import SuitePrompts
from tangram.evaluate.results import AnyCell, Fidelity, FidelityCell, Score
from tests.host.test_eval_run import SUITES, StubBench, measure


@pytest.fixture
def cells(tmp_path: Path) -> list[AnyCell]:
    return measure(tmp_path / "r.json", StubBench())


def test_everything_that_is_measured_has_bounds() -> None:
    bounds = json.loads(eval_quick.BOUNDS.read_text())
    names = {method.name for asked in eval_quick.ASKED for method in eval_quick.GRID.methods(asked.context_tokens)}
    assert {suite: set(own) for suite, own in bounds.items()} == {asked.suite: names for asked in eval_quick.ASKED}
    for own in bounds.values():
        assert own["full"] and own["static"]
        for name, (least, most) in (each for numbers in own.values() for each in numbers.items()):
            assert least < most and (least, most) != (0.0, 1.0), f"{name} cannot be out of bounds"


def test_a_number_out_of_bounds_is_named(cells: list[AnyCell]) -> None:
    bounds = {
        suite: {"full": {"score": (0.9, 1.0)}, "uniform": {"score": (0.4, 1.0)}, "static": {"score": (0.8, 1.0)}}
        for suite in ("ruler", "multiturn")
    }
    assert eval_quick.outside(cells, bounds) == []
    worse = [cell.model_copy(update={"score": Score(mean=0.75, stderr=None, samples=1)}) for cell in cells]
    said = eval_quick.outside(worse, bounds)
    assert len(said) == 4 and "scope model: score is 0.750, it must lie in [0.8, 1.0]" in said[-1]


def read(cell: AnyCell, method: str, divergence: float) -> FidelityCell:
    passage = Fidelity(divergence=divergence, agreement=0.5, surprise=2.0, full_surprise=1.0)
    named = replace(cell.method, name=method)  # type: ignore[arg-type]
    return FidelityCell(
        method=named, setting=cell.setting, basis={}, seconds=1.0, environment={}, passages=(passage,)
    )  # fmt: skip


def test_fidelity_is_bounded_from_both_sides_and_equal_budgets_must_not_be_nearer(cells: list[AnyCell]) -> None:
    cell = read(cells[0], "static", 1.0)
    assert eval_quick.outside([cell], {"ruler": {"static": {"agreement": (0.5, 1.0)}}}) == []
    too_much = eval_quick.outside([cell], {"ruler": {"static": {"divergence": (0.0, 0.9)}}})
    assert "divergence is 1.000, it must lie in [0.0, 0.9]" in too_much[0]
    assert eval_quick.overtaken([cell, read(cells[0], "uniform", 1.1)]) == []
    assert (
        "no better than equal ones (divergence or −score 1.000, 0.900)"
        in eval_quick.overtaken([cell, read(cells[0], "uniform", 0.9)])[0]
    )


def control(folder: Path, prompts: SuitePrompts, known: int) -> Control:
    """kvpress, at half the cache, knowing the first `known` answers of each sample."""
    samples = [
        {"task": one.sample.task, "questions": [asdict(question) for question in one.sample.questions],
         "replies": [", ".join(q.answers) if i < known else "?" for i, q in enumerate(one.sample.questions)]}
        for one in prompts.samples
    ]  # fmt: skip
    cell = {"scorer": "keydiff", "kv_retention": 0.5, "prompts_sha256": prompts.sha256, "suite": prompts.suite}
    content = {"command": "control", "environment": {"kvpress": "0.5.5"}}
    (folder / "control.json").write_text(
        json.dumps({**content, "cells": [{**cell, "seconds": 1.0, "samples": samples}]})
    )
    return Control.graded(folder / "control.json")


def test_the_control_stands_beside_what_was_asked_the_same(tmp_path: Path, cells: list[AnyCell]) -> None:
    found = control(tmp_path, SUITES[0][0], known=2)
    found.save(tmp_path / "kept.json")
    assert Control.load(tmp_path / "kept.json") == found
    # The stub's settings have digests of their own.
    mine = found.cells[0].model_copy(update={"prompts_sha256": SUITES[0][1].prompts_sha256})
    found = found.model_copy(update={"cells": [mine]})
    text = control_tables(found, cells)
    assert "| kvpress, Ada-KV | keydiff | 50.0 ± 0.0 |" in text
    assert "| static | keydiff | 83.3 ± 8.3 |" in text and "| uniform | keydiff | 50.0 ± 25.0 |" in text
    other = found.cells[0].model_copy(update={"prompts_sha256": "another"})
    with pytest.raises(ValueError, match="prompts_sha256 another of suite ruler is in no cell"):
        control_tables(found.model_copy(update={"cells": [other]}), cells)
