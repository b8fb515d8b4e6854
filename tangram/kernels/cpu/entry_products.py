"""Products of float32 rows with keys and values of a pool.

Entries are widened in registers. A sum is that of its row and entry alone, in one order, whatever
is computed beside it: a token drafted in front of others gets the bits that it gets alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from tangram.kernels.cpu.vectors import LANES, WIDE, WIDTHS, VectorCode, choose
from tangram.numba_cache import compile_kept

INT8_NAN = -128  # that of `narrow`
KEYS = 4  # that a query is multiplied with at once; so many scores behind the last are overwritten
ROWS = 4 if WIDE else 2  # of a tile: its sums stay in registers
# Columns of a value that are added to at once, and the vectors that they are.
COLUMNS = {4 * LANES: (4, LANES), **{width: (1, width) for width in WIDTHS}}


@intrinsic
def _dot_tile(
    typingctx: Any,
    query: Any,
    row: Any,
    rows: Any,
    blocks: Any,
    keys: Any,
    scores: Any,
    at: Any,
    width: Any,
) -> Any:
    """The scores of up to ROWS queries, of KEYS keys, by vectors of `width`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.args[3].dtype
        places = [builder.extract_value(args[4], i) for i in range(KEYS)]

        def write(rows: int, width: int) -> None:
            code = VectorCode(context, builder, signature, args, width)
            (queries, dim), (entries, _), (out, line) = (code.array(i) for i in (0, 3, 5))
            lines = code.behind(args[1], rows)

            def add(step: Any, sums: list[Any]) -> list[Any]:
                column = builder.mul(step, code.constant(width))
                left = [code.load(code.at(queries, dim, m, column), code.floats) for m in lines]
                cells = [builder.gep(entries, [builder.add(place, column)]) for place in places]
                return code.add_products(sums, left, [code.load_wide(x, dtype) for x in cells])

            steps = builder.udiv(dim, code.constant(width))
            sums = code.loop(steps, [code.zero] * (rows * KEYS), add)
            for i, m in enumerate(lines):
                found = code.sum_each(sums[i * KEYS : (i + 1) * KEYS])
                code.store(found, code.at(out, line, m, args[6]))

        def write_rows(rows: int) -> None:
            choose(builder, args[7], WIDTHS, lambda width: write(rows, width))

        choose(builder, args[2], range(1, ROWS + 1), write_rows)
        return context.get_dummy_value()

    index = types.int64
    places = types.UniTuple(index, KEYS)  # type: ignore[no-untyped-call]
    return types.void(query, index, index, blocks, places, scores, index, index), codegen


@intrinsic
def _add_tile(
    typingctx: Any,
    weights: Any,
    row: Any,
    rows: Any,
    at: Any,
    blocks: Any,
    place: Any,
    count: Any,
    out: Any,
    column: Any,
    columns: Any,
) -> Any:
    """Add `count` values, weighted, to up to ROWS rows of sums, to `columns` of COLUMNS."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.args[4].dtype

        def write(rows: int, columns: int) -> None:
            vectors, width = COLUMNS[columns]
            code = VectorCode(context, builder, signature, args, width)
            (factors, length), (entries, stride), (sums, line) = (code.array(i) for i in (0, 4, 7))
            lines, columns_at = code.behind(args[1], rows), code.behind(args[8], vectors, width)

            def add(step: Any, held: list[Any]) -> list[Any]:
                entry = builder.add(args[5], builder.mul(step, stride))
                cells = [builder.gep(entries, [builder.add(entry, x)]) for x in columns_at]
                factor = builder.add(args[3], step)
                left = [code.spread(code.at(factors, length, m, factor)) for m in lines]
                return code.add_products(held, left, [code.load_wide(x, dtype) for x in cells])

            cells = [code.at(sums, line, m, x) for m in lines for x in columns_at]
            begun = [code.load(cell, code.floats) for cell in cells]
            for value, cell in zip(code.loop(args[6], begun, add), cells, strict=True):
                code.store(value, cell)

        def write_rows(rows: int) -> None:
            choose(builder, args[9], COLUMNS, lambda columns: write(rows, columns))

        choose(builder, args[2], range(1, ROWS + 1), write_rows)
        return context.get_dummy_value()

    index = types.int64
    numbers = index, index, index
    return types.void(weights, *numbers, blocks, index, index, out, index, index), codegen


@intrinsic
def _widen_vector(typingctx: Any, blocks: Any, place: Any, wide: Any, at: Any, width: Any) -> Any:
    """Write a vector of `width` entries at `place` of `blocks` to wide[at:], as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def write(width: int) -> None:
            code = VectorCode(context, builder, signature, args, width)
            (entries, _), (out, _) = code.array(0), code.array(2)
            value = code.load_wide(builder.gep(entries, [args[1]]), signature.args[0].dtype)
            code.store(value, builder.gep(out, [args[3]]))

        choose(builder, args[4], WIDTHS, write)
        return context.get_dummy_value()

    return types.void(blocks, types.int64, wide, types.int64, types.int64), codegen


