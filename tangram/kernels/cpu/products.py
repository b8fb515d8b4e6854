"""Products of small matrices with AVX2, AVX-512 and AVX512-BF16, which Numba does not offer.

The left matrix of a product is float32, or uint16 that holds the bits of bfloat16. The right one is
an array of 32-bit words: float32, or uint32 that holds the bits of two rows of bfloat16. The
instruction for bfloat16 adds the products of such pairs. Sums are float32.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from tangram.kernels.cpu.vectors import LANES, WORD, BFloat, VectorCode

TILE_ROWS = 6
# Of the columns of a tile: its sums take 24 of 32 registers, or 12 of 16 with AVX2.
TILE_VECTORS = LANES // 4


@intrinsic
def to_bfloat16(typingctx: Any, x: Any) -> Any:
    """The bits, uint16, of float32 x rounded to bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = builder.fptrunc(args[0], BFloat())
        return builder.bitcast(narrow, context.get_value_type(types.uint16))

    return types.uint16(types.float32), codegen


def _product(vectors: int) -> Any:
    """The product of a tile with columns of `vectors` vectors.

    C[place + i, column + j] = Σ A[row + i, s] · B[s, column + j], added to it if `adds`.
    """

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
            code = VectorCode(context, builder, signature, args)
            (left, depth), (right, width), (sums, line) = (code.array(i) for i in (0, 3, 4))
            kind = code.floats
            if signature.args[0].dtype != types.float32:  # in words of two, as on the right
                kind, left = code.words, builder.bitcast(left, WORD.as_pointer())
                depth = builder.lshr(depth, code.constant(1))
            rows, columns = code.behind(args[1], TILE_ROWS), code.behind(args[6], vectors, LANES)

            def add(step: Any, held: list[Any]) -> list[Any]:
                entries = [code.load(code.at(right, width, step, at), kind) for at in columns]
                factors = (code.spread(code.at(left, depth, m, step)) for m in rows)
                return code.add_products(held, factors, entries)

            lines = code.behind(args[5], TILE_ROWS)
            cells = [code.at(sums, line, m, at) for m in lines for at in columns]
            # `adds` is a constant: what is loaded for nothing is not loaded.
            begun = [builder.select(args[7], code.load(x, code.floats), code.zero) for x in cells]
            for value, cell in zip(code.loop(args[2], begun, add), cells, strict=True):
                code.store(value, cell)
            return context.get_dummy_value()

        index = types.int64
        return types.void(a, index, index, b, c, index, index, types.boolean), codegen

    return multiply_tile


multiply_tile, multiply_column = _product(TILE_VECTORS), _product(1)
