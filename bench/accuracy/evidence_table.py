"""The file of bench/accuracy/evidence.py, and its table in docs/accuracy.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tangram.lab.accuracy.report import machine, percent
from tangram.lab.accuracy.results import Score

METHODS = ("uniform", "static", "dynamic")


class Recalled(BaseModel):
    """Recall of evidence of one method at one ρ: the mean over contexts of the mean over their questions."""

    model_config = ConfigDict(extra="forbid")

    method: str
    kv_retention: float
    recall: Score


class OfScorer(BaseModel):
    """What one pass over the contexts gave. `seconds` is all it took, calibration set aside."""

    model_config = ConfigDict(extra="forbid")

    scorer: str
    command: str
    environment: dict[str, Any]
    seconds: float
    recalls: list[Recalled]


class Evidence(BaseModel):
    """All that was measured with equal `options`, in the order in which it was."""

    model_config = ConfigDict(extra="forbid")

    options: dict[str, Any]
    questions: int
    contexts: int
    passes: list[OfScorer] = []

    def lacks(self, scorer: str, retentions: Sequence[float]) -> list[float]:
        """Those of `retentions` at which `scorer` was not measured."""
        known = {one.kv_retention for own in self.passes if own.scorer == scorer for one in own.recalls}
        return [retention for retention in retentions if retention not in known]

    @classmethod
    def load(cls, path: Path) -> Evidence:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def evidence_table(evidence: Evidence) -> str:
    """A line for each method and scorer, a column for each ρ; below, on what and by which commands it was measured."""
    found = {
        (one.method, own.scorer, one.kv_retention): percent(one.recall)
        for own in evidence.passes
        for one in own.recalls
    }
    columns = sorted({retention for _, _, retention in found}, reverse=True)
    lines = [
        " | ".join([method, scorer, *(found.get((method, scorer, retention), "–") for retention in columns)])
        for method in METHODS
        for scorer in sorted({own.scorer for own in evidence.passes})
    ]
    head = ["recall, % ± standard error | scorer | " + " | ".join(f"ρ {column:g}" for column in columns)]
    rule = "|---|---|" + "---:|" * len(columns)
    first, *rest = (f"| {line} |" for line in [*head, *lines])
    told = f"{evidence.questions:,} questions on {evidence.contexts} contexts of {_shape(evidence)}; full keeps 100."
    machines = "; ".join(dict.fromkeys(machine(own.environment) for own in evidence.passes))
    minutes = sum(own.seconds for own in evidence.passes) / 60
    commands = "`, `".join(dict.fromkeys(own.command for own in evidence.passes))
    below = f"{machines}. {minutes:,.0f} minutes of scoring. `{commands}`"
    return "\n".join(["### Recall of evidence (LoCoMo)", "", told, "", first, rule, *rest, "", below, ""])


def _shape(evidence: Evidence) -> str:
    options = evidence.options
    return f"at most {options['context_tokens']:,} tokens, {options['model']}, C {options['chunk_tokens']}"
