"""The file of bench/accuracy/evidence.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tangram_lab.accuracy.results import Score

METHODS = ("uniform", "static", "dynamic")


class MethodRecall(BaseModel):
    """Recall of evidence of one method at one ρ: the mean over contexts of means of questions."""

    model_config = ConfigDict(extra="forbid")

    method: str
    kv_retention: float
    recall: Score


class ScorerRecall(BaseModel):
    """The figures of one pass over the contexts. `seconds` is its duration without calibration."""

    model_config = ConfigDict(extra="forbid")

    scorer: str
    command: str
    environment: dict[str, Any]
    seconds: float
    recalls: list[MethodRecall]


class RecallFile(BaseModel):
    """All measurements with equal `options`, in their order."""

    model_config = ConfigDict(extra="forbid")

    options: dict[str, Any]
    questions: int
    contexts: int
    passes: list[ScorerRecall] = []

    def lacks(self, scorer: str, retentions: Sequence[float]) -> list[float]:
        """The `retentions` at which `scorer` was not measured."""
        known = {
            one.kv_retention for own in self.passes if own.scorer == scorer for one in own.recalls
        }
        return [retention for retention in retentions if retention not in known]

    @property
    def scorers(self) -> list[str]:
        """In the alphabet's order."""
        return sorted({own.scorer for own in self.passes})

    @property
    def retentions(self) -> list[float]:
        """Every ρ, the largest first."""
        return sorted(
            {one.kv_retention for own in self.passes for one in own.recalls}, reverse=True
        )

    def recall(self, method: str, scorer: str) -> list[Score | None]:
        """The figure at every ρ; None where it was not measured."""
        passes = [own for own in self.passes if own.scorer == scorer]
        recalls = [one for own in passes for one in own.recalls if one.method == method]
        found = {one.kv_retention: one.recall for one in recalls}
        return [found.get(retention) for retention in self.retentions]

    @classmethod
    def load(cls, path: Path) -> RecallFile:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
