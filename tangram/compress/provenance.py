"""How a profile or a gate was made: its model, its method and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

STRICT = ConfigDict(
    extra="forbid", strict=True, frozen=True, allow_inf_nan=False, revalidate_instances="always"
)

Count = Annotated[int, Field(ge=1)]
Correlation = Annotated[float, Field(ge=-1.0, le=1.0)]
Parameter = bool | int | float | str | None


@dataclass(frozen=True)
class ModelFingerprint:
    """Which model a profile was made for.

    `architecture` is the Transformers `model_type`, such as "llama". `weights_sha256` and
    `vocab_size` are None where unknown (published profiles); None matches any value. `name` is for
    people: the same weights may have many names, so it is never compared.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    architecture: str
    layers: Count
    kv_heads: Count
    query_heads: Count
    head_dim: Count
    vocab_size: Count | None = None
    weights_sha256: str | None = None

    def mismatches(self, other: ModelFingerprint, holder: str = "the profile") -> list[str]:
        """One phrase for each field that differs, with this fingerprint's value and the other's.

        `holder` names what holds this fingerprint.
        """
        pairs = {
            entry.name: (getattr(self, entry.name), getattr(other, entry.name))
            for entry in fields(self)
            if entry.name != "name"
        }
        return [
            f"{name} is {mine!r} in {holder}, {theirs!r} in the model"
            for name, (mine, theirs) in pairs.items()
            if mine != theirs and mine is not None and theirs is not None
        ]


@dataclass(frozen=True)
class ScorerSpec:
    """A scoring method by name, with every parameter that changes its scores.

    See `Scorer.parameters()`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True)
class RankStability:
    """Spearman's rank correlation of the heads' kept fractions, over pairs of samples."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    mean: Correlation
    min: Correlation


@dataclass(frozen=True)
class Calibration:
    """Where the statistics come from.

    `tokens` (all samples together) and `rank_stability` are None if unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    samples: Count
    source: str
    tokens: Count | None = None
    rank_stability: RankStability | None = None


@dataclass(frozen=True)
class GateTraining:
    """How a gate was trained: on the scores of `teacher` over `tokens` tokens of `samples` texts.

    The texts come from `source` and went through `model` in chunks of `chunk_tokens`. `seed` drew
    texts, tokens and the first weights.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: ModelFingerprint
    teacher: ScorerSpec
    chunk_tokens: Count
    samples: Count
    tokens: Count
    source: str
    seed: int
    loss: str
