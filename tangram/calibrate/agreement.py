"""Spearman's rank correlation between samples of which heads need most."""

from __future__ import annotations

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
    return summarise_pairs(correlations[np.triu_indices(len(correlations), k=1)])


def summarise_pairs(pairs: Float64) -> RankStability:
    """The mean and the least of the correlations `pairs` [n], rounded."""
    return RankStability(round(float(pairs.mean()), 4), round(float(pairs.min()), 4))
