"""Numba code of `packed.py`: writes a plan's tasks in the order and format that the GPU reads.

Planning is host work between two steps, and with hundreds of rows NumPy's passes over a plan took
longer than a step. All of it is in one file, because Numba's cache of a function detects changes in
that function's file only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tangram.kernels.numba_cache import compile_kept


@compile_kept()
def sort_by_kind(kind, layer_indptr, order, task_indptr, counts):  # type: ignore[no-untyped-def]
    """Sort each layer's tasks by `kind` [N], keeping their order within a kind.

    Writes `order` [N], `counts` [L, kinds] (zeros before) and `task_indptr` [L, kinds + 1].
    """
    layers, kinds = counts.shape
    place = np.empty(kinds, np.int64)
    for layer in range(layers):
        begin, end = layer_indptr[layer], layer_indptr[layer + 1]
        for task in range(begin, end):
            counts[layer, kind[task]] += 1
        at = begin
        for one in range(kinds):
            task_indptr[layer, one] = place[one] = at
            at += counts[layer, one]
        task_indptr[layer, kinds] = at
        for task in range(begin, end):
            order[place[kind[task]]] = task
            place[kind[task]] += 1


@compile_kept()
def find_finishers(  # type: ignore[no-untyped-def]
    kind,
    may,
    layer_indptr,
    row_begin,
    row_end,
    direct,
    slot,
    merge_indptr,
    part_indptr,
    before,
    left,
    finishes,
):
    """Find the entries whose tasks finish their row, and the segments that are `left`.

    A row's last part finishes it if its kind `may` [kinds] and comes after those of all its other
    parts. It then merges `before` [M] other parts. Initially `before` is 0 and `left` [S] is true.
    `finishes` [L, kinds], initially 0, counts such entries.
    """
    parts = part_indptr[-1]
    entry, of_part = np.empty(parts, np.int64), np.empty(parts, kind.dtype)
    for layer in range(len(layer_indptr) - 1):
        first = part_indptr[merge_indptr[layer]]
        for task in range(layer_indptr[layer], layer_indptr[layer + 1]):
            for number in range(row_begin[task], row_end[task]):
                if not direct[number]:
                    entry[first + slot[number]] = number
                    of_part[first + slot[number]] = kind[task]
        for segment in range(merge_indptr[layer], merge_indptr[layer + 1]):
            begin, last = part_indptr[segment], part_indptr[segment + 1] - 1
            least, alone = of_part[last], may[of_part[last]]
            for part in range(begin, last):
                alone = alone and of_part[part] > least
            if alone:
                before[entry[last]] = last - begin
                left[segment] = False
                finishes[layer, least] += 1


@compile_kept()
def write_tasks(  # type: ignore[no-untyped-def]
    order,
    table,
    length_index,
    column,
    head,
    kind,
    a,
    b,
    row_begin,
    row_end,
    rows,
    direct,
    slot,
    before,
    tasks,
):
    """Write `tasks` [N, 13] in `order`; see `packed.TASK_FIELDS`. `kind` is the kind of range."""
    for place in range(len(order)):
        task = order[place]
        first, words = row_begin[task], tasks[place]
        words[0], words[1], words[2], words[3] = (
            table[task],
            length_index[task],
            column[task],
            head[task],
        )
        words[4], words[5], words[6], words[7], words[8] = (
            kind[task],
            a[task],
            b[task],
            first,
            row_end[task],
        )
        words[9], words[10], words[11] = (
            rows[first],
            direct[first] or before[first] > 0,
            slot[first],
        )
        words[12] = before[first]


@compile_kept()
def write_entries(rows: Any, direct: Any, slot: Any, before: Any, entries: Any) -> None:
    """Write `entries` [M, 4]; see `packed.ENTRY_FIELDS`."""
    for number in range(len(rows)):
        words = entries[number]
        words[0], words[1], words[2] = (
            rows[number],
            direct[number] or before[number] > 0,
            slot[number],
        )
        words[3] = before[number]
