"""Spearman's rank correlation between samples, and kinds of text, of which heads need most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tangram.compress.provenance import RankStability
from tangram.types import Float64


def rank_correlations(rows: npt.ArrayLike) -> Float64 | None:
    """Spearman's correlation of each row with each, float64 [n, n].

    `rows` is [n, …] with one value a head. None if a row gives every head the same, so that there
    is nothing to rank.
    """
    from scipy.stats import rankdata  # 0.4 s that a server start would pay

    table = np.asarray(rows, np.float64)
    ranks = np.asarray(rankdata(table.reshape(len(table), -1), axis=1), np.float64)
    if (np.ptp(ranks, axis=1) == 0).any():
        return None
    # Rounding may exceed 1 slightly.
    return np.clip(np.atleast_2d(np.corrcoef(ranks)), -1.0, 1.0)


def rank_stability(fractions: Float64) -> RankStability | None:
    """Spearman's correlation of the heads' ranking over all pairs of samples.

    `fractions` is [samples, L, H]. None when there is nothing to compare: fewer than two samples,
    or a sample that gives every head the same.
    """
    correlations = rank_correlations(fractions)
    if correlations is None or len(correlations) < 2:
        return None
    return _summary(correlations[np.triu_indices(len(correlations), k=1)])


def agreement(fractions: Float64, kinds: Sequence[str]) -> dict[str, RankStability]:
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
    return {name: _summary(correlations[mask]) for name, mask in pairs.items() if mask.any()}


def kind_correlations(fractions: Float64, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
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


def _summary(pairs: Float64) -> RankStability:
    return RankStability(round(float(pairs.mean()), 4), round(float(pairs.min()), 4))
