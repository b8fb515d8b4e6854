"""Replies of the control, graded by Tangram's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tangram_lab.accuracy.grading import score_reply
from tangram_lab.accuracy.sample import Question

_DIGITS = 4


class ControlSample(BaseModel):
    model_config = ConfigDict(extra="forbid")

    task: str
    questions: list[Question]
    replies: list[str]

    def score(self) -> float:
        """The mean over its questions."""
        pairs = zip(self.questions, self.replies, strict=True)
        return sum(score_reply(question, reply) for question, reply in pairs) / len(self.questions)


class ControlCell(BaseModel):
    """The replies of one press at one ρ."""

    model_config = ConfigDict(extra="forbid")

    scorer: str
    kv_retention: float
    prompts_sha256: str
    suite: str
    seconds: float


class AnsweredCell(ControlCell):
    samples: list[ControlSample]


class ControlFile(BaseModel):
    """The file of bench/accuracy/kvpress_control.py."""

    model_config = ConfigDict(extra="forbid")

    command: str
    environment: dict[str, Any]
    cells: list[AnsweredCell]


class GradedCell(ControlCell):
    """The score of each sample, in the order of the prompts."""

    scores: list[float]


class Control(BaseModel):
    """Graded replies of presses that ran side by side; only scores are kept."""

    model_config = ConfigDict(extra="forbid")

    commands: list[str]
    environment: dict[str, Any]
    cells: list[GradedCell]

    @classmethod
    def grade(cls, *paths: Path) -> Control:
        """All cells of `paths`, files of kvpress_control.py."""
        files = [
            ControlFile.model_validate_json(path.read_text(encoding="utf-8")) for path in paths
        ]
        cells = [
            GradedCell(
                **cell.model_dump(exclude={"samples"}),
                scores=[round(one.score(), _DIGITS) for one in cell.samples],
            )
            for file in files
            for cell in file.cells
        ]
        return cls(
            commands=[file.command for file in files], environment=files[0].environment, cells=cells
        )

    def join(self, later: Control) -> Control:
        """Raises `ValueError` if their settings differ."""
        if other := [
            name
            for name, value in self.environment.items()
            if later.environment.get(name, value) != value
        ]:
            raise ValueError(
                f"{other[0]} is {self.environment[other[0]]} in the control that is kept and "
                f"{later.environment[other[0]]} in the new one: measure all of it anew, without "
                "--add"
            )
        return Control(
            commands=[*self.commands, *later.commands],
            environment=self.environment | later.environment,
            cells=[*self.cells, *later.cells],
        )

    @classmethod
    def load(cls, path: Path) -> Control:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json() + "\n", encoding="utf-8")
