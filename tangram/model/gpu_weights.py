"""Linear maps with weights of 8 or 4 bits on a GPU, by PyTorch's own products.

In 8 bits each row of activations is rounded by itself, in 4 bits none is. So a row's product does
not depend on what the rows beside it hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tangram.errors import ModelError
from tangram.model.rounding import (
    GROUP,
    RoundedLinear,
    round_to_4_bits,
    round_to_8_bits,
    row_scales,
)

_MULTIPLE = 8  # of inputs and outputs, for cuBLAS's product of integers
FEW_ROWS = 16
"""The most rows that are multiplied with packed 4-bit weights.

That product reads all weights again for each 16 rows. With more rows, weights that are widened once
cost less.
"""
_ROWS = 32  # cuBLAS's product of integers refuses 16 rows and fewer
_INNER_TILES = 8  # the widest loads of PyTorch's 4-bit product
_TILE = (8, 16 * _INNER_TILES)  # outputs and inputs that are packed together
_TILE_NUMBERS = _TILE[0] * _TILE[1]
_NUMBERS_A_WORD = 8  # of 4 bits in 32
_WIDENED = 1 << 26  # weights that are widened at a time: 128 MiB, also of a large head

_library = torch.library.Library("tangram", "FRAGMENT")  # type: ignore[no-untyped-call]
# The compiler must not look inside. It would compile a dozen kernels for each shape, and keep the
# fastest one for the first number of rows that comes.
_library.define(  # type: ignore[no-untyped-call]
    "multiply_int8(Tensor rows, Tensor weight) -> Tensor"
)


@torch.library.impl(_library, "multiply_int8", "CompositeExplicitAutograd")
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _multiply_int8(rows: Tensor, weight: Tensor) -> Tensor:
    """Int8 [T, K] and [N, K] to int32 [T, N]; integers are added exactly."""
    return torch._int_mm(rows, weight.t())


@torch.library.register_fake("tangram::multiply_int8", lib=_library)  # type: ignore[untyped-decorator]
def _shape_int8(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.int32)


class Int8GpuLinear(RoundedLinear):
    """`RoundedLinear` with W and x in 8 bits, a scale for each row of both.

    Integers are added exactly, so a row's product is the same to the bit beside any other rows.
    Raises `ModelError` naming the map `name` if its sizes do not fit the product.
    """

    rounded: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N]

    def __init__(self, source: nn.Linear, name: str) -> None:
        super().__init__(source)
        if source.in_features % _MULTIPLE or source.out_features % _MULTIPLE:
            raise ModelError(
                f"quantization is 'int8', but {name} has {source.in_features} inputs and "
                f"{source.out_features} outputs, which must be multiples of {_MULTIPLE} on a GPU: "
                "use int4"
            )
        rounded, scales = round_to_8_bits(source.weight.data)
        self.register_buffer("rounded", rounded, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def multiply(self, rows: Tensor) -> Tensor:
        """See `RoundedLinear`."""
        count = rows.shape[0]
        # Always to a multiple, so that few rows need no other graph than many.
        rows = pad(rows, (0, 0, 0, -count % _ROWS))
        scale = row_scales(rows)
        rounded = rows.div(scale).round_().to(torch.int8)
        product: Tensor = torch.ops.tangram.multiply_int8(rounded, self.rounded)
        return product[:count].mul(scale[:count]).mul_(self.scales)


@dataclass(frozen=True)
class TileLayout:
    """Where PyTorch's packing puts the numbers of a tile, counted along its outputs' rows.

    Number i is in the word `words[i]` of its tile, from the bit `shifts[i]` on; both are int32.
    """

    words: Tensor
    shifts: Tensor


def find_layout(pack: Callable[[Tensor], Tensor], device: torch.device) -> TileLayout:
    """The layout of `pack`, which makes words of the numbers [8, 128] of a tile.

    It is asked what it does with tiles that hold the numbers' places. So no version of PyTorch is
    taken for granted. Raises `ModelError` if it is no permutation.
    """
    places = torch.arange(_TILE_NUMBERS, device=device, dtype=torch.int32)
    shifts = torch.arange(0, 4 * _NUMBERS_A_WORD, 4, device=device, dtype=torch.int32)
    found = torch.zeros_like(places)
    for bit in range(0, _TILE_NUMBERS.bit_length() - 1, 4):
        words = pack(((places >> bit) & 15).view(_TILE)).flatten()
        found |= ((words[:, None] >> shifts) & 15).flatten() << bit
    order = found.argsort()
    if not torch.equal(found[order], places):
        raise ModelError(
            f"quantization is 'int4', but torch {torch.__version__} packs tiles of "
            f"{_TILE[0]} x {_TILE[1]} numbers in a way that cannot be read back: use int8"
        )
    return TileLayout((order // _NUMBERS_A_WORD).int(), shifts[order % _NUMBERS_A_WORD])


def pack_tiles(numbers: Tensor) -> Tensor:
    """Numbers of 0 to 15 [N, K] as PyTorch's 4-bit product reads them, [N/8, K/128, 32, 4]."""
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    ops: Any = torch.ops.aten
    packed: Tensor = ops._convert_weight_to_int4pack(pairs.contiguous(), _INNER_TILES)
    return packed


