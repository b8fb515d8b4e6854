"""The number of samples that a calibration needs, by a bootstrap over its samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tangram.calibrate.agreement import rank_correlations
from tangram.calibrate.observations import Observations, reserved_fractions
from tangram.types import Float64
from tangram_lab.calibration.lost_entries import make_profile, overflow

SIZES = (5, 10, 25, 50, 100)
Spread = dict[str, float]  # "median", "p5", "p95"


def samples_needed(
    evidence: Observations, sizes: Sequence[int] = SIZES, draws: int = 100, seed: int = 0
) -> dict[int, dict[str, Spread]]:
    """The difference between profiles of fewer samples and that of all, by size, with its spread.

    A draw takes kinds in proportion and samples of a kind with replacement. Sizes above the number
    of samples are left out. The figures are:

    - `mean` and `budget`: the mean absolute difference of μ and of B = min(1, μ + α·σ) over heads.
    - `rank`: Spearman's correlation of μ; left out where heads cannot be ranked.
    - `pages`: the share of all pages that another head has.
    - `lost`: the overflow of the samples that were not drawn; left out when all were.
    """
    rng = np.random.default_rng(seed)
    members = [np.asarray(evidence.of_kind(kind)) for kind in dict.fromkeys(evidence.kinds)]
    return {
        size: _spreads([_compare(evidence, _draw(members, size, rng)) for _ in range(draws)])
        for size in sizes
        if size <= len(evidence.wishes)
    }


def _draw(
    members: Sequence[np.typing.NDArray[np.int64]], size: int, rng: np.random.Generator
) -> list[int]:
    """`size` random samples, of each kind its share rounded up or down."""
    order = [members[index] for index in rng.permutation(len(members))]
    ends = np.cumsum([len(kind) for kind in order])
    places = (np.arange(size) + rng.random()) / size * ends[-1]
    return [int(rng.choice(order[index])) for index in np.searchsorted(ends, places, side="right")]


def _compare(evidence: Observations, drawn: Sequence[int]) -> dict[str, float]:
    """One draw's figures."""
    whole, part = evidence.profile, make_profile(evidence, drawn)
    full, kept = reserved_fractions(whole), reserved_fractions(part)
    figures = {
        "mean": _distance(np.asarray(part.mean), np.asarray(whole.mean)),
        "budget": _distance(part.budgets, whole.budgets),
        "pages": float(np.abs(kept - full).sum() / 2 / full.sum()),
    }
    ranks = rank_correlations(np.stack([np.asarray(part.mean), np.asarray(whole.mean)]))
    if ranks is not None:
        figures["rank"] = float(ranks[0, 1])
    left = sorted(set(range(len(evidence.wishes))) - set(drawn))
    if left:
        figures["lost"] = float(
            np.mean([overflow(evidence.wishes[number], kept)[1] for number in left])
        )
    return figures


def _distance(one: Float64, other: Float64) -> float:
    return float(np.abs(one - other).mean())


def _spreads(found: Sequence[dict[str, float]]) -> dict[str, Spread]:
    """Median and 5th and 95th percentile of each figure, over the draws that have it."""
    columns = {
        name: [draw[name] for draw in found if name in draw]
        for name in ("mean", "budget", "rank", "pages", "lost")
    }
    return {name: spread(values) for name, values in columns.items() if values}


def spread(values: Sequence[float]) -> Spread:
    """Median and 5th and 95th percentile."""
    low, middle, high = np.percentile(values, (5, 50, 95))
    return {
        "median": round(float(middle), 5),
        "p5": round(float(low), 5),
        "p95": round(float(high), 5),
    }
