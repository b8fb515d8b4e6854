"""The grid's bookkeeping, with engines that know some answers: what is kept, resumed, compared and
reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.tests.host.asking import sample
from lab.tests.host.test_eval_prompts import CODEC
from tangram.errors import ConfigError
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.results import Cell, Results, Score, Setting
from tangram_lab.accuracy.run import Ask, PlannedCell, Recalls, Reply, plan_cells, run
from tangram_lab.accuracy.sample_prompts import SamplePrompts, SuitePrompts, prompts_of
from tangram_lab.accuracy.score_report import difference, label, report

FULL = Method("full")
STATIC = Method("static", 0.5, "keydiff", 64, "model", 2.0, 4)
UNIFORM = Method("uniform", 0.5, "keydiff", 64, None, None, 4)
METHODS = [FULL, UNIFORM, STATIC]
# Which of the four questions of a sample each method knows.
KNOWN = {"full": 4, "uniform": 1, "static": 3, "dynamic": 3, "one-shot": 3, "lossless": 4}


def suite(name: str, task: str) -> tuple[SuitePrompts, Setting]:
    samples = tuple(prompts_of(sample(name, task, 600, number), CODEC, None) for number in range(3))
    setting = Setting(
        model="m",
        weights_sha256="0",
        dtype="float32",
        kv_cache_dtype="auto",
        page_tokens=16,
        heads_per_page=4,
        suite=name,
        samples=3,
        context_tokens=600,
        seed=0,
        aligned=False,
        prompts_sha256=f"{name}/{task}",
    )
    return SuitePrompts(name, samples, setting.prompts_sha256), setting


SUITES = [suite("ruler", "niah_multikey_1"), suite("multiturn", "report")]


class StubBench:
    """Answers at once; sample 0 is always right. `fails_at` interrupts before that many cells are
    answered.
    """

    def __init__(self, fails_at: int | None = None, parameters: int = 1) -> None:
        self.opens: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.fails_at, self.parameters = fails_at, parameters

    def basis(self, method: Method) -> Mapping[str, Any]:
        return {} if method.scorer is None else {"scorer_parameters": {"window": self.parameters}}

    def environment(self) -> Mapping[str, Any]:
        return {"cpu": "a stub", "commit": "1234"}

    @contextmanager
    def open(self, methods: Sequence[Method]) -> Iterator[Ask]:
        self.opens.append(methods[0].name)

        def ask(
            method: Method, samples: Sequence[SamplePrompts], told: Callable[[int], None]
        ) -> list[tuple[Reply, ...]]:
            assert method in methods
            if len(self.asked) == self.fails_at:
                raise KeyboardInterrupt
            self.asked.append((method.name, samples[0].sample.suite))
            told(sum(len(one.prompts) for one in samples))
            return [self._replies(method, one, number) for number, one in enumerate(samples)]

        yield ask

    def recall(self, method: Method, prompts: SuitePrompts) -> Recalls:
        raise AssertionError("only conversations are asked for it")

    def _replies(self, method: Method, one: SamplePrompts, number: int) -> tuple[Reply, ...]:
        known = 4 if number == 0 else KNOWN[method.name]
        held = int(100 * method.kv_retention)
        return tuple(
            Reply(", ".join(question.answers) if place < known else "?", 5, held, 100)
            for place, question in enumerate(one.sample.questions)
        )


class Silent:
    def expect(self, tokens: int) -> None:
        pass

    def turns_to(self, what: str) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def measure(path: Path, bench: StubBench, methods: Sequence[Method] = METHODS) -> list[Cell]:
    return run(
        bench,
        plan_cells(bench, methods, SUITES),
        Results.resume(path, "tangram eval"),
        path,
        Silent(),
    )


def test_a_cell_is_the_mean_over_samples_of_the_mean_over_questions(tmp_path: Path) -> None:
    cells = measure(tmp_path / "r.json", StubBench())
    by_name = {(cell.method.name, cell.setting.suite): cell for cell in cells}
    assert by_name["full", "ruler"].score == Score(mean=1.0, stderr=0.0, samples=3)
    uniform = by_name["uniform", "ruler"]
    assert uniform.score.mean == pytest.approx((1 + 0.25 + 0.25) / 3)
    assert uniform.score.stderr == pytest.approx(0.25)
    assert uniform.by_task == {"niah_multikey_1": uniform.score}
    assert uniform.footprint == 0.5 and by_name["full", "ruler"].footprint == 1.0
    assert [answer.score for answer in uniform.samples[1].answers] == [1, 0, 0, 0]
    less = difference(by_name["static", "ruler"], uniform)
    assert less.mean == pytest.approx(1 / 3) and less.stderr == pytest.approx(1 / 6), (
        "sample by sample"
    )


def test_ratios_of_one_method_share_an_engine_and_those_without_a_profile_do_not(
    tmp_path: Path,
) -> None:
    bench, lossless = StubBench(), replace(STATIC, name="lossless", alpha=None, sink_tokens=None)
    ratios = [
        replace(method, kv_retention=ratio)
        for method in (STATIC, lossless)
        for ratio in (0.5, 0.25)
    ]
    cells = measure(tmp_path / "results.json", bench, ratios)
    assert bench.opens == ["static", "lossless", "lossless"]
    assert [cell.method for cell in cells] == [method for method in ratios for _ in SUITES]


def test_an_interrupted_run_goes_on_where_it_was_and_opens_only_what_is_missing(
    tmp_path: Path,
) -> None:
    path, first, second, third = (
        tmp_path / "r.json",
        StubBench(fails_at=3),
        StubBench(),
        StubBench(),
    )
    with pytest.raises(KeyboardInterrupt):
        measure(path, first)
    assert [
        (cell.method.name, cell.setting.suite) for cell in Results.load(path).cells
    ] == first.asked
    assert len(first.asked) == 3 and [one.name for one in tmp_path.iterdir()] == ["r.json"]
    cells = measure(path, second)
    assert first.asked + second.asked == [(m.name, s[0].suite) for m in METHODS for s in SUITES]
    assert second.opens == ["uniform", "static"]
    again = measure(path, third)
    assert third.opens == [] and again == cells
    at_one_go = measure(tmp_path / "other.json", StubBench())
    assert [cell.samples for cell in again] == [cell.samples for cell in at_one_go]


def test_other_settings_are_other_cells(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    measure(path, StubBench())
    other = StubBench(parameters=2)
    measure(path, other)
    assert other.opens == ["uniform", "static"], "full has no scorer"
    assert len(Results.load(path).cells) == 10


def test_what_is_left_to_ask_is_known_beforehand() -> None:
    plans = plan_cells(StubBench(), METHODS, SUITES)
    assert [plan.questions for plan in plans] == [12, 12] * 3
    assert isinstance(plans[0], PlannedCell) and plans[0].find_in(Results(command="")) is None


@pytest.mark.parametrize(
    "content", ["[]", "{", json.dumps({"format_version": 2, "command": "", "cells": []})]
)
def test_a_file_of_another_kind_is_not_overwritten(content: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"r\.json .*result"):
        Results.resume(path, "tangram eval")
    assert path.read_text() == content


def test_a_folder_that_is_not_there_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path / "none")):
        Results.resume(tmp_path / "none" / "r.json", "tangram eval")


def test_the_report_has_scores_differences_and_footprints(tmp_path: Path) -> None:
    text = report(measure(tmp_path / "r.json", StubBench()))
    assert "### ruler, 600 tokens: m" in text and "### multiturn, 600 tokens: m" in text
    assert "| full | – | 100.0 ± 0.0 | – |" in text
    assert "| uniform | keydiff | – | 50.0 ± 25.0 |" in text
    assert "| static | keydiff | – | 83.3 ± 8.3 |" in text
    assert "| static − full | keydiff | -16.7 ± 8.3 |" in text
    assert "| static − uniform | keydiff | +33.3 ± 16.7 |" in text
    assert "dynamic" not in text
    assert "| static | keydiff | – | 0.500 |" in text
    assert "a stub" in text and "1234" in text


def test_categories_of_questions_are_told_apart_where_there_are_any(tmp_path: Path) -> None:
    (cell, *_) = measure(tmp_path / "r.json", StubBench(), [STATIC])
    answers = [
        tuple(
            answer.model_copy(update={"category": "temporal" if place < 2 else "single_hop"})
            for place, answer in enumerate(own.answers)
        )
        for own in cell.samples
    ]
    samples = tuple(
        own.model_copy(update={"answers": some})
        for own, some in zip(cell.samples, answers, strict=True)
    )
    text = report([cell.model_copy(update={"samples": samples})])
    assert "| method | scorer | ρ | single_hop | temporal |" in text
    assert "| static | keydiff | 0.5 | 66.7 | 100.0 |" in text, (
        "right are both of the first two, and 4 of 6 others"
    )


def test_variants_are_named_where_they_differ() -> None:
    other = Method("static", 0.3, "keydiff", 64, "model", 0.0, 4)
    assert label(STATIC, [FULL, STATIC]) == "static"
    assert (
        label(STATIC, [STATIC, other]) == "static, α 2"
        and label(other, [STATIC, other]) == "static, α 0"
    )


def test_nothing_measured_is_said() -> None:
    assert report([]) == "No cell has been measured.\n"
