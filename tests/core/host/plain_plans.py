"""Planning in plain loops, cell by cell: what compiled planners are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from tangram.plan.form import DecodeRows
from tangram.plan.records import RangeKind
from tangram.plan.split import Sources
from tangram.plan.workqueue import FINER, LONG_TOKENS, Grain
from tangram.types import Float64, Int32

Task = tuple[int, ...]  # table, length_index, column, head, kind, a, b
Entry = tuple[int, bool, int]  # row, direct, slot


@dataclass(frozen=True)
class PlainLayer:
    """A layer of a plan: tasks, the entries of each, and (row, head, first slot, end of slots)."""

    tasks: list[Task]
    entries: list[list[Entry]]
    segments: list[tuple[int, int, int, int]]


def fit_plainly(size: list[float], target: float, wanted: int, most: list[float]) -> list[int]:
    if len(size) > wanted:
        return [
            int(min(max(np.rint(s / target), 1), max(m, 1)))
            for s, m in zip(size, most, strict=True)
        ]
    count = []
    for _ in range(8):
        count = [int(min(ceil(s / target), m)) for s, m in zip(size, most, strict=True)]
        if sum(count) <= wanted:
            break
        target *= sum(count) / wanted
    return count


def order_plainly(size: list[float]) -> list[int]:
    """The cells from large to small, ties to 1 in 65,535 of the largest in their own order."""
    scale = 65535 / max(*size, 1e-300)
    return sorted(range(len(size)), key=lambda cell: int(65535 - size[cell] * scale))


def cut_plainly(
    rows: DecodeRows, sources: Sources, begin: Int32, end: Int32, weight: Float64, grain: Grain
) -> list[PlainLayer]:
    """`plan.workqueue.cut`, layer by layer."""
    return [
        _cut_layer(rows, layer, sources, begin[layer], end[layer], weight, grain)
        for layer in range(len(begin))
    ]


def _cut_layer(
    rows: DecodeRows,
    layer: int,
    sources: Sources,
    begin: Int32,
    end: Int32,
    weight: Float64,
    grain: Grain,
) -> PlainLayer:
    (count, heads), tile = begin.shape, grain.tile_tokens
    shared, cells = count - rows.shape[0], [(s, h) for s in range(count) for h in range(heads)]
    tokens = [max(int(end[cell] - begin[cell]), 0) for cell in cells]
    tiles = [ceil(n / tile) * float(weight[s]) for n, (s, _) in zip(tokens, cells, strict=True)]
    work = [n * float(weight[s]) for n, (s, _) in zip(tokens, cells, strict=True)]
    few = grain.workers * grain.tasks_per_worker
    many = int(FINER * few)
    long = grain.finer and sum(work) >= LONG_TOKENS * many and len(cells) <= few
    wanted = many if long else few
    if len(cells) <= 2 * wanted:
        wanted = max(wanted, int(1.75 * len(cells)))
    target = max(sum(tiles) / wanted, ceil(grain.min_tokens / tile))
    most = [float(max(floor(n / grain.min_tokens), 1)) for n in tokens]
    parts = dict(zip(cells, fit_plainly(tiles, target, wanted, most), strict=True))
    for cell in cells:
        if cell[0] >= shared:
            parts[cell] = max(parts[cell], 1)
        if rows.windows[layer] is not None:
            parts[cell] = int(cell[0] >= shared)
    slots, segments = _number_slots(rows, sources, parts, heads)
    size = [w / max(parts[cell], 1) for w, cell in zip(work, cells, strict=True)]
    tasks, entries = [], []
    for at in order_plainly(size):
        source, head = cells[at]
        readers = sources.reader[sources.indptr[source] : sources.indptr[source + 1]].tolist()
        owner = int(sources.owner[source])
        address = [int(x[owner, layer, head]) for x in (rows.table, rows.length_index, rows.column)]
        bounds = _split(int(begin[cells[at]]), tokens[at], parts[cells[at]], tile)
        for part in range(parts[cells[at]]):
            kind, a, b = RangeKind.ABS, bounds[part], bounds[part + 1]
            if part + 1 == parts[cells[at]]:
                b = int(end[cells[at]])
                if source >= shared:
                    kind, b = RangeKind.OPEN, 0
            if (window := rows.windows[layer]) is not None:
                kind, a, b = RangeKind.WINDOW, window, 0
            tasks.append((*address, head, int(kind), a, b))
            found = [slots[row, head, source] for row in readers]
            entries.append(
                [
                    (row, slot is None, 0 if slot is None else slot + part)
                    for row, slot in zip(readers, found, strict=True)
                ]
            )
    return PlainLayer(tasks, entries, segments)


def _split(begin: int, tokens: int, parts: int, tile: int) -> list[int]:
    """Where each part begins; whole tiles, larger parts last."""
    tiles = ceil(tokens / tile)
    sizes = (
        [tiles // parts + (part >= parts - tiles % parts) for part in range(parts)] if parts else []
    )
    return [begin + tile * sum(sizes[:part]) for part in range(parts + 1)]


def _number_slots(
    rows: DecodeRows, sources: Sources, parts: dict[tuple[int, int], int], heads: int
) -> tuple[dict[tuple[int, int, int], int | None], list[tuple[int, int, int, int]]]:
    """The first slot of each (row, head, source), None where the row has one part; the segments."""
    read: dict[int, list[int]] = {row: [] for row in range(rows.shape[0])}
    for source in range(len(sources.owner)):
        for row in sources.reader[sources.indptr[source] : sources.indptr[source + 1]].tolist():
            read[row].append(source)
    slots: dict[tuple[int, int, int], int | None] = {}
    segments, slot = [], 0
    for row, own in read.items():
        for head in range(heads):
            total = sum(parts[source, head] for source in own)
            first = slot
            for source in own:
                slots[row, head, source] = None if total == 1 else slot
                slot += 0 if total == 1 else parts[source, head]
            if total > 1:
                segments.append((row, head, first, slot))
    return slots, segments
