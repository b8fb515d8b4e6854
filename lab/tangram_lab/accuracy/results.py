"""The file of `tangram eval`: a cell for each method and suite, with all its settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tangram.errors import ConfigError
from tangram.foreign_files import read_text, replace_file
from tangram_lab.accuracy.methods import Method

_STRICT = ConfigDict(extra="forbid", frozen=True)


class Score(BaseModel):
    """The mean over samples of scores in [0, 1], and its standard error; None of one sample."""

    model_config = _STRICT

    mean: float
    stderr: float | None
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """The mean of at least one value."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(mean=statistics.fmean(values), stderr=error, samples=len(values))


class GradedAnswer(BaseModel):
    """One reply: its score, its beginning, and lengths in tokens.

    `evidence_recall` is the share of KV entries that the method keeps of the question's evidence
    (`recall.py`); None if it was not computed.
    """

    model_config = _STRICT

    score: float
    reply: str
    prompt_tokens: int
    reply_tokens: int
    category: str | None = None
    evidence_recall: float | None = None


class AnsweredSample(BaseModel):
    """The answers to the questions about one context."""

    model_config = _STRICT

    task: str
    number: int
    answers: tuple[GradedAnswer, ...]

    @property
    def score(self) -> float:
        """The mean over its questions."""
        return statistics.fmean(answer.score for answer in self.answers)

    @property
    def evidence_recall(self) -> float | None:
        """The mean over the questions that have evidence."""
        return mean_recall([answer.evidence_recall for answer in self.answers])


def mean_recall(recalls: Sequence[float | None]) -> float | None:
    """The mean over a sample's questions that have evidence; None if none has."""
    found = [recall for recall in recalls if recall is not None]
    return statistics.fmean(found) if found else None


class Setting(BaseModel):
    """The model and the questions of a cell. Cells of equal settings can be compared.

    `prompts_sha256` covers every token of every prompt. `aligned` says whether contexts end where
    chunks do.
    """

    model_config = _STRICT

    model: str
    weights_sha256: str | None
    dtype: str
    quantization: str | None = None
    kv_cache_dtype: str
    page_tokens: int
    heads_per_page: int
    suite: str
    samples: int
    context_tokens: int
    seed: int
    aligned: bool
    prompts_sha256: str


class MeasuredCell(BaseModel):
    """The common part of all cells: one method, one setting, and how it was measured.

    `basis` lists the method's other inputs: the scorer's parameters, samples of calibration.
    `seconds` is the duration of the measurement.
    """

    model_config = _STRICT

    method: Method
    setting: Setting
    basis: dict[str, Any]
    seconds: float
    environment: dict[str, Any]

    def same(self, method: Method, setting: Setting, basis: Mapping[str, Any]) -> bool:
        """Whether a measurement with these would give this cell."""
        return (self.method, self.setting, self.basis) == (method, setting, dict(basis))


class Cell(MeasuredCell):
    """The graded replies of one method to one suite.

    `footprint` is the KV bytes held when the answers ended, raw tails included, divided by those of
    full KV. It is None for methods that no engine follows any more.
    `filler_tokens` is the mean over prompts.
    """

    kind: Literal["answers"] = "answers"
    score: Score
    by_task: dict[str, Score]
    footprint: float | None
    filler_tokens: float
    samples: tuple[AnsweredSample, ...]

    @property
    def evidence_recall(self) -> Score | None:
        """The mean over the samples that have one; None if none has."""
        recalls = [sample.evidence_recall for sample in self.samples]
        found = [recall for recall in recalls if recall is not None]
        return Score.of(found) if found else None


class Fidelity(BaseModel):
    """Means over one passage's last tokens.

    `divergence` is the Kullback–Leibler divergence, in nats, of the distribution from that of the
    full cache. `agreement` is the share of tokens with the same likeliest token. `surprise` and
    `full_surprise` are the negative log-likelihood of the text itself, in nats a token. `exp` of
    its mean over passages is the perplexity.
    """

    model_config = _STRICT

    divergence: float
    agreement: float
    surprise: float
    full_surprise: float


class FidelityCell(MeasuredCell):
    """The fidelity of one method on passages of real text, one after the other."""

    kind: Literal["fidelity"] = "fidelity"
    passages: tuple[Fidelity, ...]

    @property
    def divergence(self) -> Score:
        """In nats a token."""
        return Score.of([passage.divergence for passage in self.passages])

    @property
    def agreement(self) -> Score:
        """The share of tokens."""
        return Score.of([passage.agreement for passage in self.passages])

    @property
    def perplexity(self) -> Score:
        """`exp` of the mean surprise.

        Its error is, to first order, the error of the surprise times the perplexity.
        """
        surprise = Score.of([passage.surprise for passage in self.passages])
        mean = math.exp(surprise.mean)
        return Score(
            mean=mean, stderr=surprise.stderr and mean * surprise.stderr, samples=surprise.samples
        )


AnyCell = Cell | FidelityCell


class Results(BaseModel):
    """All cells of a file, in the order of measurement; `command` is the last that added one."""

    model_config = ConfigDict(extra="forbid")

    format_version: Literal[1] = 1
    command: str
    cells: list[Annotated[AnyCell, Field(discriminator="kind")]] = []

    @classmethod
    def resume(cls, path: Path, command: str) -> Results:
        """The file's cells, none if there is no file.

        Raises `ConfigError` if it is another kind of file.
        """
        if not path.exists():
            if not path.parent.is_dir():
                raise ConfigError(
                    f"output is {path}, but there is no folder {path.parent}: make it first"
                )
            return cls(command=command)
        found = cls.load(path)
        found.command = command
        return found

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file. Raises `ConfigError` naming it and what is wrong with it."""
        try:
            return cls.model_validate_json(read_text(path))
        except (OSError, ValidationError, ValueError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ConfigError(
                f"{path} is no result file of `tangram eval` ({reason}): name another, or move it "
                "away"
            ) from error

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        with replace_file(path) as file:
            file.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
