"""Result files of `tangram eval` made thin for docs/accuracy.md: every sample's score stays, replies go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tangram.evaluate.methods import Method
from tangram.evaluate.results import (
    Answer,
    AnsweredSample,
    AnyCell,
    Cell,
    Fidelity,
    FidelityCell,
    Results,
    Score,
    Setting,
)

_DIGITS = 4


class ThinCell(BaseModel):
    """A cell; `setting` and `environment` are places in the lists of the file.

    `scores` are those of its samples, in the order of the setting's; of fidelity, `passages` have four figures each.
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
    passages: list[Fidelity] = []


class Thin(BaseModel):
    """All cells of one or more result files, each once. `samples` has task and number of each sample, by setting."""

    model_config = ConfigDict(extra="forbid")

    commands: list[str]
    settings: list[Setting]
    samples: list[list[tuple[str, int]]]
    environments: list[dict[str, Any]]
    cells: list[ThinCell]

    @classmethod
    def of(cls, files: Sequence[Results], beside: Thin | None = None) -> Thin:
        """What `beside` has and `files` add. Of equal method, setting and basis the first counts.

        Raises `ValueError` if two have other samples.
        """
        thin = cls(commands=[], settings=[], samples=[], environments=[], cells=[]) if beside is None else beside
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
        setting = self.settings.index(cell.setting)
        if samples != self.samples[setting]:
            raise ValueError(f"{cell.method.title} has other samples of {cell.setting.suite} than the cells before it")
        if any((one.method, one.setting, one.basis) == (cell.method, setting, cell.basis) for one in self.cells):
            return
        if cell.environment not in self.environments:
            self.environments.append(cell.environment)
        own: dict[str, Any] = {"passages": [_rounded(one) for one in getattr(cell, "passages", ())]}
        if isinstance(cell, Cell):
            own = {
                "scores": [round(one.score, _DIGITS) for one in cell.samples],
                "footprint": cell.footprint,
                "filler_tokens": cell.filler_tokens,
            }
        where = self.environments.index(cell.environment)
        self.cells.append(
            ThinCell(
                method=cell.method, setting=setting, environment=where, basis=cell.basis, seconds=cell.seconds, **own
            )
        )

    def whole(self) -> list[AnyCell]:
        """The cells as `tangram.evaluate.report` reads them: one answer a sample, which has the sample's score."""
        return [self._whole(cell) for cell in self.cells]

    def _whole(self, cell: ThinCell) -> AnyCell:
        told: dict[str, Any] = {
            "method": cell.method, "setting": self.settings[cell.setting], "basis": cell.basis,
            "seconds": cell.seconds, "environment": self.environments[cell.environment],
        }  # fmt: skip
        if cell.passages:
            return FidelityCell(passages=tuple(cell.passages), **told)
        known = list(zip(self.samples[cell.setting], cell.scores, strict=True))
        return Cell(
            score=Score.of(cell.scores), by_task=_by_task(known), footprint=cell.footprint,
            filler_tokens=cell.filler_tokens,
            samples=tuple(
                AnsweredSample(
                    task=task, number=number,
                    answers=(Answer(score=score, reply="", prompt_tokens=0, reply_tokens=0),),
                )
                for (task, number), score in known
            ),
            **told,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Thin:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        """A line a cell, so that a change can be read."""
        parts = [f'"{name}": {self._json(name)}' for name in ("commands", "settings", "samples", "environments")]
        cells = ",\n".join(cell.model_dump_json(exclude_defaults=True) for cell in self.cells)
        path.write_text("{" + ",\n".join([*parts, f'"cells": [\n{cells}\n]']) + "}\n", encoding="utf-8")

    def _json(self, name: str) -> str:
        return self.model_copy(update={"cells": []}).model_dump_json(include={name})[len(name) + 4 : -1]


def _by_task(known: Iterable[tuple[tuple[str, int], float]]) -> dict[str, Score]:
    found: dict[str, list[float]] = {}
    for (task, _), score in known:
        found.setdefault(task, []).append(score)
    return {task: Score.of(scores) for task, scores in found.items()}


def _rounded(passage: Fidelity) -> Fidelity:
    return Fidelity(**{name: round(value, 2 * _DIGITS) for name, value in passage.model_dump().items()})
