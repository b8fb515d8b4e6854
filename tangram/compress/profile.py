"""HOW MANY entries each head keeps: a calibrated profile of one model, as one JSON file.

Tangram, offline profile. A profile holds what calibration measured: the mean and the spread of each
head's kept fraction. It also holds what follows for one page shape: head groups, and the pages that
each keeps of a sealed chunk. The device decides which entries stay. How many stay is fixed here
before any request is seen, and so is every length and every footprint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError, model_validator

from tangram.compress.document import canonical, digest, read_object
from tangram.compress.groups import (
    Grouping,
    Head,
    allot_pages,
    cluster,
    compute_realised_retention,
    group_budgets,
)
from tangram.compress.provenance import (
    STRICT,
    Calibration,
    Count,
    ModelFingerprint,
    Parameter,
    RankStability,
    ScorerSpec,
)
from tangram.config import Scope
from tangram.errors import ConfigError, ProfileError
from tangram.foreign_files import replace_file
from tangram.types import Float64, HeadScales

__all__ = [
    "Calibration",
    "ModelFingerprint",
    "Profile",
    "ProfileOptions",
    "RankStability",
    "ScorerSpec",
]

READABLE_VERSIONS = (1, 2)  # files of version 1 have no scales
SINK_TOKENS = 4
# At a fixed ρ, a reserve for heads that vary is taken from others, which costs answers
# (docs/accuracy.md).
ALPHA = 0.0
PAPER_ALPHA = 2.0  # of Tangram's own budgets and of published ones
_DIGITS = 5  # of the statistics: finer than calibrations agree, and files stay small

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Scale = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True)
class ProfileOptions:
    """What a profile is asked to be, but for its ρ; `Profile` has the meanings."""

    model: ModelFingerprint
    layers: Sequence[int]
    scorer: ScorerSpec
    scope: Scope
    chunk_tokens: int
    page_tokens: int = 16
    heads_per_page: int = 4
    grouping: Grouping = "model"
    alpha: float = ALPHA
    sink_tokens: int = SINK_TOKENS
    window_tokens: int | None = None  # C / 64

    @property
    def window(self) -> int:
        """The last tokens of each chunk that are always kept."""
        return self.chunk_tokens // 64 if self.window_tokens is None else self.window_tokens


class Profile(BaseModel):
    """One calibrated profile; immutable. Build it with `from_statistics` or `load`.

    `mean` (μ) and `std` (σ) are [L][H] over the compressed `layers`, fractions of a chunk's
    entries. `groups[g]` lists (layer, head) by column, layers by the model's own index.
    `sealed_pages[g]` is what each member keeps of a sealed chunk of `chunk_tokens`, in pages of
    `page_tokens`. `realised_retention` is the share that those pages occupy, at most
    `kv_retention`. The first `sink_tokens` of a sequence and the last `window_tokens` of each chunk
    are always kept. `scales` are those of keys and values in a cache of 8 bits, [layers of
    the model][H]; None if they were not measured.
    """

    model_config = STRICT

    format_version: Literal[2] = 2
    model: ModelFingerprint
    scorer: ScorerSpec
    scope: Scope
    kv_retention: float = Field(gt=0.0, lt=1.0)
    alpha: float = Field(ge=0.0)
    sink_tokens: int = Field(ge=0)
    window_tokens: int = Field(ge=0)
    chunk_tokens: Count
    page_tokens: Count
    heads_per_page: Count
    grouping: Grouping
    layers: tuple[int, ...] = Field(min_length=1)
    mean: tuple[tuple[Share, ...], ...]
    std: tuple[tuple[Share, ...], ...]
    groups: tuple[tuple[Head, ...], ...]
    sealed_pages: tuple[Count, ...]
    realised_retention: float
    calibration: Calibration
    scales: tuple[tuple[tuple[Scale, Scale], ...], ...] | None

    @classmethod
    def from_statistics(
        cls,
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        options: ProfileOptions,
        kv_retention: float,
        calibration: Calibration,
    ) -> Profile:
        """The profile of measured kept fractions μ = `mean` and σ = `std`, float [L, H].

        Budgets are B = min(1, μ + α·σ) (Tangram), of statistics rounded as in the file. Raises
        `ConfigError` if ρ or an option is out of range.
        """
        mu, sigma = _round_statistics(mean, std)
        budgets = _budgets(mu, sigma, options.alpha)
        groups = cluster(budgets, options.layers, options.heads_per_page, options.grouping)
        shape = {
            "chunk_tokens": options.chunk_tokens,
            "page_tokens": options.page_tokens,
            "heads_per_page": options.heads_per_page,
        }
        pages = allot_pages(
            group_budgets(budgets, options.layers, groups),
            [len(group) for group in groups],
            **shape,
            retention=kv_retention,
            min_pages=fewest_pages(options.sink_tokens, options.window, options.page_tokens),
        )
        try:
            return cls(
                **vars(options)
                | {"layers": tuple(options.layers), "window_tokens": options.window},
                kv_retention=kv_retention,
                mean=_rows(mu),
                std=_rows(sigma),
                groups=tuple(groups),
                sealed_pages=tuple(pages),
                realised_retention=compute_realised_retention(pages, budgets.size, **shape),
                calibration=calibration,
                scales=None,
            )
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error

    def with_pages(self, page_tokens: int, heads_per_page: int) -> Profile:
        """The same statistics, grouped for another page shape.

        Raises `ConfigError` if ρ cannot be met.
        """
        pages = {"page_tokens": page_tokens, "heads_per_page": heads_per_page}
        return self.with_statistics(self.mean, self.std, **pages)

    def with_statistics(
        self,
        mean: npt.ArrayLike,
        std: npt.ArrayLike,
        kv_retention: float | None = None,
        **changes: Any,
    ) -> Profile:
        """The profile of other statistics, float [L, H], with the same options but for `changes`.

        `kv_retention` None is its own. Raises `ConfigError` if ρ cannot be met.
        """
        return Profile.from_statistics(
            mean,
            std,
            replace(self.options, **changes),
            self.kv_retention if kv_retention is None else kv_retention,
            self.calibration,
        ).with_scales(self.scales)

    @property
    def options(self) -> ProfileOptions:
        """What it was asked to be."""
        names = [field.name for field in fields(ProfileOptions)]
        return ProfileOptions(**{name: getattr(self, name) for name in names})

    def has_options_of(self, other: Profile) -> bool:
        """Whether it differs from `other` at most in ρ, in pages, and in what was measured."""
        return self.options == replace(
            other.options, page_tokens=self.page_tokens, heads_per_page=self.heads_per_page
        )

    def with_scales(self, scales: HeadScales | None) -> Profile:
        """The same profile with `scales`, or without."""
        return self.model_copy(update={"scales": scales})

    @property
    def budgets(self) -> Float64:
        """[L, H] float64: B = min(1, μ + α·σ), from which `sealed_pages` follow."""
        return _budgets(
            np.asarray(self.mean, np.float64), np.asarray(self.std, np.float64), self.alpha
        )

    @property
    def file_name(self) -> str:
        """The conventional file name: model, scorer, scope, chunk and ρ."""
        stem = self.model.name.rsplit("/", 1)[-1].lower()
        return (
            f"{stem}.{self.scorer.name}.{self.scope}.c{self.chunk_tokens}.r{self.kv_retention}.json"
        )

    def fingerprint(self) -> str:
        """SHA-256 (hex) over exactly the fields that determine a sequence's KV state.

        Prefix-cache keys begin with it. `scales` are no part of it: a pool has one set of scales,
        as it has one dtype.
        """
        state = self.model_dump(
            mode="json",
            include={
                "model",
                "scorer",
                "chunk_tokens",
                "page_tokens",
                "sink_tokens",
                "window_tokens",
                "groups",
            }
            | {"sealed_pages"},
        )
        del state["model"]["name"]
        return digest(state)

    def check_model(self, fingerprint: ModelFingerprint) -> None:
        """Raise `ProfileError` naming every mismatch with the model, with both values."""
        _refuse(
            self.model.mismatches(fingerprint),
            "calibrate this model, or give a profile made for it",
        )

    def check_options(
        self,
        *,
        scorer: str,
        scope: str,
        kv_retention: float,
        chunk_tokens: int,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Raise `ProfileError` naming every mismatch with the engine's options, with both values.

        `parameters` are those of the scorer that will run; None leaves them unchecked.
        """
        mine_parameters = dict(self.scorer.parameters)
        pairs: dict[str, tuple[object, object]] = {
            "scorer": (self.scorer.name, scorer),
            "scope": (self.scope, scope),
            "kv_retention": (self.kv_retention, float(kv_retention)),
            "chunk_tokens": (self.chunk_tokens, chunk_tokens),
            "scorer parameters": (
                mine_parameters,
                mine_parameters if parameters is None else dict(parameters),
            ),
        }
        _refuse(
            [
                f"{name} is {mine!r} in the profile, {asked!r} was requested"
                for name, (mine, asked) in pairs.items()
                if mine != asked
            ],
            "change the option, or calibrate with it",
        )

    def save(self, path: str | Path) -> None:
        """Write the file with its checksum, whole or not at all."""
        content = self.model_dump(mode="json")
        content["checksum"] = digest(content)
        lines = ",\n".join(
            f"{json.dumps(key)}: {canonical(value)}" for key, value in content.items()
        )
        with replace_file(path) as file:
            file.write_text("{\n" + lines + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile. Raises `ProfileError` naming the file, the field and the fault."""
        content = read_object(path, READABLE_VERSIONS)
        checksum = content.pop("checksum", None)
        try:
            profile = cls.model_validate_json(canonical(_upgrade(content)))
        except ValidationError as error:
            raise ProfileError(f"profile {path}: {_explain(error)}") from error
        if checksum != digest(content):
            raise ProfileError(
                f"profile {path}: checksum is {checksum!r}, the content's is {digest(content)!r}: "
                "the file was damaged or edited, write it again with `tangram calibrate`"
            )
        return profile

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        shape = (len(self.layers), self.model.kv_heads)
        for name, table, layers in (
            ("mean", self.mean, shape[0]),
            ("std", self.std, shape[0]),
            ("scales", self.scales, self.model.layers),
        ):
            if table is not None and (
                len(table) != layers or any(len(row) != shape[1] for row in table)
            ):
                raise ValueError(
                    f"{name} must be [{layers} layers][{shape[1]} heads], it has another shape"
                )
        if list(self.layers) != sorted(set(self.layers) & set(range(self.model.layers))):
            raise ValueError(
                f"layers must ascend within the model's {self.model.layers}, they are "
                f"{list(self.layers)}"
            )
        heads = [(layer, head) for layer in self.layers for head in range(shape[1])]
        if sorted(head for group in self.groups for head in group) != heads:
            raise ValueError(
                f"groups must hold each of the {len(heads)} compressed heads exactly once"
            )
        if any(not 1 <= len(group) <= self.heads_per_page for group in self.groups):
            raise ValueError(
                f"groups must have 1 to {self.heads_per_page} heads each (heads_per_page)"
            )
        self._check_counts(len(heads))
        return self

    def _check_counts(self, heads: int) -> None:
        fewest = fewest_pages(self.sink_tokens, self.window_tokens, self.page_tokens)
        most, rest = divmod(self.chunk_tokens, self.page_tokens)
        if rest:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens}, not a multiple of page_tokens "
                f"({self.page_tokens})"
            )
        if len(self.sealed_pages) != len(self.groups):
            raise ValueError(
                f"sealed_pages has {len(self.sealed_pages)} counts for {len(self.groups)} groups"
            )
        if any(not fewest <= pages <= most for pages in self.sealed_pages):
            raise ValueError(
                f"sealed_pages must lie in [{fewest}, {most}] (always-kept positions, whole chunk)"
            )
        realised = compute_realised_retention(
            self.sealed_pages,
            heads,
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            heads_per_page=self.heads_per_page,
        )
        if not math.isclose(realised, self.realised_retention) or realised > self.kv_retention * (
            1 + 1e-12
        ):
            raise ValueError(
                f"realised_retention is {self.realised_retention}, sealed_pages occupy {realised} "
                f"and kv_retention allows {self.kv_retention}"
            )


def _upgrade(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of any readable version as this version has it."""
    old = content["format_version"] == 1
    return {"scales": None} | content | {"format_version": 2} if old else content


def _round_statistics(mean: npt.ArrayLike, std: npt.ArrayLike) -> tuple[Float64, Float64]:
    mu, sigma = (np.round(np.asarray(values, np.float64), _DIGITS) for values in (mean, std))
    if mu.shape != sigma.shape:
        raise ConfigError(f"mean has shape {mu.shape} and std {sigma.shape}, both must be [L, H]")
    return np.asarray(mu, np.float64), np.asarray(sigma, np.float64)


def _budgets(mean: Float64, std: Float64, alpha: float) -> Float64:
    return np.asarray(np.minimum(1.0, mean + alpha * std), np.float64)


def fewest_pages(sink_tokens: int, window_tokens: int, page_tokens: int) -> int:
    """Pages that a chunk's always-kept positions fill, at least one."""
    return max(1, -(-(sink_tokens + window_tokens) // max(1, page_tokens)))


def _rows(table: Float64) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in table)


def _explain(error: ValidationError) -> str:
    """The first error that pydantic found, as `field is value: what is wrong`."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        return first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "missing" else f" is {shortened(first['input'])}"
    return f"{place}{given}: {first['msg']}"


def _refuse(mismatches: Sequence[str], remedy: str) -> None:
    if mismatches:
        raise ProfileError(
            f"the profile does not fit: {'; '.join(mismatches)}. To fix it, {remedy}"
        )
