"""Thin result files of `tangram eval` for docs/accuracy-tables.md: all scores, no replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.results import (
    AnsweredSample,
    AnyCell,
    Cell,
    Fidelity,
    FidelityCell,
    GradedAnswer,
    Results,
    Score,
    Setting,
)

_DIGITS = 4


class ThinCell(BaseModel):
    """A cell; `setting` and `environment` are places in the lists of the file.

    `scores` are those of its samples, in the order of the setting's. Where questions have
    categories, `answers` are the scores of each question of a sample. In fidelity, `passages` have
    four figures each.
    """

    model_config = ConfigDict(extra="forbid")

    method: Method
    setting: int
    environment: int
    basis: dict[str, Any]
    seconds: float
    footprint: float | None = None
    filler_tokens: float = 0.0
    scores: list[float] = []
    answers: list[list[float]] = []
    passages: list[Fidelity] = []


class Thin(BaseModel):
    """All cells of one or more result files, each once.

    `samples` has task and number of each sample, by setting. `categories` has those of each
    question of a sample, by setting, where questions have them.
    """

    model_config = ConfigDict(extra="forbid")

    commands: list[str]
    settings: list[Setting]
    samples: list[list[tuple[str, int]]]
    categories: dict[int, list[list[str | None]]] = {}
    environments: list[dict[str, Any]]
    cells: list[ThinCell]

    @classmethod
    def of(cls, files: Sequence[Results], beside: Thin | None = None) -> Thin:
        """The cells of `beside` and those that `files` add.

        Of equal method, setting and basis the first counts. Raises `ValueError` if two have
        different samples.
        """
        thin = (
            cls(commands=[], settings=[], samples=[], environments=[], cells=[])
            if beside is None
            else beside
        )
        thin = thin.model_copy(deep=True)
        thin.commands = list(dict.fromkeys([*thin.commands, *(one.command for one in files)]))
        for cell in (cell for one in files for cell in one.cells):
            thin._take(cell)
        return thin

    def _take(self, cell: AnyCell) -> None:
        samples = [(one.task, one.number) for one in cell.samples] if isinstance(cell, Cell) else []
        if cell.setting not in self.settings:
            self.settings.append(cell.setting)
            self.samples.append(samples)
            if categories := _categories(cell):
                self.categories[len(self.settings) - 1] = categories
        setting = self.settings.index(cell.setting)
        if samples != self.samples[setting]:
            raise ValueError(
                f"{cell.method.title} has other samples of {cell.setting.suite} than the cells "
                "before it"
            )
        if any(
            (one.method, one.setting, one.basis) == (cell.method, setting, cell.basis)
            for one in self.cells
        ):
            return
        if cell.environment not in self.environments:
            self.environments.append(cell.environment)
        own: dict[str, Any] = {"passages": [_round(one) for one in getattr(cell, "passages", ())]}
        if isinstance(cell, Cell):
            scores = [
                [round(answer.score, _DIGITS) for answer in one.answers] for one in cell.samples
            ]
            own = {
                "scores": []
                if setting in self.categories
                else [round(one.score, _DIGITS) for one in cell.samples],
                "answers": scores if setting in self.categories else [],
                "footprint": cell.footprint,
                "filler_tokens": cell.filler_tokens,
            }
        where = self.environments.index(cell.environment)
        self.cells.append(
            ThinCell(
                method=cell.method,
                setting=setting,
                environment=where,
                basis=cell.basis,
                seconds=cell.seconds,
                **own,
            )
        )

    def whole(self) -> list[AnyCell]:
        """The cells for `tangram_lab.accuracy.score_report`.

        Without categories a sample has one answer.
        """
        return [self._whole(cell) for cell in self.cells]

    def _whole(self, cell: ThinCell) -> AnyCell:
        common: dict[str, Any] = {
            "method": cell.method,
            "setting": self.settings[cell.setting],
            "basis": cell.basis,
            "seconds": cell.seconds,
            "environment": self.environments[cell.environment],
        }
        if cell.passages:
            return FidelityCell(passages=tuple(cell.passages), **common)
        scores = cell.answers or [[score] for score in cell.scores]
        categories = self.categories.get(cell.setting) or [[None] for _ in scores]
        samples = tuple(
            AnsweredSample(
                task=task,
                number=number,
                answers=tuple(_answer(*one) for one in zip(own, named, strict=True)),
            )
            for (task, number), own, named in zip(
                self.samples[cell.setting], scores, categories, strict=True
            )
        )
        return Cell(
            score=Score.of([one.score for one in samples]),
            by_task=_by_task(samples),
            footprint=cell.footprint,
            filler_tokens=cell.filler_tokens,
            samples=samples,
            **common,
        )

    @classmethod
    def load(cls, path: Path) -> Thin:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        """One cell per line, so that changes are readable."""
        parts = [
            f'"{name}": {self._json(name)}'
            for name in ("commands", "settings", "samples", "categories", "environments")
        ]
        cells = ",\n".join(cell.model_dump_json(exclude_defaults=True) for cell in self.cells)
        path.write_text(
            "{" + ",\n".join([*parts, f'"cells": [\n{cells}\n]']) + "}\n", encoding="utf-8"
        )

    def _json(self, name: str) -> str:
        return self.model_copy(update={"cells": []}).model_dump_json(include={name})[
            len(name) + 4 : -1
        ]


def _answer(score: float, category: str | None) -> GradedAnswer:
    return GradedAnswer(score=score, reply="", prompt_tokens=0, reply_tokens=0, category=category)


def _categories(cell: AnyCell) -> list[list[str | None]]:
    """The categories of each sample's questions; empty where they have none."""
    if not isinstance(cell, Cell):
        return []
    found = [[answer.category for answer in one.answers] for one in cell.samples]
    return found if any(category is not None for own in found for category in own) else []


def _by_task(samples: Iterable[AnsweredSample]) -> dict[str, Score]:
    found: dict[str, list[float]] = {}
    for one in samples:
        found.setdefault(one.task, []).append(one.score)
    return {task: Score.of(scores) for task, scores in found.items()}


def _round(passage: Fidelity) -> Fidelity:
    return Fidelity(
        **{name: round(value, 2 * _DIGITS) for name, value in passage.model_dump().items()}
    )
