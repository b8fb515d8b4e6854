"""Numba code of `packed.py`: a plan's tasks in the order in which the GPU runs them.

Planning is host work between two steps, and with hundreds of rows NumPy's passes over a plan took
longer than a step. All of it is in one file, because Numba's cache of a function detects changes in
that function's file only.
"""

from __future__ import annotations

import numpy as np

from tangram.numba_cache import compile_kept
from tangram.plan.records import RangeKind


@compile_kept(error_model="numpy")
def find_kinds(tasks, lengths, limits, group, short_tokens, kind):  # type: ignore[no-untyped-def]
    """Write `kind` [N] of `tasks` [N]: 1 + the first of `limits` that holds its queries.

    Each row has `group` queries. It is 0 for a task that serves one row and has at most
    `short_tokens` entries at `lengths`. Returns the most queries of a task.
    """
    most = 0
    for number in range(len(tasks)):
        task = tasks[number]
        queries = (task.row_end - task.row_begin) * group
        most, found = max(most, queries), 0
        while found < len(limits) and limits[found] < queries:
            found += 1
        kind[number] = found + 1
        if queries == group and short_tokens:
            if task.kind == RangeKind.ABS and task.b - task.a <= short_tokens:
                kind[number] = 0
            if task.kind == RangeKind.OPEN and lengths[task.length_index] - task.a <= short_tokens:
                kind[number] = 0
    return most


@compile_kept(error_model="numpy")
def sort_by_kind(tasks, kind, layer_indptr, placed, task_indptr, counts):  # type: ignore[no-untyped-def]
    """Write `placed` [N]: each layer's `tasks` by `kind` [N], in their order within a kind.

    Writes `counts` [L, kinds] (zeros before) and `task_indptr` [L, kinds + 1], too.
    """
    layers, kinds = counts.shape
    place = np.empty(kinds, np.int64)
    for layer in range(layers):
        begin, end = layer_indptr[layer], layer_indptr[layer + 1]
        for task in range(begin, end):
            counts[layer, kind[task]] += 1
        at = begin
        for number in range(kinds):
            task_indptr[layer, number] = place[number] = at
            at += counts[layer, number]
        task_indptr[layer, kinds] = at
        if counts[layer].max() == end - begin:
            placed[begin:end] = tasks[begin:end]
            continue
        for task in range(begin, end):
            at = place[kind[task]]
            place[kind[task]] += 1
            placed[at] = tasks[task]


@compile_kept(error_model="numpy")
def find_finishers(  # type: ignore[no-untyped-def]
    tasks, entries, task_indptr, may, segments, merge_indptr, left, left_indptr, finishes
):
    """Let tasks finish rows, and write the segments that are `left` with `left_indptr` [L + 1].

    A row's last part finishes it if its kind `may` [kinds] and comes after those of all its other
    parts. Then `entries` and `tasks`, which are sorted by kind, say how many parts it merges.
    `finishes` [L, kinds], initially 0, counts such entries. Returns how many segments are left.
    """
    slots = 0
    for segment in range(len(segments)):
        slots = max(slots, segments[segment].end_slot)
    entry, task_of = np.empty(slots, np.int32), np.empty(slots, np.int32)
    of_part, count = np.empty(slots, np.int32), 0
    for layer in range(len(finishes)):
        for kind in range(finishes.shape[1]):
            for task in range(task_indptr[layer, kind], task_indptr[layer, kind + 1]):
                for number in range(tasks[task].row_begin, tasks[task].row_end):
                    if not entries[number].direct:
                        slot = entries[number].slot
                        entry[slot], task_of[slot], of_part[slot] = number, task, kind
        for segment in range(merge_indptr[layer], merge_indptr[layer + 1]):
            begin, last = segments[segment].first_slot, segments[segment].end_slot - 1
            least, alone = of_part[last], may[of_part[last]]
            for part in range(begin, last):
                alone = alone and of_part[part] > least
            if alone:
                number, task = entry[last], task_of[last]
                entries[number].direct, entries[number].before = 1, last - begin
                if tasks[task].row_begin == number:
                    tasks[task].first = entries[number]
                finishes[layer, least] += 1
            else:
                left[count] = segments[segment]
                count += 1
        left_indptr[layer + 1] = count
    return count