def multiply_tiles(rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Bfloat16 [T, K] and weights of `pack_tiles` to [T, N], 16 rows at a time."""
    ops: Any = torch.ops.aten
    product: Tensor = ops._weight_int4pack_mm(rows, packed, GROUP, scales)
    return product


class Int4GpuLinear(RoundedLinear):
    """`RoundedLinear` with W in 4 bits, a scale and an offset for each `GROUP` inputs.

    Up to `FEW_ROWS` rows are multiplied with the packed weights, more with the weights widened to
    bfloat16. Both take x in bfloat16 and add in float32. `layout` is that of `pack_tiles`.
    """

    packed: Tensor
    scales: Tensor  # bfloat16 [K/GROUP, N, 2], of whole tiles
    words: Tensor
    shifts: Tensor

    def __init__(self, source: nn.Linear, layout: TileLayout) -> None:
        super().__init__(source)
        self.missing = -self.in_features % _TILE[1]
        # Whole tiles: zeros stay zeros in this form.
        weight = pad(source.weight.data, (0, self.missing, 0, -self.out_features % _TILE[0]))
        rounded, scales = round_to_4_bits(weight)
        self.register_buffer("packed", pack_tiles(rounded.flatten(1)), persistent=False)
        self.register_buffer("scales", scales.transpose(0, 1).contiguous(), persistent=False)
        # One of all maps.
        self.register_buffer("words", layout.words, persistent=False)
        self.register_buffer("shifts", layout.shifts, persistent=False)

    def multiply(self, rows: Tensor) -> Tensor:
        """See `RoundedLinear`."""
        narrow = rows.to(torch.bfloat16)
        if rows.shape[0] <= FEW_ROWS:
            whole = pad(narrow, (0, self.missing)) if self.missing else narrow.contiguous()
            product = multiply_tiles(whole, self.packed, self.scales)[:, : self.out_features]
        else:
            product = self._multiply_widened(narrow)
        return product.to(rows.dtype)

    def widen(self, begin: int = 0, end: int | None = None) -> Tensor:
        """The weights [N, K] of tiles `begin` to `end`, bfloat16.

        They are those of `multiply_tiles`, which rounds them to bfloat16, too.
        """
        packed = self.packed[begin:end].flatten(2)
        tiles, across, _ = packed.shape
        scales = self.scales[:, begin * _TILE[0] : (begin + tiles) * _TILE[0]]
        # In place, since without torch.compile each of these is as large as the weights.
        numbers = packed.index_select(2, self.words)
        numbers.bitwise_right_shift_(self.shifts).bitwise_and_(15).sub_(8)
        shape = (tiles, across, _TILE[0], _TILE[1] // GROUP, GROUP)
        values = numbers.to(torch.bfloat16).view(shape).transpose(1, 2)
        # [K/GROUP, N, 2] to [tiles, outputs, across, groups, 1, 2]
        step, offset = (
            scales.view(across, shape[3], tiles, shape[2], 1, 2)
            .permute(2, 3, 0, 1, 4, 5)
            .unbind(-1)
        )
        weight = torch.addcmul(offset, values, step).reshape(tiles * shape[2], -1)
        kept = self.out_features - begin * _TILE[0]
        return weight[:kept, : self.in_features]

    def _multiply_widened(self, rows: Tensor) -> Tensor:
        tiles, across = self.packed.shape[:2]
        at_once = max(1, _WIDENED // (across * _TILE_NUMBERS))
        parts = [
            linear(rows, self.widen(begin, begin + at_once)) for begin in range(0, tiles, at_once)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
