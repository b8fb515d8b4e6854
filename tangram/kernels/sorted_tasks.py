"""Numba code of `packed.py`: a plan's tasks in the order in which the GPU runs them.

Planning is host work between two steps, and with hundreds of rows NumPy's passes over a plan took
longer than a step. All of it is in one file, because Numba's cache of a function detects changes in
that function's file only.
"""

from __future__ import annotations

import numpy as np

from tangram.numba_cache import compile_kept

ABS, OPEN = 0, 1  # of `RangeKind`


@compile_kept(error_model="numpy")
def find_kinds(tasks, lengths, limits, group, short_tokens, kind):  # type: ignore[no-untyped-def]
    """Write `kind` [N] of `tasks` [N, 13]: 1 + the first of `limits` that holds its queries.

    Each row has `group` queries. It is 0 for a task that serves one row and has at most
    `short_tokens` entries at `lengths`. Returns the most queries of a task.
    """
    most = 0
    for task in range(len(tasks)):
        queries = (tasks[task, 8] - tasks[task, 7]) * group
        most, found = max(most, queries), 0
        while found < len(limits) and limits[found] < queries:
            found += 1
        kind[task] = found + 1
        if queries == group and short_tokens and tasks[task, 4] <= OPEN:
            end = tasks[task, 6] if tasks[task, 4] == ABS else lengths[tasks[task, 1]]
            if end - tasks[task, 5] <= short_tokens:
                kind[task] = 0
    return most


@compile_kept(error_model="numpy")
def sort_by_kind(tasks, kind, layer_indptr, placed, task_indptr, counts):  # type: ignore[no-untyped-def]
    """Write `placed` [N, 13]: each layer's `tasks` by `kind` [N], in their order within a kind.

    Writes `counts` [L, kinds] (zeros before) and `task_indptr` [L, kinds + 1], too.
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
        if counts[layer].max() == end - begin:
            placed[begin:end] = tasks[begin:end]
            continue
        for task in range(begin, end):
            at = place[kind[task]]
            place[kind[task]] += 1
            for word in range(tasks.shape[1]):
                placed[at, word] = tasks[task, word]


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
        slots = max(slots, segments[segment, 3])
    entry, task_of = np.empty(slots, np.int32), np.empty(slots, np.int32)
    of_part, count = np.empty(slots, np.int32), 0
    for layer in range(len(finishes)):
        for kind in range(finishes.shape[1]):
            for task in range(task_indptr[layer, kind], task_indptr[layer, kind + 1]):
                for number in range(tasks[task, 7], tasks[task, 8]):
                    if not entries[number, 1]:
                        slot = entries[number, 2]
                        entry[slot], task_of[slot], of_part[slot] = number, task, kind
        for segment in range(merge_indptr[layer], merge_indptr[layer + 1]):
            begin, last = segments[segment, 2], segments[segment, 3] - 1
            least, alone = of_part[last], may[of_part[last]]
            for part in range(begin, last):
                alone = alone and of_part[part] > least
            if alone:
                number, task = entry[last], task_of[last]
                entries[number, 1], entries[number, 3] = 1, last - begin
                if tasks[task, 7] == number:
                    tasks[task, 10], tasks[task, 12] = 1, last - begin
                finishes[layer, least] += 1
            else:
                for word in range(segments.shape[1]):
                    left[count, word] = segments[segment, word]
                count += 1
        left_indptr[layer + 1] = count
    return count
