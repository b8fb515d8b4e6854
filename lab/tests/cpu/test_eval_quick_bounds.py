"""The quick check has bounds for all it measures; the control stands beside what was asked the
same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import eval_quick
from bench.accuracy.kvpress_file import Control
from bench.render.page import Page
from lab.tests.host.test_eval_run import SUITES, StubBench, measure
from tangram.compress.profile import ALPHA, SINK_TOKENS
from tangram.compress.scorers import default_scope
from tangram.config import EngineConfig
from tangram_lab.accuracy.methods import Method, MethodName
from tangram_lab.accuracy.results import AnyCell, Fidelity, FidelityCell, Score
from tangram_lab.accuracy.sample_prompts import SuitePrompts
from tests.mentions import mentions


@pytest.fixture
def cells(tmp_path: Path) -> list[AnyCell]:
    return measure(tmp_path / "r.json", StubBench())


def test_every_number_has_bounds_that_it_can_leave() -> None:
    bounds = json.loads(eval_quick.BOUNDS.read_text())
    asked: dict[str, set[str]] = {}
    for grid, suites, _ in eval_quick.ASKED:
        for one in suites:
            names = {
                eval_quick.name_method(method)
                for method in grid.methods(one.context_tokens, default_scope)
            }
            asked[one.suite] = asked.get(one.suite, set()) | names
    assert {suite: set(own) for suite, own in bounds.items()} == asked
    for numbers in (numbers for own in bounds.values() for numbers in own.values()):
        for name, (least, seen, most) in numbers.items():
            assert least <= seen <= most and least < most, name
            assert (least, most) != (0.0, 1.0), f"{name} cannot be out of bounds"
    for suite, scorer, name in (
        ("ruler", "fastkvzip", "score"),
        ("ruler", "keydiff", "score"),
        ("fidelity", "fastkvzip", "divergence"),
        ("fidelity", "fastkvzip", "agreement"),
    ):
        least, _, most = bounds[suite][f"static, {scorer}"][name]
        assert not least <= bounds[suite][f"uniform, {scorer}"][name][1] <= most, (
            "equal shares would be noticed"
        )


def test_bounds_are_asked_for_every_number_that_is_told(cells: list[AnyCell]) -> None:
    told = {
        eval_quick.name_method(cell.method): set(eval_quick.numbers(cell))
        for cell in cells
        if cell.setting.suite == "ruler"
    }
    assert told["full"] == {"score", "niah_multikey_1", "footprint"}
    assert told["static, keydiff"] == told["uniform, keydiff"] == told["full"]
    with pytest.raises(KeyError, match="footprint"):
        whole = {"score": (0.9, 1.0, 1.0), "niah_multikey_1": (0.9, 1.0, 1.0)}
        eval_quick.outside(cells[:1], {"ruler": {"full": whole}})
    known = json.loads(eval_quick.BOUNDS.read_text())
    assert set(known["fidelity"]["static, fastkvzip"]) == {"perplexity", "divergence", "agreement"}
    assert set(known["fidelity"]["full"]) == {"perplexity"}


def test_a_number_out_of_bounds_is_named(cells: list[AnyCell]) -> None:
    wide = {
        "footprint": (0.0, 0.5, 1.1),
        "niah_multikey_1": (0.0, 0.5, 1.1),
        "report": (0.0, 0.5, 1.1),
    }
    bounds = {
        suite: {
            "full": {"score": (0.9, 1.0, 1.0), **wide},
            "uniform, keydiff": {"score": (0.4, 0.5, 1.0), **wide},
            "static, keydiff": {"score": (0.8, 0.83, 1.0), **wide},
        }
        for suite in ("ruler", "multiturn")
    }
    assert eval_quick.outside(cells, bounds) == []
    worse = [
        cell.model_copy(update={"score": Score(mean=0.75, stderr=None, samples=1)})
        for cell in cells
    ]
    said = eval_quick.outside(worse, bounds)
    assert len(said) == 4 and mentions(said[-1], "scope model: score 0.750, [0.8, 1.0] 0.83")


def read(cell: AnyCell, method: MethodName, divergence: float) -> FidelityCell:
    passage = Fidelity(divergence=divergence, agreement=0.5, surprise=2.0, full_surprise=1.0)
    named = replace(cell.method, name=method)
    return FidelityCell(
        method=named,
        setting=cell.setting,
        basis={},
        seconds=1.0,
        environment={},
        passages=(passage,),
    )


def test_fidelity_is_bounded_from_both_sides_and_equal_budgets_must_not_be_nearer(
    cells: list[AnyCell],
) -> None:
    full, uniform, static = (
        read(cell, cell.method.name, loss)
        for cell, loss in zip(cells[::2], (0.0, 1.1, 1.0), strict=True)
    )
    wide = {"perplexity": (1.0, 7.4, 8.0), "agreement": (0.5, 0.5, 0.9)}
    assert (
        eval_quick.outside(
            [static], {"ruler": {"static, keydiff": {**wide, "divergence": (0.0, 1.0, 1.1)}}}
        )
        == []
    )
    too_much = eval_quick.outside(
        [static], {"ruler": {"static, keydiff": {**wide, "divergence": (0.0, 0.8, 0.9)}}}
    )
    assert mentions(too_much[0], "divergence 1.000, [0.0, 0.9]")
    assert eval_quick.overtaken([full, static, uniform]) == []
    nearer = read(uniform, "uniform", 0.9)
    assert mentions(eval_quick.overtaken([static, nearer])[0], "ruler keydiff 1.000 0.900")


def control(folder: Path, prompts: SuitePrompts, known: int) -> Control:
    """kvpress, at half the cache, knowing the first `known` answers of each sample."""
    samples = [
        {
            "task": one.sample.task,
            "questions": [asdict(question) for question in one.sample.questions],
            "replies": [
                ", ".join(q.answers) if i < known else "?"
                for i, q in enumerate(one.sample.questions)
            ],
        }
        for one in prompts.samples
    ]
    cell = {
        "scorer": "keydiff",
        "kv_retention": 0.5,
        "prompts_sha256": prompts.sha256,
        "suite": prompts.suite,
    }
    content = {"command": "control", "environment": {"kvpress": "0.5.5"}}
    (folder / "control.json").write_text(
        json.dumps({**content, "cells": [{**cell, "seconds": 1.0, "samples": samples}]})
    )
    return Control.grade(folder / "control.json")


control_tables = Page("accuracy-tables").shared["kvpress"]
AT_DEFAULTS = [
    Method("full"),
    Method("uniform", 0.5, "keydiff", EngineConfig.chunk_tokens, None, None, SINK_TOKENS),
    Method("static", 0.5, "keydiff", EngineConfig.chunk_tokens, "model", ALPHA, SINK_TOKENS),
    Method("one-shot", 0.5, "keydiff", SUITES[0][1].context_tokens, "layer"),
]


def test_the_control_stands_beside_what_was_asked_the_same(tmp_path: Path) -> None:
    cells = measure(tmp_path / "r.json", StubBench(), AT_DEFAULTS)
    found = control(tmp_path, SUITES[0][0], known=2)
    found.save(tmp_path / "kept.json")
    assert Control.load(tmp_path / "kept.json") == found
    # The stub's settings have digests of their own.
    mine = found.cells[0].model_copy(update={"prompts_sha256": SUITES[0][1].prompts_sha256})
    everything = mine.model_copy(update={"scorer": "full", "kv_retention": 1.0})
    found = found.model_copy(update={"cells": [mine, everything]})
    text = control_tables(found, cells)
    assert "| kvpress, full | – | 50.0 ± 0.0 |" in text and "| full | – | 100.0 ± 0.0 |" in text
    assert "| kvpress, Ada-KV | keydiff | 50.0 ± 0.0 |" in text
    assert "| one-shot, layer − kvpress, Ada-KV | keydiff | +33.3 ± 8.3 |" in text
    other = found.cells[0].model_copy(update={"prompts_sha256": "another"})
    with pytest.raises(ValueError, match=r"prompts_sha256 another .*ruler"):
        control_tables(found.model_copy(update={"cells": [other]}), cells)


def test_a_control_is_added_to_one_that_was_measured_alike(tmp_path: Path) -> None:
    found = control(tmp_path, SUITES[0][0], known=2)
    later = found.model_copy(update={"environment": {"kvpress": "0.5.5", "python": "3.12.3"}})
    both = found.join(later)
    assert both.cells == [*found.cells, *later.cells] and both.environment["python"] == "3.12.3"
    with pytest.raises(ValueError, match=r"kvpress is 0\.5\.5"):
        found.join(found.model_copy(update={"environment": {"kvpress": "0.6"}}))
