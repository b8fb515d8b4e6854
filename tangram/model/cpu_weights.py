"""Linear maps on a CPU: float32 of few rows, bfloat16 in oneDNN's order, weights of 8 and 4 bits.

PyTorch's and oneDNN's products. But for those in float32 a row's product does not depend on the
rows beside it: where rows of activations are rounded, each is by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tangram.errors import ModelError
from tangram.model.latent import is_absorbed
from tangram.model.modules import replace_modules
from tangram.model.rounding import (
    GROUP,
    RoundedLinear,
    round_to_4_bits,
    round_to_8_bits,
    row_scales,
)

_MOST_ROWS = 16  # more rows gain little
_LEAST_WEIGHTS = 1 << 17  # fewer stay in the cache of a core
# Above so many inputs oneDNN adds up a single row in another order than one of several, and on a
# processor without bfloat16 products with any number. There a single row is computed twice.
_ONE_SUM = 1024
# With AMX the order of a row's sums depends on the number of rows where there are more than these.
_AMX_ROWS = 32
_TILE = 16  # outputs, of which PyTorch's 4-bit product computes whole tiles
_VECTOR = 16  # inputs, of which PyTorch's product of 8-bit weights computes whole vectors
_HALF_8 = 128  # what stands for zero in unsigned numbers


class FewRowsLinear(nn.Linear):
    """y = x·Wᵀ + b with W [N, K], computed as (W·xᵀ)ᵀ where x has up to `most_rows` rows.

    MKL's product of a few rows with a weight, [M, K] · [K, N], reads the weight at a fraction of
    the memory's speed on AMD's processors. As [N, K] · [K, M] it reads it at full speed, for two
    rows and more.
    """

    def __init__(self, source: nn.Linear, most_rows: int = _MOST_ROWS) -> None:
        super().__init__(source.in_features, source.out_features, device="meta")
        self.weight, self.bias, self.most_rows = source.weight, source.bias, most_rows

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        if not 0 < count <= self.most_rows:
            return super().forward(x)
        if count == 1:
            rows = torch.cat([rows, rows])  # a product of one row is the slow one
        product = torch.mm(self.weight, rows.t())[:, :count].t().contiguous()
        if self.bias is not None:
            product += self.bias
        return product.view(*x.shape[:-1], self.out_features)


def is_amd() -> bool:
    """Whether MKL finds a processor of AMD, for which few rows are multiplied otherwise."""
    found = Path("/proc/cpuinfo")
    return found.is_file() and "AuthenticAMD" in found.read_text()


def multiply_few_rows_fast(model: nn.Module, chunk_tokens: int) -> None:
    """Replace the large float32 linear maps of `model`, which is on a CPU, by `FewRowsLinear`.

    A pass with a chunk of `chunk_tokens` has too many rows for the other order of sums: the entries
    of a chunk must not depend on the rows beside it. Engines that share a model keep to the
    smallest of their chunks.
    """

    def is_large(name: str, part: Any) -> bool:
        return (
            type(part) in (nn.Linear, FewRowsLinear)
            and part.weight.dtype is torch.float32
            and part.weight.numel() >= _LEAST_WEIGHTS
        )

    def make(name: str, part: Any) -> nn.Module:
        most_rows = part.most_rows if isinstance(part, FewRowsLinear) else _MOST_ROWS
        return FewRowsLinear(part, min(most_rows, chunk_tokens - 1))

    replace_modules(model, is_large, make)


class PackedLinear(nn.Linear):
    """y = x·Wᵀ + b in bfloat16, whose `weight` [N, K] lies in oneDNN's own order.

    `torch.nn.functional.linear` multiplies by oneDNN, too, but keeps the weights in the order of
    their rows. With few rows packed ones take two thirds to three quarters of the time
    (docs/cpu.md). A row gets the same bits beside any number of others.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, device="meta")
        packed = torch.ops.mkldnn._reorder_linear_weight(source.weight.detach(), None)
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), source.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
        if len(rows) <= _AMX_ROWS or not torch.cpu._is_amx_tile_supported():
            return self._multiply(rows).view(*x.shape[:-1], self.out_features)
        products = [self._multiply(part) for part in torch.split(rows, _AMX_ROWS)]
        return torch.cat(products).view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        one_sum = self.in_features <= _ONE_SUM and torch.cpu._is_avx512_bf16_supported()
        alone = len(rows) == 1 and not one_sum
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            torch.cat([rows] * 2) if alone else rows, self.weight, self.bias, "none", [], ""
        )
        return product[:1] if alone else product

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.to_dense()


