"""Replies of the control beside Tangram's own, of the same prompts, graded by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from bench.accuracy.books import NONE, Books, table
from tangram.compress.profile import Scope
from tangram.lab.accuracy.grading import score
from tangram.lab.accuracy.methods import Method, MethodName
from tangram.lab.accuracy.report import percent
from tangram.lab.accuracy.results import AnyCell, Cell, Score
from tangram.lab.accuracy.sample import Question

# Presses that are no Ada-KV of the scorer of their name: what to call them, the scorer, and our scope that is theirs.
_PRESSES: dict[str, tuple[str, str, Scope]] = {
    "kvzip": ("kvpress, KVzip", "kvzip", "model"),
    "expected_attention_epsilon": ("kvpress, Ada-KV, ε 0.01", "expected_attention", "layer"),
}
FULL = "full"  # the press that drops nothing
_OURS: tuple[MethodName, ...] = ("uniform", "static", "dynamic")
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

    def joined(self, later: Control) -> Control:
        """Both. Raises `ValueError` if they were not measured alike."""
        if other := [name for name, value in self.environment.items() if later.environment.get(name, value) != value]:
            raise ValueError(
                f"{other[0]} is {self.environment[other[0]]} in the control that is kept and "
                f"{later.environment[other[0]]} in the new one: measure all of it anew, without --add"
            )
        return Control(
            commands=[*self.commands, *later.commands], environment=self.environment | later.environment,
            cells=[*self.cells, *later.cells],
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Control:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json() + "\n", encoding="utf-8")


def control_tables(control: Control, cells: Sequence[AnyCell]) -> str:
    """A table for each suite: scores of kvpress and of our compressing methods, by scorer and ρ, and differences.

    Raises `ValueError` if prompts of the control were never asked here: the two would not be comparable.
    """
    found = []
    for digest in dict.fromkeys(cell.prompts_sha256 for cell in control.cells):
        theirs = [cell for cell in control.cells if cell.prompts_sha256 == digest]
        own = [cell for cell in cells if cell.setting.prompts_sha256 == digest]
        if not own:
            raise ValueError(
                f"prompts_sha256 {digest} of suite {theirs[0].suite} is in no cell of the results: "
                "export the prompts with the options of tangram eval, --align-tokens its largest chunk"
            )
        books = Books(own, (theirs[0].suite,), aligned=own[0].setting.aligned)
        found.append(f"### {theirs[0].suite}: beside kvpress\n\n{_table(theirs, books)}\n")
    where = ", ".join(f"{name} {value}" for name, value in control.environment.items())
    return "\n".join([*found, f"Control: {where}; {len(control.commands)} commands like `{control.commands[0]}`.\n"])


def _table(theirs: Sequence[GradedCell], books: Books) -> str:
    """The full cache of both; then a scorer's lines together, kvpress first, and what ours is better by."""
    columns = sorted({cell.kv_retention for cell in theirs if cell.scorer != FULL}, reverse=True)
    full = next((percent(Score.of(cell.scores)) for cell in theirs if cell.scorer == FULL), NONE)
    lines = [["kvpress, full", NONE, *[full] * len(columns)]]
    lines.append(["full", NONE, *[books.score(Method("full"))] * len(columns)])
    scorers = dict.fromkeys(_named(cell.scorer)[1] for cell in theirs if cell.scorer != FULL)
    for scorer in scorers:
        for press in dict.fromkeys(cell.scorer for cell in theirs if _named(cell.scorer)[1] == scorer):
            lines += _beside(press, [cell for cell in theirs if cell.scorer == press], books, columns)
        for name in _OURS:
            methods = [books.plain(name, scorer, column) for column in columns]
            lines.append([name, scorer, *(books.score(method) for method in methods)])
    once = dict.fromkeys(map(tuple, lines))  # two presses of one scorer and scope stand beside the same line of ours
    return table(["score, %", "scorer", *(f"ρ {column:g}" for column in columns)], once)


def _beside(press: str, cells: Sequence[GradedCell], books: Books, columns: Sequence[float]) -> list[list[str]]:
    """Scores of a press, of one-shot in its scope, and the difference, sample by sample."""
    title, scorer, scope = _named(press)
    control = {cell.kv_retention: cell.scores for cell in cells}
    shown, ours, less = list[str](), list[str](), list[str]()
    for column in columns:
        at_once = books.plain("one-shot", scorer, column)
        found = books.of(at_once and replace(at_once, scope=scope))
        own = [one.score for one in found[0].samples] if found and isinstance(found[0], Cell) else []
        its = control.get(column, [])
        shown.append(percent(Score.of(its)) if its else NONE)
        ours.append(percent(Score.of(own)) if own else NONE)
        both = [mine - other for mine, other in zip(own, its, strict=True)] if own and its else []
        less.append(percent(Score.of(both), signed=True) if both else NONE)
    mine = f"one-shot, {scope}"
    return [[title, scorer, *shown], [mine, scorer, *ours], [f"{mine} − {title}", scorer, *less]]


def _named(press: str) -> tuple[str, str, Scope]:
    return _PRESSES.get(press, ("kvpress, Ada-KV", press, "layer"))
