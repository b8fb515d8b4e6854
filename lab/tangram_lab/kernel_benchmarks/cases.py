"""Cases to make a policy from, and held-out cases to judge it by.

Both have rows of uneven lengths (`traces.py`), heads of uneven budgets, and shared prefixes.
Calibration draws its lengths, budgets and trees by seeds of its own. The held-out trees are those
of PAT's kernel evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, own_case, tree_case
from tangram_lab.kernel_benchmarks.traces import CALIBRATION_SEEDS, HELD_OUT_SEEDS, TRACES, K, Trace
from tangram_lab.kernel_benchmarks.tree import CONFIGS, PAGE_TOKENS, Tree

# Batches between those of the held-out traces, so that votes must interpolate.
MORE_TRACES = (
    Trace("bucketed", 2, 16 * K),
    Trace("homogeneous", 2),
    Trace("homogeneous", 16),
    Trace("bimodal", 16),
    Trace("bucketed", 16, 4 * K),
    Trace("bucketed", 64, 4 * K),
    Trace("bucketed", 64, K),
    Trace("uniform", 4),
    Trace("zipf", 32),
)
RAGGED = tuple(
    Trace("bucketed", batch, size * K)
    for size, batch in ((8, 1), (32, 1), (8, 8), (32, 8), (8, 32))
)
RETENTION = 0.25  # of the mean head
CALIBRATION_TREES = 12


@dataclass(frozen=True)
class NamedCase:
    """A case to be made; results are averaged by `family`."""

    name: str
    family: str
    make: Callable[[], Case]


def calibration(geometry: BatchGeometry) -> list[NamedCase]:
    """The cases that a policy is made from."""
    first = CALIBRATION_SEEDS[0]
    own = [_own(trace, geometry, seed) for trace in TRACES for seed in CALIBRATION_SEEDS[:2]]
    own += [_own(trace, geometry, first) for trace in MORE_TRACES]
    ragged = [
        _make_ragged(trace, geometry, seed) for trace in RAGGED for seed in CALIBRATION_SEEDS[:2]
    ]
    return (
        own
        + ragged
        + [_tree(random_tree(first + number), geometry) for number in range(CALIBRATION_TREES)]
    )


def make_held_out_cases(geometry: BatchGeometry) -> list[NamedCase]:
    """The cases that a policy is judged by."""
    own = [_own(trace, geometry, seed) for trace in TRACES for seed in HELD_OUT_SEEDS]
    ragged = [
        _make_ragged(trace, geometry, seed) for trace in RAGGED for seed in HELD_OUT_SEEDS[:2]
    ]
    return own + ragged + [_tree(Tree.parse(text), geometry) for text in CONFIGS]


def random_tree(seed: int) -> Tree:
    """One to four shared levels over 16 to 1024 requests, nodes of 32 to 2048 tokens."""
    draw = np.random.default_rng(seed)
    levels = int(draw.integers(1, 5))
    leaves = int(2 ** draw.integers(4, 11))
    inner = np.sort(2 ** draw.integers(0, int(np.log2(leaves)), levels))
    tokens = PAGE_TOKENS * 2 ** draw.integers(0, 7, levels + 1)
    tokens[-1] = min(int(tokens[-1]), 512)
    return Tree((*map(int, inner), leaves), tuple(map(int, tokens)))


def budgets(heads: int, seed: int) -> np.ndarray:
    """[H]: kept fractions of a layer's heads, `RETENTION` on average; a few keep much more."""
    share = np.random.default_rng((seed, heads)).lognormal(0.0, 0.8, heads)
    return np.asarray(np.minimum(share / share.mean() * RETENTION, 1.0))


def _own(trace: Trace, geometry: BatchGeometry, seed: int) -> NamedCase:
    name = f"{trace.name} seed {seed}"
    return NamedCase(name, trace.name, partial(own_case, name, trace.lengths(seed), geometry, seed))


def _make_ragged(trace: Trace, geometry: BatchGeometry, seed: int) -> NamedCase:
    """Every head in pages of its own, as with `Hp` 1."""
    name = f"ragged {trace.name} seed {seed}"
    lengths = np.outer(trace.lengths(seed), budgets(geometry.kv_heads, seed)).astype(np.int64) + 1
    return NamedCase(
        name, "ragged", partial(own_case, name, lengths, replace(geometry, heads_per_page=1), seed)
    )


def _tree(tree: Tree, geometry: BatchGeometry) -> NamedCase:
    family = "shared prefixes" if tree.shared else "unshared trees"
    return NamedCase(str(tree), family, partial(tree_case, tree, geometry, 0))
