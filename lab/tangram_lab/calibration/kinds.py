"""How alike samples of one kind of text, and of two, rank the heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.calibrate.agreement import rank_correlations, summarise_pairs
from tangram.compress.provenance import RankStability
from tangram.types import Float64


def measure_agreement(fractions: Float64, kinds: Sequence[str]) -> dict[str, RankStability]:
    """`rank_stability` over pairs of one kind ("same kind") and of two ("other kind").

    `kinds` names each sample's kind. An entry without pairs is left out. The result is empty if a
    sample gives every head the same.
    """
    correlations = rank_correlations(fractions)
    if correlations is None:
        return {}
    names, upper = np.asarray(kinds), np.triu(np.ones(correlations.shape, np.bool_), k=1)
    same = names[:, None] == names[None, :]
    pairs = {"same kind": upper & same, "other kind": upper & ~same}
    return {name: summarise_pairs(correlations[mask]) for name, mask in pairs.items() if mask.any()}


def correlate_kinds(fractions: Float64, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Spearman's correlation of the mean fractions of each kind with those of each other kind.

    Empty if a kind cannot be ranked.
    """
    named = list(dict.fromkeys(kinds))
    members = np.asarray(kinds)
    table = rank_correlations(np.stack([fractions[members == kind].mean(axis=0) for kind in named]))
    if table is None:
        return {}
    return {
        kind: {other: round(float(value), 4) for other, value in zip(named, row, strict=True)}
        for kind, row in zip(named, table, strict=True)
    }
