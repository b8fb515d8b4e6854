"""Batches for the planners' tests: rows whose block tables share prefixes as the cache lays them
out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.form import DecodeRows
from tangram.types import Int32, Int64

PAGE = 16
CHUNK_PAGES = 4  # raw pages of a chunk; window layers keep them all


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """R rows that share sealed chunks and raw pages; table entries beyond what a row holds name
    page 0.
    """

    rows: DecodeRows
    lengths: Int32
    tables: Int32
    kept_tokens: Int64
    forest: Forest


def shared_batch(
    paths: list[tuple[int, ...]],
    sealed: list[int],
    own: list[int],
    kept_pages: Int64,
    windows: tuple[int | None, ...] | None = None,
    grow_pages: int = 20,
) -> SharedBatch:
    """Row r holds the units `paths[r]`, the first `sealed[r]` of them sealed, and `own[r]` further
    tokens.

    Equal units at equal places after equal units are the same pages; `kept_pages` [L, H] are kept
    of a sealed chunk.
    """
    layers, heads = kept_pages.shape
    windows = windows or (None,) * layers
    kept_pages = np.where(
        np.array([w is not None for w in windows])[:, None], CHUNK_PAGES, kept_pages
    )
    pages: dict[tuple[object, ...], np.ndarray] = {}
    counter = iter(range(1, 1 << 40))

    def page_ids(key: tuple[object, ...], count: int) -> np.ndarray:
        if key not in pages:
            pages[key] = np.array([next(counter) for _ in range(count)])
        return pages[key]

    runs, offsets, lengths, at = [], [], [], 0
    for row, path in enumerate(paths):
        for layer, head in np.ndindex(layers, heads):
            held = [
                page_ids(
                    (layer, head, path[: unit + 1]),
                    kept_pages[layer, head] if unit < sealed[row] else 1,
                )
                for unit in range(len(path))
            ]
            full = sum(map(len, held)) * PAGE
            held += [page_ids((layer, head, row, "own", i), 1) for i in range(-(-own[row] // PAGE))]
            run = np.concatenate([*held, np.zeros(grow_pages, np.int64)])
            runs.append(run)
            offsets.append(at)
            lengths.append(full + own[row])
            at += len(run)
    shape = (len(paths), layers, heads)
    table = np.array(offsets).reshape(shape)
    tables = np.concatenate(runs).astype(np.int32)
    budget = np.broadcast_to(1e4 * kept_pages / CHUNK_PAGES, shape)
    rows = DecodeRows.of(
        table,
        np.zeros(shape, np.int64),
        np.arange(table.size).reshape(shape),
        budget,
        windows,
        PAGE,
    )
    forest = forest_of(rows, tables, kept_pages, paths, sealed)
    return SharedBatch(rows, np.array(lengths, np.int32), tables, kept_pages * PAGE, forest)


def forest_of(
    rows: DecodeRows,
    tables: Int32,
    kept_pages: Int64,
    paths: list[tuple[int, ...]],
    sealed: list[int],
) -> Forest:
    """The prefix forest as the first full layer shows it, or layer 0 where all have windows."""
    probe = next((layer for layer, window in enumerate(rows.windows) if window is None), 0)
    kept = np.full(len(paths), kept_pages[probe, 0])
    raw = np.array([len(path) for path in paths]) - sealed
    units, count = units_of(tables, rows.table[:, probe, 0], kept, np.array(sealed), raw)
    return build_forest(units, count, np.array(sealed))


@st.composite
def shared_batches(
    draw: st.DrawFn, windows: bool = True, layers: int = 3, heads: int = 2
) -> SharedBatch:
    """Random forests: each row continues a prefix of an earlier row, or starts anew; up to `layers`
    and `heads`.
    """
    count = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers, heads = draw(st.integers(1, layers)), draw(st.integers(1, heads))
    paths: list[tuple[int, ...]] = []
    sealed: list[int] = []
    for row in range(count):
        model = int(rng.integers(0, row + 1))  # `row` itself: share nothing
        shares = int(rng.integers(0, len(paths[model]) + 1)) if model < row else 0
        extra = tuple(int(x) for x in 100 * row + np.arange(rng.integers(0, 4)))
        path = (paths[model][:shares] if model < row else ()) + extra
        if model < row and shares > sealed[model]:
            sealed.append(sealed[model])
        else:
            sealed.append(int(rng.integers(shares, len(path) + 1)))
        paths.append(path)
    own = rng.integers(0, draw(st.sampled_from([2, 40, 900])), count).tolist()
    kept = rng.integers(1, CHUNK_PAGES + 1, (layers, heads))
    kinds = (
        draw(st.lists(st.sampled_from([None, 50, 128]), min_size=layers, max_size=layers))
        if windows
        else None
    )
    return shared_batch(paths, sealed, own, kept, tuple(kinds) if kinds else None)
