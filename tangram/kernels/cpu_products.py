"""Products of small matrices with AVX2, AVX-512 and AVX512-BF16, which Numba does not offer.

The left matrix of a product is float32, or uint16 that holds the bits of bfloat16. The right one is
an array of 32-bit words: float32, or uint32 that holds the bits of two rows of bfloat16. The
instruction for bfloat16 adds the products of such pairs. Sums are float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tangram.kernels.cpu_vectors import LANES

TILE_ROWS = 6
# Of the columns of a tile: its sums take 24 of 32 registers, or 12 of 16 with AVX2.
TILE_VECTORS = LANES // 4
_FLOAT, _WORD, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@intrinsic
def to_bfloat16(typingctx: Any, x: Any) -> Any:
    """The bits, uint16, of float32 x rounded to bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _BFloat()), ir.IntType(16))

    return types.uint16(types.float32), codegen


def _product(vectors: int) -> Any:
    """The product of a tile with columns of `vectors` vectors."""

    @intrinsic
    def multiply_tile(
        typingctx: Any,
        a: Any,
        row: Any,
        steps: Any,
        b: Any,
        c: Any,
        place: Any,
        column: Any,
        adds: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = [
                context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 3, 4)
            ]
            _Tile(builder, arrays, vectors, signature.args[0].dtype).emit(
                args[1], args[2], args[5], args[6], args[7]
            )
            return context.get_dummy_value()

        index = types.int64
        return types.void(a, index, index, b, c, index, index, types.boolean), codegen

    return multiply_tile


class _Tile:
    """Writes the code of one product: a loop over steps, its sums in registers."""

    def __init__(self, builder: Any, arrays: Any, vectors: int, dtype: Any) -> None:
        self._builder, self._vectors = builder, vectors
        self._narrow = dtype != types.float32
        word = _WORD if self._narrow else _FLOAT
        self._words = ir.VectorType(word, LANES)
        pointers = [builder.bitcast(x.data, word.as_pointer()) for x in arrays[:2]]
        self._a, self._b, self._c = *pointers, arrays[2].data
        self._widths = [builder.extract_value(x.shape, 1) for x in arrays]
        if self._narrow:
            self._widths[0] = builder.lshr(self._widths[0], ir.Constant(_INDEX, 1))

    def emit(self, row: Any, steps: Any, place: Any, column: Any, adds: Any) -> None:
        """C[place + i, column + j] = Σ A[row + i, s] · B[s, column + j], added to it if `adds`."""
        builder = self._builder
        cells = self._cells(place, column)
        before = builder.block
        load, loop, end = (builder.append_basic_block(name) for name in ("load", "loop", "end"))
        builder.cbranch(adds, load, loop)
        builder.position_at_end(load)
        held = [self._load(cell, _SUMS) for cell in cells]
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(_INDEX)
        sums = [builder.phi(_SUMS) for _ in cells]
        for total, value in zip(sums, held, strict=True):
            total.add_incoming(ir.Constant(_SUMS, [0.0] * LANES), before)
            total.add_incoming(value, load)
        added = self._add_step(row, step, column, sums)
        following = builder.add(step, ir.Constant(_INDEX, 1))
        for block, value in ((before, ir.Constant(_INDEX, 0)), (load, ir.Constant(_INDEX, 0))):
            step.add_incoming(value, block)
        step.add_incoming(following, loop)
        for total, value in zip(sums, added, strict=True):
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, end)
        builder.position_at_end(end)
        for cell, value in zip(cells, added, strict=True):
            builder.store(value, builder.bitcast(cell, _SUMS.as_pointer())).align = 4

    def _cells(self, place: Any, column: Any) -> list[Any]:
        """Pointers to the vectors of C that the product fills, row by row."""
        builder = self._builder
        return [
            self._at(self._c, self._widths[2], builder.add(place, ir.Constant(_INDEX, i)), at)
            for i in range(TILE_ROWS)
            for at in self._columns(column)
        ]

    def _columns(self, column: Any) -> list[Any]:
        starts = range(0, self._vectors * LANES, LANES)
        return [self._builder.add(column, ir.Constant(_INDEX, start)) for start in starts]

    def _at(self, base: Any, width: Any, row: Any, column: Any) -> Any:
        builder = self._builder
        return builder.gep(base, [builder.add(builder.mul(row, width), column)])

    def _load(self, pointer: Any, kind: Any) -> Any:
        loaded = self._builder.load(self._builder.bitcast(pointer, kind.as_pointer()))
        loaded.align = 4
        return loaded

    def _add_step(self, row: Any, step: Any, column: Any, sums: list[Any]) -> list[Any]:
        """`sums` after one step, row by row."""
        builder = self._builder
        right = [
            self._operand(self._load(self._at(self._b, self._widths[1], step, at), self._words))
            for at in self._columns(column)
        ]
        added = []
        for i in range(TILE_ROWS):
            line = builder.add(row, ir.Constant(_INDEX, i))
            word = builder.load(self._at(self._a, self._widths[0], line, step))
            empty = ir.Constant(self._words, ir.Undefined)
            lone = builder.insert_element(empty, word, ir.Constant(_WORD, 0))
            everywhere = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
            left = self._operand(builder.shuffle_vector(lone, empty, everywhere))
            own = sums[i * self._vectors : (i + 1) * self._vectors]
            added += [self._fuse(total, left, x) for total, x in zip(own, right, strict=True)]
        return added

    def _operand(self, words: Any) -> Any:
        return self._builder.bitcast(words, _PAIRS) if self._narrow else words

    def _fuse(self, total: Any, left: Any, right: Any) -> Any:
        """total + left · right; both orders of the arguments are LLVM's."""
        if self._narrow:
            name, args = "llvm.x86.avx512bf16.dpbf16ps.512", [total, left, right]
        else:
            name, args = f"llvm.fma.v{LANES}f32", [left, right, total]
        kind = ir.FunctionType(_SUMS, [x.type for x in args])
        function = cgutils.get_or_insert_function(self._builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self._builder.call(function, args)


multiply_tile, multiply_column = _product(TILE_VECTORS), _product(1)
