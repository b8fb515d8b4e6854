"""What planners share: from a number of equal parts per (row, layer, KV head) to a `WorkPlan`."""

from __future__ import annotations

import numpy as np

from tangram.plan.form import DecodeRows, RangeKind, TaskList, WorkPlan, assemble
from tangram.types import Int64


def split_evenly(rows: DecodeRows, parts: Int64, tile_tokens: int) -> WorkPlan:
    """Split every (row, layer, head) into `parts` [R, L, H] equal shares; window layers are never split.

    Tasks of a layer start with the largest budget share, so that short tasks fill the gaps at the end.
    """
    _, layers, heads = rows.table.shape
    windowed = np.broadcast_to(rows.windowed[None, :, None], rows.table.shape).ravel()
    count = np.where(windowed, 1, parts.ravel())
    cell = np.repeat(np.arange(rows.table.size), count)
    cell_row, layer, head = np.unravel_index(cell, rows.table.shape)
    share = np.arange(len(cell)) - np.repeat(np.cumsum(count) - count, count)
    kind = np.where(windowed, RangeKind.WINDOW, np.where(count > 1, RangeKind.FRAC, RangeKind.OPEN))[cell]
    a = np.where(windowed[cell], rows.window_tokens[layer], share)
    order = np.lexsort((-(rows.budget.ravel() / count)[cell], layer))
    tasks = TaskList(
        layer=layer[order], table=rows.table.ravel()[cell][order], length_index=rows.length_index.ravel()[cell][order],
        column=rows.column.ravel()[cell][order], head=head[order], kind=kind[order], a=a[order],
        b=np.where(kind == RangeKind.FRAC, count[cell], 0)[order], row_count=np.ones(len(cell), np.int64),
        rows=cell_row[order],
    )  # fmt: skip
    return assemble(tasks, layers, heads, tile_tokens)
