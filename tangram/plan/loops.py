"""Compiled loops of the planners, over cells, tasks and entries of the row list.

A *cell* is one head of one source in one layer: cell c of layer l is (source c // H, head c % H).
Planning is host work between two steps. With a pass of NumPy for each operation it took longer than
a step with hundreds of rows. All loops are in one file, because Numba's cache of a function detects
changes in that function's file only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tangram.numba_cache import compile_kept
from tangram.plan.records import ENTRY, SEGMENT, TASK, RangeKind

NOTICE = "compiling the planners, once on this machine: takes about 20 s"
FITTING_ROUNDS = 8
ORDER_STEPS = 65535  # sizes are ranked to 16 bits, which two passes of 8 bits sort
# Parts for each cell where these are about as many as workers: enough to cut the long ones, not
# all.
SPARE = 1.75


class Readers(NamedTuple):
    """`owner`, `indptr` and `reader` of `Sources`, and the same by row.

    Row r reads the sources source[row_indptr[r] : row_indptr[r + 1]], each as `entry` of `reader`.
    All are uint32.
    """

    owner: Any
    indptr: Any
    reader: Any
    row_indptr: Any
    source: Any
    entry: Any


class Ranges(NamedTuple):
    """The ranges of cells: `begin` and `end` [L, S, H], int32, cut into whole tiles of `tile`.

    The sources from `shared` on end OPEN. Where `tile` is 0, `begin` is, too, and parts are FRAC
    shares.
    """

    begin: Any
    end: Any
    shared: Any
    tile: Any


@compile_kept()
def resolve(kind: int, a: int, b: int, length: int, tile: int) -> tuple[int, int]:
    """Begin and end of a range at `length`, equal where EMPTY.

    FRAC divides ceil(length / tile) tiles into b shares, as evenly as whole tiles allow. The last
    tile may be partial.
    """
    if kind == RangeKind.ABS:
        return a, b
    if kind == RangeKind.OPEN:
        return min(a, length), length
    if kind == RangeKind.FRAC:
        tiles = (length + tile - 1) // tile
        return a * tiles // b * tile, min((a + 1) * tiles // b * tile, length)
    return max(length - a, 0), length


@compile_kept()
def resolve_tasks(tasks, lengths, tile):  # type: ignore[no-untyped-def]
    """int64 [N], [N]: `resolve` of `tasks` [N] at flat `lengths`."""
    begin, end = np.empty(len(tasks), np.int64), np.empty(len(tasks), np.int64)
    for task in range(len(tasks)):
        record = tasks[task]
        length = lengths[record["length_index"]]
        begin[task], end[task] = resolve(record["kind"], record["a"], record["b"], length, tile)
    return begin, end


@compile_kept(error_model="numpy")
def fit_cells(size, most, target, wanted, count):  # type: ignore[no-untyped-def]
    """Write `count` [n]: into how many parts of at most `target` the cells `size` [n] are cut.

    `most` [n] are the largest numbers. With more cells than `wanted` parts are rounded to the
    nearest number. Otherwise the target grows until there are no more parts than that.
    """
    if len(size) > wanted:
        for cell in range(len(size)):
            parts = 1.0
            if size[cell] > target:
                parts = max(min(np.rint(size[cell] / target), most[cell]), 1.0)
            count[cell] = np.int32(parts)
        return
    for _ in range(FITTING_ROUNDS):
        total = 0
        for cell in range(len(size)):
            count[cell] = np.int32(min(np.ceil(size[cell] / target), most[cell]))
            total += count[cell]
        if total <= wanted:
            break
        target *= total / wanted


@compile_kept(error_model="numpy")
def fit_layers(size, most, target, wanted, count):  # type: ignore[no-untyped-def]
    """`fit_cells` for each layer: `size`, `most` and `count` are [L, n], `target` is [L]."""
    for layer in range(len(size)):
        fit_cells(size[layer], most[layer], target[layer], wanted, count[layer])


@compile_kept(error_model="numpy")
def count_parts(begin, end, weight, shared, windowed, few, many, long, tile, least):  # type: ignore[no-untyped-def]
    """Cut the ranges `begin` to `end` [L, S, H] into `few` parts a layer, or `many` of long layers.

    A layer is long from `long` weighted entries on. A part has at least `least` entries. Tails, the
    sources from `shared` on, have at least one part. In layers that are `windowed` [L] they have
    exactly one, and other sources none. Returns `count` and the work of one part [L, S, H].
    """
    layers, sources, heads = begin.shape
    cells = sources * heads
    count, work = np.empty(begin.shape, np.int32), np.empty(begin.shape, np.float64)
    tiles, most = np.empty(begin.shape[1:]), np.empty(begin.shape[1:])
    for layer in range(layers):
        total = total_tiles = 0.0
        for source in range(sources):
            scale = weight[source]
            for head in range(heads):
                tokens = max(end[layer, source, head] - begin[layer, source, head], 0)
                work[layer, source, head] = tokens * scale
                tiles[source, head] = np.ceil(tokens / tile) * scale
                most[source, head] = max(np.floor(tokens / least), 1.0)
                total += work[layer, source, head]
                total_tiles += tiles[source, head]
        wanted = many if total >= long and cells <= few else few
        if cells <= 2 * wanted:
            wanted = max(wanted, int(SPARE * cells))
        target = max(total_tiles / wanted, np.ceil(least / tile))
        fit_cells(tiles.ravel(), most.ravel(), target, wanted, count[layer].ravel())
        for source in range(sources):
            for head in range(heads):
                parts = count[layer, source, head]
                if windowed[layer]:
                    parts = np.int32(source >= shared)
                elif source >= shared:
                    parts = max(parts, np.int32(1))
                count[layer, source, head] = parts
                if parts > 1:
                    work[layer, source, head] /= parts
    return count, work


@compile_kept(error_model="numpy", fastmath={"nnan", "nsz"})
def find_largest(size):  # type: ignore[no-untyped-def]
    """The largest of `size` [n], or 0; without NaN the loop is vectorised."""
    largest = 0.0
    for cell in range(len(size)):
        largest = max(largest, size[cell])
    return largest


@compile_kept(error_model="numpy")
def sort_longest(size, key, spare, order):  # type: ignore[no-untyped-def]
    """Write `order` [n]: `size` [n] from large to small, ties (to 1 in 65,535) in their own order.

    `key` and `spare` [n] are scratch.
    """
    largest = find_largest(size)
    scale = ORDER_STEPS / max(largest, 1e-300)  # finite: ranks are indices
    low, high = np.zeros(257, np.uint32), np.zeros(257, np.uint32)
    for cell in range(len(size)):
        rank = np.uint32(ORDER_STEPS - size[cell] * scale)
        key[cell] = rank
        low[np.uint32(rank & np.uint32(255)) + np.uint32(1)] += np.uint32(1)
        high[np.uint32(rank >> np.uint32(8)) + np.uint32(1)] += np.uint32(1)
    for digit in range(1, 257):
        low[digit] += low[digit - 1]
        high[digit] += high[digit - 1]
    for cell in range(len(size)):
        spare[low[np.uint8(key[cell])]] = cell
        low[np.uint8(key[cell])] += np.uint32(1)
    for cell in spare:
        rank = np.uint32(key[cell]) >> np.uint32(8)
        order[high[rank]] = cell
        high[rank] += np.uint32(1)


@compile_kept(error_model="numpy")
def address_rows(heads, rows, table, index, entries, address, budget):  # type: ignore[no-untyped-def]
    """Write `address` [L, R, H] and `budget` [R, L, H] of the `rows` [n].

    `heads` [L, H] are the addresses of a row whose tables and lengths begin at 0. Those of the rows
    begin at `table` and `index` [n]. `entries` [n, groups] are the budgets of their lengths.
    """
    for layer in range(len(heads)):
        for at in range(len(rows)):
            for head in range(heads.shape[1]):
                row, first = rows[at], heads[layer, head]
                record = address[layer, row, head]
                record["table"], record["column"] = first["table"] + table[at], first["column"]
                record["length_index"] = first["length_index"] + index[at]
                budget[row, layer, head] = entries[at, first["length_index"]]


@compile_kept(error_model="numpy")
def gather_lengths(address, lengths, end):  # type: ignore[no-untyped-def]
    """Write the last R sources of `end` [L, S, H]: the lengths of the rows of `address`."""
    layers, rows, heads = address.shape
    before = end.shape[1] - rows
    for layer in range(layers):
        for row in range(rows):
            for head in range(heads):
                end[layer, before + row, head] = lengths[address[layer, row, head]["length_index"]]


@compile_kept(error_model="numpy")
def bound_cells(units, owner, sealed_units, kept_tokens, page_tokens, tokens):  # type: ignore[no-untyped-def]
    """Write the first sources of `tokens` [L, S, H]: entries before the boundaries `units` [n].

    Source s has the tables of row `owner[s]`. That row has `sealed_units` [R] sealed chunks, of
    which its heads keep `kept_tokens` [R, L, H] each. Every later unit is one page.
    """
    for layer in range(tokens.shape[0]):
        for source in range(len(units)):
            row = owner[source]
            sealed = min(units[source], sealed_units[row])
            rest = (units[source] - sealed) * page_tokens
            for head in range(tokens.shape[2]):
                tokens[layer, source, head] = sealed * kept_tokens[row, layer, head] + rest


@compile_kept(error_model="numpy")
def number_slots(layer, count, readers, first, segments, segment):  # type: ignore[no-untyped-def]
    """Number the partial results of a layer in the order (row, head, source, part).

    `count` [L, S, H] are the parts. Writes `first` [E, H], the slot of the first part that each
    reader has of its source, -1 where the output has only one; and `segments` from `segment` on.
    Returns the segment and the slot after the last.
    """
    heads, slot = count.shape[2], 0
    row_indptr, source, entry = readers.row_indptr, readers.source, readers.entry
    for row in range(len(row_indptr) - 1):
        begin, end = row_indptr[row], row_indptr[row + 1]
        for head in range(heads):
            before = slot
            for at in range(begin, end):
                first[entry[at], head] = slot
                slot += count[layer, source[at], head]
            if slot - before == 1:
                slot = before
                for at in range(begin, end):
                    first[entry[at], head] = -1
            else:
                record = segments[segment]
                record["row"], record["head"], record["first_slot"], record["end_slot"] = (
                    row,
                    head,
                    before,
                    slot,
                )
                segment += 1
    return segment, slot


@compile_kept(error_model="numpy")
def write_ranges(layer, order, cells, count, ranges, window, tasks, task):  # type: ignore[no-untyped-def]
    """Write `kind`, `a` and `b` of a layer's `tasks` from `task` on, cell by cell in `order`.

    `cells` [n, 2] are source and head of each. Parts are whole tiles, and differ by one at most.
    Larger ones come last, where the last tile may be partial. A `window` of -1 is none.
    """
    tile, shared = ranges.tile, ranges.shared
    for cell in order:
        source, head = cells[cell, 0], cells[cell, 1]
        parts, a = count[layer, source, head], np.int64(ranges.begin[layer, source, head])
        tails = source >= shared
        if parts == 1 or window >= 0:
            for _ in range(parts):
                record = tasks[task]
                record["kind"] = RangeKind.OPEN if tails else RangeKind.ABS
                record["a"], record["b"] = a, 0 if tails else ranges.end[layer, source, head]
                if window >= 0:
                    record["kind"], record["a"] = RangeKind.WINDOW, window
                task += 1
        elif tile == 0:
            for part in range(parts):
                record = tasks[task]
                record["kind"], record["a"], record["b"] = RangeKind.FRAC, part, parts
                task += 1
        else:
            end = np.int64(ranges.end[layer, source, head])
            tiles = int(np.ceil(max(end - a, 0) / tile))
            base = int(tiles / max(parts, 1))  # exact, and far faster than integer division
            short = parts - (tiles - base * parts)
            for part in range(parts):
                record = tasks[task]
                record["kind"], record["a"] = RangeKind.ABS, a
                a += (base + (part >= short)) * tile
                record["b"] = a
                task += 1
            if parts:
                last = tasks[task - 1]
                last["kind"] = RangeKind.OPEN if tails else RangeKind.ABS
                last["b"] = 0 if tails else end


@compile_kept(error_model="numpy")
def write_entries(layer, order, cells, count, readers, address, first, tasks, task, entries, entry):  # type: ignore[no-untyped-def]
    """Write the other words of a layer's `tasks` from `task` on, and `entries` from `entry` on.

    `first` [E, H] is that of `number_slots`. Returns the task and the entry after the last.
    """
    indptr, reader, owner = readers.indptr, readers.reader, readers.owner
    for cell in order:
        source, head = cells[cell, 0], cells[cell, 1]
        begin, end, row = indptr[source], indptr[source + np.uint32(1)], owner[source]
        place = address[layer, row, head]
        table, length_index, column = place["table"], place["length_index"], place["column"]
        for part in range(count[layer, source, head]):
            record = tasks[task]
            record["table"], record["length_index"], record["column"] = table, length_index, column
            record["head"], record["row_begin"] = head, entry
            for at in range(begin, end):
                slot, served = first[at, head], entries[entry]
                served["row"], served["direct"] = reader[at], np.int32(slot < 0)
                served["slot"], served["before"] = 0 if slot < 0 else slot + part, 0
                entry += 1
            record["row_end"] = entry
            slot, repeated = first[begin, head], record["first"]
            repeated["row"], repeated["direct"] = reader[begin], np.int32(slot < 0)
            repeated["slot"], repeated["before"] = 0 if slot < 0 else slot + part, 0
            task += 1
    return task, entry


@compile_kept(error_model="numpy", notice=NOTICE)
def lay_out(count, size, ranges, readers, address, window):  # type: ignore[no-untyped-def]
    """The arrays of a `WorkPlan` whose cells are cut into `count` [L, S, H] parts of `size`.

    In each layer the largest parts come first. `address` is that of `DecodeRows`, `window` [L] are
    the tokens of sliding windows, -1 for none. Returns `layer_indptr`, `tasks`, `entries`,
    `merge_indptr`, `segments` and `partial_slots`.
    """
    layers, sources, heads = count.shape
    total = total_entries = most = task = entry = segment = np.int64(0)
    for layer in range(layers):
        for source in range(sources):
            rows = np.int64(readers.indptr[source + 1] - readers.indptr[source])
            for head in range(heads):
                total += count[layer, source, head]
                total_entries += rows * count[layer, source, head]
    tasks = np.empty(total, TASK)
    entries = np.empty(total_entries, ENTRY)
    outputs = min(layers * heads * (len(readers.row_indptr) - 1), total_entries)
    segments = np.empty(outputs, SEGMENT)
    layer_indptr, merge_indptr = np.zeros(layers + 1, np.int64), np.zeros(layers + 1, np.int64)
    key, spare = np.empty(sources * heads, np.uint16), np.empty(sources * heads, np.uint32)
    order, first = np.empty_like(spare), np.empty((len(readers.reader), heads), np.int32)
    cells = np.empty((sources * heads, 2), np.uint32)
    for cell in range(sources * heads):
        cells[cell, 0], cells[cell, 1] = cell // heads, cell % heads
    alone = len(readers.row_indptr) - 1 == sources  # every row reads its own source alone
    for layer in range(layers):
        sort_longest(size[layer].ravel(), key, spare, order)
        if alone and total == count.size:
            first[:], slots = -1, 0  # every row has one part
        else:
            segment, slots = number_slots(layer, count, readers, first, segments, segment)
        write_ranges(layer, order, cells, count, ranges, window[layer], tasks, task)
        task, entry = write_entries(
            layer, order, cells, count, readers, address, first, tasks, task, entries, entry
        )
        layer_indptr[layer + 1], merge_indptr[layer + 1] = task, segment
        most = max(most, np.int64(slots))
    return layer_indptr, tasks, entries, merge_indptr, segments[:segment], most
