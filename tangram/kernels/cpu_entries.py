"""Products of float32 rows with keys and values as they lie in a pool, on x86.

Entries are widened in registers. A sum is that of its row and entry alone, in one order, whatever
is computed beside it: a token drafted in front of others gets the bits that it gets alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tangram.kernels import cpu_portable
from tangram.kernels.cpu_widen import is_nan
from tangram.numba_cache import compile_kept

KEYS = 4  # that a query is multiplied with at once; so many scores behind the last are overwritten
_WIDE = torch.cpu._is_avx512_supported()
LANES = 16 if _WIDE else 8  # float32 elements of a vector
ROWS = 4 if _WIDE else 2  # of a tile: its sums stay in registers
VECTORS = 4  # of the columns of a value
_INDEX, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


class _Code:
    """Writes vector code over arrays that are contiguous."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder, self._context = builder, context
        self._signature, self._args = signature, args
        self.floats = ir.VectorType(_FLOAT, LANES)

    def array(self, place: int) -> tuple[Any, Any]:
        """The data of an argument that is an array, and how long its last dimension is."""
        array = self._context.make_array(self._signature.args[place])(
            self._context, self.builder, self._args[place]
        )
        shape = array.shape
        return array.data, self.builder.extract_value(shape, len(shape.type) - 1)

    def constant(self, value: int) -> Any:
        return ir.Constant(_INDEX, value)

    def at(self, data: Any, width: Any, row: Any, column: Any) -> Any:
        """The address of an element of a matrix."""
        place = self.builder.add(self.builder.mul(row, width), column)
        return self.builder.gep(data, [place])

    def load(self, pointer: Any, kind: Any) -> Any:
        """A vector of type `kind`, aligned as an element is."""
        loaded = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        loaded.align = kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4
        return loaded

    def store(self, value: Any, pointer: Any) -> None:
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        self.builder.store(value, pointer).align = 4

    def load_wide(self, pointer: Any, dtype: Any) -> Any:
        """LANES entries as float32; uint16 are bits of bfloat16, uint8 of E4M3, int8 integers."""
        if dtype == types.float32:
            return self.load(pointer, self.floats)
        builder, words = self.builder, ir.VectorType(_WORD, LANES)
        if dtype == types.uint16:
            narrow = self.load(pointer, ir.VectorType(ir.IntType(16), LANES))
            return builder.bitcast(self._shift(builder.zext(narrow, words), 16), self.floats)
        narrow = self.load(pointer, ir.VectorType(ir.IntType(8), LANES))
        if dtype == types.int8:
            return builder.sitofp(builder.sext(narrow, words), self.floats)
        return self._widen_e4m3(narrow)

    def _shift(self, words: Any, bits: int) -> Any:
        return self.builder.shl(words, ir.Constant(words.type, [bits] * LANES))

    def _widen_e4m3(self, narrow: Any) -> Any:
        """Exponents of E4M3 are 120 lower than those of float32. All ones but the sign are NaN."""
        builder, words = self.builder, ir.VectorType(_WORD, LANES)
        code = self._shift(builder.sext(narrow, words), 20)  # the sign fills the bits above it
        bits = builder.and_(code, ir.Constant(words, [0x87F00000] * LANES))
        scale = ir.Constant(self.floats, [2.0**120] * LANES)
        value = builder.fmul(builder.bitcast(bits, self.floats), scale)
        size = ir.Constant(words, [0x07F00000] * LANES)
        is_nan = builder.icmp_unsigned("==", builder.and_(code, size), size)
        return builder.select(is_nan, ir.Constant(self.floats, [float("nan")] * LANES), value)

    def spread(self, pointer: Any) -> Any:
        """A vector of one float32."""
        empty = ir.Constant(self.floats, ir.Undefined)
        lone = self.builder.insert_element(empty, self.builder.load(pointer), ir.Constant(_WORD, 0))
        everywhere = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
        return self.builder.shuffle_vector(lone, empty, everywhere)

    def fuse(self, total: Any, left: Any, right: Any) -> Any:
        """total + left · right, rounded once."""
        name = f"llvm.fma.v{LANES}f32"
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, [left, right, total])

    def shuffle(self, one: Any, other: Any, places: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(_WORD, len(places)), places)
        return self.builder.shuffle_vector(one, other, mask)

    def sum_each(self, four: list[Any]) -> Any:
        """The sums of four vectors, as one of four elements."""
        fours = range(0, LANES, 4)
        low = [place for at in fours for place in (at, LANES + at, at + 1, LANES + at + 1)]
        high = [place + 2 for place in low]
        one = self._fold(four[0], four[1], low, high)
        other = self._fold(four[2], four[3], low, high)
        low = [place for at in fours for place in (at, at + 1, LANES + at, LANES + at + 1)]
        high = [place + 2 for place in low]
        total = self._fold(one, other, low, high)
        for half in (8, 4) if LANES == 16 else (4,):
            total = self._fold(total, total, list(range(half)), list(range(half, 2 * half)))
        return total

    def _fold(self, one: Any, other: Any, low: list[int], high: list[int]) -> Any:
        return self.builder.fadd(self.shuffle(one, other, low), self.shuffle(one, other, high))

    def loop(self, count: Any, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
        """`sums` after `body` of 0, 1, … before `count`, which is 1 or more."""
        builder, before = self.builder, self.builder.block
        block, end = (builder.append_basic_block(name) for name in ("loop", "end"))
        builder.branch(block)
        builder.position_at_end(block)
        step = builder.phi(_INDEX)
        held = [builder.phi(value.type) for value in sums]
        added = body(step, held)
        following = builder.add(step, self.constant(1))
        last = builder.block
        for phi, first, later in zip(
            [step, *held], [self.constant(0), *sums], [following, *added], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(later, last)
        builder.cbranch(builder.icmp_signed("<", following, count), block, end)
        builder.position_at_end(end)
        return added


def _dot(rows: int) -> Any:
    """The scores of `rows` queries, of KEYS keys."""

    @intrinsic
    def dot_tile(
        typingctx: Any, query: Any, row: Any, blocks: Any, keys: Any, scores: Any, at: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code, dtype = _Code(context, builder, signature, args), signature.args[2].dtype
            (queries, dim), (entries, _), (out, width) = (code.array(i) for i in (0, 2, 4))
            lines = [builder.add(args[1], code.constant(i)) for i in range(rows)]
            places = [builder.extract_value(args[3], i) for i in range(KEYS)]

            def add(step: Any, sums: list[Any]) -> list[Any]:
                column = builder.mul(step, code.constant(LANES))
                right = [
                    code.load_wide(builder.gep(entries, [builder.add(place, column)]), dtype)
                    for place in places
                ]
                added = []
                for i, line in enumerate(lines):
                    left = code.load(code.at(queries, dim, line, column), code.floats)
                    own = sums[i * KEYS : (i + 1) * KEYS]
                    added += [
                        code.fuse(total, left, x) for total, x in zip(own, right, strict=True)
                    ]
                return added

            zero = ir.Constant(code.floats, [0.0] * LANES)
            steps = builder.udiv(dim, code.constant(LANES))
            sums = code.loop(steps, [zero] * (rows * KEYS), add)
            for i, line in enumerate(lines):
                found = code.sum_each(sums[i * KEYS : (i + 1) * KEYS])
                code.store(found, code.at(out, width, line, args[5]))
            return context.get_dummy_value()

        index = types.int64
        places = types.UniTuple(index, KEYS)  # type: ignore[no-untyped-call]
        return types.void(query, index, blocks, places, scores, index), codegen

    return dot_tile


def _add(rows: int, vectors: int) -> Any:
    """`rows` rows of sums of values, `vectors` of their columns."""

    @intrinsic
    def add_tile(
        typingctx: Any,
        weights: Any,
        row: Any,
        at: Any,
        blocks: Any,
        place: Any,
        count: Any,
        out: Any,
        column: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code, dtype = _Code(context, builder, signature, args), signature.args[3].dtype
            (factors, length), (entries, stride), (sums, width) = (code.array(i) for i in (0, 3, 6))
            lines = [builder.add(args[1], code.constant(i)) for i in range(rows)]
            columns = [builder.add(args[7], code.constant(i * LANES)) for i in range(vectors)]

            def add(step: Any, held: list[Any]) -> list[Any]:
                entry = builder.add(args[4], builder.mul(step, stride))
                right = [
                    code.load_wide(builder.gep(entries, [builder.add(entry, at)]), dtype)
                    for at in columns
                ]
                added = []
                for i, line in enumerate(lines):
                    left = code.spread(code.at(factors, length, line, builder.add(args[2], step)))
                    own = held[i * vectors : (i + 1) * vectors]
                    added += [
                        code.fuse(total, left, x) for total, x in zip(own, right, strict=True)
                    ]
                return added

            cells = [code.at(sums, width, line, at) for line in lines for at in columns]
            begun = [code.load(cell, code.floats) for cell in cells]
            for value, cell in zip(code.loop(args[5], begun, add), cells, strict=True):
                code.store(value, cell)
            return context.get_dummy_value()

        index = types.int64
        return types.void(weights, index, index, blocks, index, index, out, index), codegen

    return add_tile


_dot_one, _dot_two, _dot_three, _dot_four = (_dot(rows) for rows in (1, 2, 3, 4))
_add_one, _add_two, _add_three, _add_four = (_add(rows, VECTORS) for rows in (1, 2, 3, 4))
_add_narrow_one, _add_narrow_two, _add_narrow_three, _add_narrow_four = (
    _add(rows, 1) for rows in (1, 2, 3, 4)
)


@compile_kept()
def dot_keys(query, blocks, block, begin, end, scores, at, wide):  # type: ignore[no-untyped-def]
    """scores[m, at + i] = query[m] · key begin + i of `block`, before `end`.

    Up to KEYS − 1 scores behind the last one are overwritten.
    """
    parts, page, dim = blocks.shape[1:]
    if dim % LANES:
        cpu_portable.dot_keys(query, blocks, block, begin, end, scores, at, wide)
        return
    place, last = block * parts * page * dim, end - 1
    for t in range(begin, end, KEYS):
        keys = (
            place + t * dim,
            place + min(t + 1, last) * dim,
            place + min(t + 2, last) * dim,
            place + min(t + 3, last) * dim,
        )
        m, to = 0, at + t - begin
        while m < query.shape[0]:
            rows = min(query.shape[0] - m, ROWS)
            if rows == 4:
                _dot_four(query, m, blocks, keys, scores, to)
            elif rows == 3:
                _dot_three(query, m, blocks, keys, scores, to)
            elif rows == 2:
                _dot_two(query, m, blocks, keys, scores, to)
            else:
                _dot_one(query, m, blocks, keys, scores, to)
            m += rows
    for t in range(begin, end):  # behind the products, when the keys are near
        if is_nan(blocks, block, 0, t):
            scores[:, at + t - begin] = np.nan


@compile_kept()
def add_values(weights, at, blocks, block, begin, end, out, wide):  # type: ignore[no-untyped-def]
    """out[m] += Σ weights[m, at + i] · value begin + i of `block`, before `end`, one by one."""
    parts, page, dim = blocks.shape[1:]
    if out.shape[1] % LANES:
        cpu_portable.add_values(weights, at, blocks, block, begin, end, out, wide)
        return
    place, count = ((block * parts + parts - 1) * page + begin) * dim, end - begin
    column = 0
    while column < out.shape[1]:
        narrow = out.shape[1] - column < VECTORS * LANES
        m = 0
        while m < out.shape[0]:
            rows = min(out.shape[0] - m, ROWS)
            if narrow:
                _add_narrow(rows, weights, m, at, blocks, place, count, out, column)
            elif rows == 4:
                _add_four(weights, m, at, blocks, place, count, out, column)
            elif rows == 3:
                _add_three(weights, m, at, blocks, place, count, out, column)
            elif rows == 2:
                _add_two(weights, m, at, blocks, place, count, out, column)
            else:
                _add_one(weights, m, at, blocks, place, count, out, column)
            m += rows
        column += LANES if narrow else VECTORS * LANES
    for t in range(begin, end):
        if is_nan(blocks, block, parts - 1, t):
            out[:] = np.nan


@compile_kept()
def _add_narrow(rows, weights, m, at, blocks, place, count, out, column):  # type: ignore[no-untyped-def]
    """`add_values` for `rows` rows, and the columns of one vector."""
    if rows == 4:
        _add_narrow_four(weights, m, at, blocks, place, count, out, column)
    elif rows == 3:
        _add_narrow_three(weights, m, at, blocks, place, count, out, column)
    elif rows == 2:
        _add_narrow_two(weights, m, at, blocks, place, count, out, column)
    else:
        _add_narrow_one(weights, m, at, blocks, place, count, out, column)
