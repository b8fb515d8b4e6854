"""The measurements of a calibration, sample by sample, for reports and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tangram.compress.profile import Profile
from tangram.errors import ConfigError
from tangram.types import Float64


@dataclass(frozen=True)
class Observations:
    """One ρ of one calibration: the profile, and what dynamic selection gave each head.

    `wishes[n]` is float64 [chunks, L, H], fractions of C, of sample n; `kinds[n]` names the kind of
    its text.
    """

    profile: Profile
    wishes: tuple[Float64, ...]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.wishes) != len(self.kinds):
            raise ConfigError(
                f"kinds has {len(self.kinds)} names for {len(self.wishes)} samples, give one for "
                "each"
            )

    @classmethod
    def gather(
        cls, profiles: Sequence[Profile], shares: Sequence[Float64], kinds: Sequence[str]
    ) -> list[Observations]:
        """One for each profile of `calibrate`, from its observed shares [ρ, chunks, L, H]."""
        return [
            cls(profile, tuple(sample[number] for sample in shares), tuple(kinds))
            for number, profile in enumerate(profiles)
        ]

    @cached_property
    def fractions(self) -> Float64:
        """[samples, L, H]: each sample's kept fractions, the mean over its chunks."""
        return np.stack([chunks.mean(axis=0) for chunks in self.wishes])

    def of_kind(self, kind: str) -> list[int]:
        """The numbers of the samples of one kind."""
        return [number for number, name in enumerate(self.kinds) if name == kind]


def reserved_fractions(profile: Profile) -> Float64:
    """[L, H] float64: the fraction of a chunk's entries that `sealed_pages` gives each head."""
    return share_of_heads(profile, profile.sealed_pages)


def share_of_heads(profile: Profile, pages: Sequence[int]) -> Float64:
    """[L, H] float64: the fraction of a chunk's entries that each head has.

    `pages` gives the number of pages of each group.
    """
    row = {layer: index for index, layer in enumerate(profile.layers)}
    share = np.zeros((len(profile.layers), profile.model.kv_heads))
    for group, count in zip(profile.groups, pages, strict=True):
        for layer, head in group:
            share[row[layer], head] = count * profile.page_tokens / profile.chunk_tokens
    return share
