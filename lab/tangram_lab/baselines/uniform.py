"""Baseline schedules: uniform splits (FlashDecoding) and length buckets (PersistentKV, ablations).

The number of splits follows the public FlashAttention heuristic. It is one if rows and heads alone
keep four fifths of the workers busy. Otherwise the last wave of tasks decides: the number is the
smallest whose last wave is within 85 % of the fullest that any number reaches.

Worked example: 2 rows of 8 heads of at most 4096 entries (32 tiles of 128) on 132 workers. s splits
are 16 · s tasks. The fullest last wave is 0.97 (s = 8: 128 of 132 workers). 6 splits reach 0.73, 7
reach 0.85. Since 0.85 · 0.97 = 0.82, the number is 7. Numbers that make no split shorter, like 9
after 8 (ceil(32 / 9) = ceil(32 / 8)), are skipped.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tangram.errors import ConfigError
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.records import RangeKind
from tangram.plan.split import require_positive, split_evenly
from tangram.types import Int32, Int64

BUSY_ENOUGH = 0.8
NEAR_BEST = 0.85
MAX_SPLITS = 128


def splits_for(cells: Int64, tiles: Int64, workers: int) -> Int64:
    """The heuristic's number of splits for `cells` (rows · heads) of `tiles` each; any shape."""
    most = min(MAX_SPLITS, workers)
    split = np.arange(1, most + 1)
    waves = cells[..., None] * split / workers
    full = waves / np.ceil(waves)
    per_split = -(-tiles[..., None] // split)
    fewer = np.append(np.zeros_like(per_split[..., :1]), per_split[..., :-1], axis=-1)
    eligible = ((per_split != fewer) & (split <= np.maximum(tiles[..., None], 1))) | (split == 1)
    best = np.where(eligible, full, 0).max(axis=-1, keepdims=True)
    chosen = 1 + (eligible & (full >= NEAR_BEST * best)).argmax(axis=-1)
    return np.where(cells >= BUSY_ENOUGH * workers, 1, chosen)


def plan_uniform_splits(
    rows: DecodeRows, lengths: Int32, workers: int, *, tile_tokens: int = 128
) -> WorkPlan:
    """One number of splits for all rows, layers and heads (FlashDecoding).

    It follows from the longest length and the number of workers. Shares are FRAC: each head's own
    length is divided. Raises `ConfigError` naming the argument out of range.
    """
    require_positive(workers=workers, tile_tokens=tile_tokens)
    count, _, heads = rows.shape
    full = lengths[rows.length_index[:, ~rows.windowed]]
    tiles = -(-int(full.max(initial=0)) // tile_tokens)
    splits = splits_for(np.asarray(count * heads), np.asarray(tiles), workers)
    return split_evenly(rows, np.broadcast_to(splits, rows.shape), tile_tokens)


def plan_buckets(
    rows: DecodeRows,
    lengths: Int32,
    workers: int,
    *,
    kind: Literal["exact", "padded"] = "exact",
    tile_tokens: int = 128,
) -> WorkPlan:
    """Split each bucket of a layer as if it ran alone (the baseline of PersistentKV's work queue).

    `exact`: heads of equal length share a number of splits, of their true length. `padded`: buckets
    and bounds are the lengths rounded up to a power of two; splits beyond the true length are
    EMPTY. Raises `ConfigError` naming the argument that is out of range.
    """
    require_positive(workers=workers, tile_tokens=tile_tokens)
    if kind not in ("exact", "padded"):
        raise ConfigError(f"kind is {kind!r}, it must be exact or padded")
    length = lengths[rows.length_index].astype(np.int64)
    bucket = length if kind == "exact" else _power_of_two(np.maximum(length, tile_tokens))
    splits = splits_for(_members(bucket), -(-bucket // tile_tokens), workers)
    if kind == "exact":
        return split_evenly(rows, splits, tile_tokens)
    return _pad(rows, length, bucket, splits, tile_tokens)


def _power_of_two(length: Int64) -> Int64:
    return 2 ** np.ceil(np.log2(length)).astype(np.int64)


def _members(bucket: Int64) -> Int64:
    """[R, L, H]: the number of heads of the same layer in the same bucket."""
    layer = np.broadcast_to(np.arange(bucket.shape[1])[:, None], bucket.shape)
    pairs = layer * (bucket.max(initial=0) + 1) + bucket
    _, member, count = np.unique(pairs, return_inverse=True, return_counts=True)
    return np.asarray(count[member].reshape(bucket.shape))


def _pad(
    rows: DecodeRows, length: Int64, bucket: Int64, splits: Int64, tile_tokens: int
) -> WorkPlan:
    """Bounds from `bucket` [R, L, H].

    The part that holds the last entry is OPEN, those after it are EMPTY.
    """
    plan = split_evenly(rows, splits, tile_tokens, bucket)
    cell = plan.entries["row"], plan.task_layer, plan.tasks["head"]
    full = ~rows.windowed[plan.task_layer]
    parts = np.where(full, splits[cell], 1)
    number = np.where(plan.tasks["kind"] == RangeKind.FRAC, plan.tasks["a"], 0)
    width = -(-bucket[cell] // (parts * tile_tokens)) * tile_tokens
    a, entries = number * width, length[cell]
    holds = (a < entries) | (number == 0)
    opens = holds & ((a + width >= entries) | (number + 1 == parts))
    plan.tasks["kind"][full] = np.where(opens, RangeKind.OPEN, RangeKind.ABS)[full]
    plan.tasks["a"][full] = a[full]
    plan.tasks["b"][full] = np.where(opens, 0, np.where(holds, a + width, a))[full]
    return plan
