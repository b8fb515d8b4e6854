"""Linear maps with weights of 8 or 4 bits: PyTorch's packed products on a CPU, and what rounds a
model for its device.

Each row of activations is rounded by itself, so a row's product does not depend on the rows beside
it. The purity law needs that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangram.errors import ConfigError, ModelError
from tangram.model.fused import join_projections
from tangram.model.gpu_weights import Int4GpuLinear, Int8GpuLinear, find_layout, pack_tiles
from tangram.model.latent import is_absorbed
from tangram.model.rounding import (
    GROUP,
    finish_product,
    round_to_4_bits,
    round_to_8_bits,
    row_scales,
)

_TILE = 16  # outputs, of which PyTorch's 4-bit product computes whole tiles
_VECTOR = 16  # inputs, of which PyTorch's product of 8-bit weights computes whole vectors
_HALF_8 = 128  # what stands for zero in unsigned numbers
# The compute capability of a GPU that each form needs.
_LEAST_CAPABILITY = {"int8": (7, 5), "int4": (8, 0), "fp8": (8, 9)}


_Maker = Callable[[nn.Linear, str], nn.Module]  # of a map and its name


class Int8Linear(nn.Module):
    """y = x·Wᵀ + b, W [N, K] and x […, K] in 8 bits with a scale for each row of both.

    oneDNN's product, which adds integers exactly. The output has the dtype of x.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        rounded, scales = round_to_8_bits(source.weight.data)
        ops: Any = torch.ops.onednn
        self.packed: Tensor = ops.qlinear_prepack(rounded, None)  # opaque, so it is no buffer
        self.register_buffer("scales", scales, persistent=False)
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        self.register_buffer("zeros", zeros, persistent=False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, x.shape[-1])
        scale = row_scales(rows)
        rounded = rows.div(scale).add_(_HALF_8 + 0.5).to(torch.uint8)  # the cast cuts off
        ops: Any = torch.ops.onednn
        product: Tensor = ops.qlinear_pointwise(
            *(rounded, 1.0, _HALF_8, self.packed, self.scales, self.zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        product.mul_(scale)
        return finish_product(product, self.bias, x)


class Int8WeightLinear(nn.Module):
    """y = x·Wᵀ + b, W [N, K] in 8 bits with a scale for each row, for CPUs without VNNI.

    PyTorch's product of x in bfloat16, which adds in float32. The output has the dtype of x.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        rounded, scales = round_to_8_bits(source.weight.data, torch.bfloat16)
        self.register_buffer("rounded", rounded, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.rounded, self.scales)
        return finish_product(product.to(x.dtype), self.bias, x)


class Int4Linear(nn.Module):
    """y = x·Wᵀ + b, W [N, K] in 4 bits with a scale and an offset for each `GROUP` inputs.

    PyTorch's product of x in bfloat16, which adds in float32. The output has the dtype of x.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        rounded, scales = round_to_4_bits(source.weight.data)
        ops: Any = torch.ops.aten
        packed = ops._convert_weight_to_int4pack_for_cpu(rounded.flatten(1), 1)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales.transpose(0, 1).contiguous(), persistent=False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        ops: Any = torch.ops.aten
        product = ops._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales)
        return finish_product(product.to(x.dtype), self.bias, x)


def quantize(model: PreTrainedModel, form: str) -> None:
    """Round the linear maps of `model` to `form` (int8, int4 or fp8), in place.

    Embeddings, norms, biases and what decode absorbs (`latent.py`) stay. On a CPU int4 leaves the
    head in 8 bits. Raises `ConfigError` if the device has no such product, and `ModelError` if the
    model's weights do not fit it.
    """
    _refuse_experts(model, form)
    join_projections(model)
    on_gpu = model.device.type == "cuda"
    if on_gpu and form == "fp8":
        _quantize_by_torchao(model)
        return
    make = _gpu_maker(form, model.device) if on_gpu else _cpu_maker(model, form)
    # By their names: a map whose weights are rounded is released before the next one is.
    for name in [name for name, part in model.named_modules() if _is_rounded(part, name)]:
        source: Any = model.get_submodule(name)
        model.set_submodule(name, make(source, name))


def check_quantization(form: str, device: torch.device) -> None:
    """Raise `ConfigError` if `device` has no product of weights in `form`."""
    if device.type == "cuda":
        if form == "fp8" and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"quantization is {form!r}, which needs torchao: pip install torchao, or use int8"
            )
        found, least = torch.cuda.get_device_capability(device), _LEAST_CAPABILITY[form]
        if found < least:
            raise ConfigError(
                f"quantization is {form!r}, which needs a GPU of compute capability "
                f"{least[0]}.{least[1]}, this one has {found[0]}.{found[1]}: "
                + ("leave it out" if form == "int8" else "use int8")
            )
        return
    if form == "fp8":
        raise ConfigError(f"quantization is {form!r}, of which CPUs have no product: use int8")
    if not torch.cpu._is_avx2_supported():
        raise ConfigError(
            f"quantization is {form!r}, but this CPU lacks AVX2, which the products of small "
            "weights need: leave it out"
        )


def held_bytes(model: nn.Module) -> int:
    """Bytes of the weights of `model`, rounded or not."""
    kept = sum(_stored_bytes(entry) for entry in (*model.parameters(), *model.buffers()))
    return kept + sum(part.packed.nbytes for part in model.modules() if type(part) is Int8Linear)


def _stored_bytes(tensor: Tensor) -> int:
    """Of the tensors inside, if it is one of torchao's, which report what they stand for."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(_stored_bytes(getattr(tensor, name)) for name in flatten()[0])


def _refuse_experts(model: PreTrainedModel, form: str) -> None:
    experts = next((name for name, entry in model.named_parameters() if entry.ndim > 2), None)
    if experts is not None:
        raise ModelError(
            f"quantization is {form!r}, but {experts} is no linear map: weights of experts are not "
            "quantised: leave it out"
        )


def _cpu_maker(model: PreTrainedModel, form: str) -> _Maker:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # Without these instructions oneDNN's sums of pairs of products overflow 16 bits.
    has_vnni = torch.cpu._is_vnni_supported()

    def make(source: nn.Linear, name: str) -> nn.Module:
        # 4 bits cost the head the most; files of 4 bits keep it in 8, too.
        four = form == "int4" and source is not head
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

    return make


def _gpu_maker(form: str, device: torch.device) -> _Maker:
    if form == "int8":
        return Int8GpuLinear
    layout = find_layout(pack_tiles, device)
    return lambda source, name: Int4GpuLinear(source, layout)


def _quantize_by_torchao(model: PreTrainedModel) -> None:
    """To FP8, each row of activations by itself."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    # torchao goes from parent to child, and would find what several parents share again.
    for part in [part for name, part in model.named_modules() if _is_rounded(part, name)]:
        quantize_(part, config, filter_fn=lambda module, name: True)


def _is_rounded(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not is_absorbed(name)