@compile_kept()
def widest(count):  # type: ignore[no-untyped-def]
    """The widest vector that `count` elements fill."""
    if count >= WIDTHS[0]:
        return WIDTHS[0]
    return WIDTHS[1] if count >= WIDTHS[1] else WIDTHS[2]


@compile_kept()
def widen(blocks, block, part, begin, end, wide):  # type: ignore[no-untyped-def]
    """Write vectors [begin, end) of `part` of a block to wide[begin:end], as float32."""
    parts, page, dim = blocks.shape[1:]
    first, at, last = (block * parts + part) * page * dim, begin * dim, end * dim
    while at < last:
        width = widest(last - at)
        _widen_vector(blocks, first + at, wide, at, width)  # type: ignore[call-arg]
        at += width
    for t in range(begin, end):
        if is_nan(blocks, block, part, t):
            wide[t, 0] = np.nan


def is_nan(blocks: Any, block: int, part: int, entry: int) -> bool:
    """Whether vector `part` of an entry of `blocks` [n, S, P, D] is NaN as integers are.

    Other dtypes have NaN as numbers, which need no look.
    """
    return blocks.dtype == np.int8 and bool(blocks[block, part, entry, 0] == INT8_NAN)


@overload(is_nan, inline="always")
def _compile_is_nan(blocks, block, part, entry):  # type: ignore[no-untyped-def]
    if blocks.dtype != types.int8:
        return lambda blocks, block, part, entry: False
    return lambda blocks, block, part, entry: blocks[block, part, entry, 0] == INT8_NAN


@compile_kept()
def dot_keys(query, blocks, block, begin, end, scores, at):  # type: ignore[no-untyped-def]
    """scores[m, at + i] = query[m] · key begin + i of `block`, before `end`.

    Up to KEYS − 1 scores behind the last are overwritten.
    """
    parts, page, dim = blocks.shape[1:]
    width = WIDTHS[0] if dim % WIDTHS[0] == 0 else WIDTHS[1] if dim % WIDTHS[1] == 0 else WIDTHS[2]
    place, last = block * parts * page * dim, end - 1
    for t in range(begin, end, KEYS):
        keys = (
            place + t * dim,
            place + min(t + 1, last) * dim,
            place + min(t + 2, last) * dim,
            place + min(t + 3, last) * dim,
        )
        to = at + t - begin
        for m in range(0, query.shape[0], ROWS):
            rows = min(query.shape[0] - m, ROWS)
            _dot_tile(query, m, rows, blocks, keys, scores, to, width)  # type: ignore[call-arg]
    for t in range(begin, end):  # behind the products, when the keys are near
        if is_nan(blocks, block, 0, t):
            scores[:, at + t - begin] = np.nan


@compile_kept()
def add_values(weights, at, blocks, block, begin, end, out):  # type: ignore[no-untyped-def]
    """out[m] += Σ weights[m, at + i] · value begin + i of `block`, before `end`, one by one."""
    parts, page, dim = blocks.shape[1:]
    place, count = ((block * parts + parts - 1) * page + begin) * dim, end - begin
    column = 0
    while column < out.shape[1]:
        left = out.shape[1] - column
        columns = 4 * LANES if left >= 4 * LANES else widest(left)
        for m in range(0, out.shape[0], ROWS):
            rows = min(out.shape[0] - m, ROWS)
            _add_tile(weights, m, rows, at, blocks, place, count, out, column, columns)  # type: ignore[call-arg]
        column += columns
    for t in range(begin, end):
        if is_nan(blocks, block, parts - 1, t):
            out[:] = np.nan
