"""Replies of the control beside Tangram's own, of the same prompts, graded by the same rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tangram.evaluate.grading import score
from tangram.evaluate.report import percent, rows
from tangram.evaluate.results import AnyCell, Cell, Score
from tangram.evaluate.sample import Question

_PRESSES = {"kvzip": "kvpress, KVzip"}
_DIGITS = 4


class ControlSample(BaseModel):
    model_config = ConfigDict(extra="forbid")

    task: str
    questions: list[Question]
    replies: list[str]

    def score(self) -> float:
        """The mean over its questions."""
        pairs = zip(self.questions, self.replies, strict=True)
        return sum(score(question, reply) for question, reply in pairs) / len(self.questions)


class ControlCell(BaseModel):
    """What one press was asked at one ρ."""

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
    """Files of presses that ran side by side, graded: replies go, every sample's score stays."""

    model_config = ConfigDict(extra="forbid")

    commands: list[str]
    environment: dict[str, Any]
    cells: list[GradedCell]

    @classmethod
    def graded(cls, *paths: Path) -> Control:
        """All cells of `paths`, files of kvpress_control.py."""
        files = [ControlFile.model_validate_json(path.read_text(encoding="utf-8")) for path in paths]
        cells = [
            GradedCell(
                **cell.model_dump(exclude={"samples"}), scores=[round(one.score(), _DIGITS) for one in cell.samples]
            )
            for file in files
            for cell in file.cells
        ]
        return cls(commands=[file.command for file in files], environment=files[0].environment, cells=cells)

    @classmethod
    def load(cls, path: Path) -> Control:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json() + "\n", encoding="utf-8")


def control_tables(control: Control, cells: Iterable[AnyCell]) -> str:
    """A table for each suite: scores of kvpress and of our compressing methods, by scorer and ρ.

    Raises `ValueError` if prompts of the control were never asked here: the two would not be comparable.
    """
    ours = [cell for cell in cells if isinstance(cell, Cell)]
    found = []
    for digest in dict.fromkeys(cell.prompts_sha256 for cell in control.cells):
        own = [cell for cell in ours if cell.setting.prompts_sha256 == digest]
        theirs = [cell for cell in control.cells if cell.prompts_sha256 == digest]
        if not own:
            raise ValueError(
                f"prompts_sha256 {digest} of suite {theirs[0].suite} is in no cell of the results: "
                "export the prompts with the options of tangram eval, --align-tokens its largest chunk"
            )
        found.append(f"### {theirs[0].suite}: beside kvpress\n\n{_table(theirs, own)}\n")
    where = ", ".join(f"{name} {value}" for name, value in control.environment.items())
    return "\n".join([*found, f"Control: {where}; {len(control.commands)} commands like `{control.commands[0]}`.\n"])


def _table(theirs: Sequence[GradedCell], own: Sequence[Cell]) -> str:
    """Lines of one scorer stand together, kvpress first."""
    scorers = list(dict.fromkeys(cell.scorer for cell in theirs))
    columns = sorted({cell.kv_retention for cell in theirs}, reverse=True)
    ours = rows([cell for cell in own if cell.method.scorer in scorers])
    lines = list[str]()
    for scorer in scorers:
        control = {cell.kv_retention: Score.of(cell.scores) for cell in theirs if cell.scorer == scorer}
        lines.append(_line(_PRESSES.get(scorer, "kvpress, Ada-KV"), scorer, columns, control))
        for (name, of_scorer), by_retention in ours.items():
            if of_scorer == scorer:
                scores = {retention: cell.score for retention, cell in by_retention.items()}
                lines.append(_line(name, scorer, columns, scores))
    head = " | ".join(f"ρ {column:g}" for column in columns)
    return "\n".join([f"| score, % | scorer | {head} |", "|---|---|" + "---:|" * len(columns), *lines])


def _line(name: str, scorer: str, columns: Sequence[float], scores: Mapping[float, Score]) -> str:
    shown = [percent(scores[column]) if column in scores else "–" for column in columns]
    return "| " + " | ".join([name, scorer, *shown]) + " |"