def can_pack() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor, an x86 one."""
    x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return x86 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weights(model: nn.Module) -> None:
    """Replace the bfloat16 linear maps of `model`, which is on a CPU, by packed ones.

    The old weights are freed, unless something else holds them, as a tied embedding does.
    """
    replace_modules(model, is_packable, lambda name, part: PackedLinear(part))


def is_packable(name: str, part: Any) -> bool:
    """Whether the module `name` is a bfloat16 map whose weights nothing else reads."""
    return type(part) is nn.Linear and part.weight.dtype is torch.bfloat16 and not is_absorbed(name)


class Int8Linear(RoundedLinear):
    """`RoundedLinear` with W and x in 8 bits, a scale for each row of both.

    oneDNN's product, which adds integers exactly.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        rounded, scales = round_to_8_bits(source.weight.data)
        ops: Any = torch.ops.onednn
        self.packed: Tensor = ops.qlinear_prepack(rounded, None)  # opaque, so it is no buffer
        self.register_buffer("scales", scales, persistent=False)
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        self.register_buffer("zeros", zeros, persistent=False)

    def multiply(self, rows: Tensor) -> Tensor:
        """See `RoundedLinear`."""
        scale = row_scales(rows)
        rounded = rows.div(scale).add_(_HALF_8 + 0.5).to(torch.uint8)  # the cast cuts off
        ops: Any = torch.ops.onednn
        product: Tensor = ops.qlinear_pointwise(
            *(rounded, 1.0, _HALF_8, self.packed, self.scales, self.zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return product.mul_(scale)


class Int8WeightLinear(RoundedLinear):
    """`RoundedLinear` with W in 8 bits, a scale for each row, for CPUs without VNNI.

    PyTorch's product of x in bfloat16, which adds in float32.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        rounded, scales = round_to_8_bits(source.weight.data, torch.bfloat16)
        self.register_buffer("rounded", rounded, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def multiply(self, rows: Tensor) -> Tensor:
        """See `RoundedLinear`."""
        ops: Any = torch.ops.aten
        product = ops._weight_int8pack_mm(rows.to(torch.bfloat16), self.rounded, self.scales)
        return product.to(rows.dtype)  # type: ignore[no-any-return]


class Int4Linear(RoundedLinear):
    """`RoundedLinear` with W in 4 bits, a scale and an offset for each `GROUP` inputs.

    PyTorch's product of x in bfloat16, which adds in float32.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        rounded, scales = round_to_4_bits(source.weight.data)
        ops: Any = torch.ops.aten
        packed = ops._convert_weight_to_int4pack_for_cpu(rounded.flatten(1), 1)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales.transpose(0, 1).contiguous(), persistent=False)

    def multiply(self, rows: Tensor) -> Tensor:
        """See `RoundedLinear`."""
        ops: Any = torch.ops.aten
        product = ops._weight_int4pack_mm_for_cpu(
            rows.to(torch.bfloat16), self.packed, GROUP, self.scales
        )
        return product.to(rows.dtype)  # type: ignore[no-any-return]


def make_rounded(source: nn.Linear, name: str, form: str, *, is_head: bool) -> RoundedLinear:
    """The map `source`, called `name`, in `form`, int8 or int4; a head is in 8 bits in both.

    Raises `ModelError` if its sizes do not fit the product.
    """
    # Without these instructions oneDNN's sums of pairs of products overflow 16 bits.
    has_vnni = torch.cpu._is_vnni_supported()
    # 4 bits cost the head the most; files of 4 bits keep it in 8, too.
    four = form == "int4" and not is_head
    if four and (source.in_features % GROUP or source.out_features % _TILE):
        raise ModelError(
            f"quantization is {form!r}, but {name} has {source.in_features} inputs and "
            f"{source.out_features} outputs, which must be multiples of {GROUP} and {_TILE}: "
            "use int8"
        )
    # This product has no bounds of its own: it reads behind other rows.
    if not (four or has_vnni) and source.in_features % _VECTOR:
        raise ModelError(
            f"quantization is {form!r}, but {name} has {source.in_features} inputs, which must "
            f"be a multiple of {_VECTOR} on a CPU without AVX512-VNNI: leave it out"
        )
    if four:
        return Int4Linear(source)
    return Int8Linear(source) if has_vnni else Int8WeightLinear(source)
