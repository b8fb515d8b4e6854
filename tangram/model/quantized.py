"""Linear maps with weights of 8 or 4 bits: PyTorch's packed products on a CPU, torchao's on a GPU.

Each row of activations is rounded by itself, so a row's product does not depend on the rows beside
it. The purity law needs that.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangram.errors import ConfigError, ModelError
from tangram.model.fused import join_projections
from tangram.model.latent import is_absorbed

GROUP = 32  # inputs that share a 4-bit scale, as in a GGUF block
_TILE = 16  # outputs, of which PyTorch's 4-bit product computes whole tiles
_MOST_8, _MOST_4 = 127, 15
_HALF_8, _HALF_4 = 128, 8  # what stands for zero in unsigned numbers
_LEAST_SCALE = 1e-30  # of a row of zeros


class Int8Linear(nn.Module):
    """y = x·Wᵀ + b, W [N, K] and x […, K] in 8 bits with a scale for each row of both.

    oneDNN's product, which adds integers exactly. The output has the dtype of x.
    """

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        weight = source.weight.data.float()
        scales = weight.abs().amax(1).clamp_min_(_LEAST_SCALE).div_(_MOST_8)
        rounded = weight.div(scales[:, None]).round_().to(torch.int8)
        ops: Any = torch.ops.onednn
        self.packed: Tensor = ops.qlinear_prepack(rounded, None)  # opaque, so it is no buffer
        self.register_buffer("scales", scales, persistent=False)
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        self.register_buffer("zeros", zeros, persistent=False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(-1, keepdim=True).float().clamp_min_(_LEAST_SCALE).div_(_MOST_8)
        rounded = rows.div(scale).add_(_HALF_8 + 0.5).to(torch.uint8)  # the cast cuts off
        ops: Any = torch.ops.onednn
        product: Tensor = ops.qlinear_pointwise(
            *(rounded, 1.0, _HALF_8, self.packed, self.scales, self.zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        product.mul_(scale)
        return _finish(product, self.bias, x)


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
        return _finish(product.to(x.dtype), self.bias, x)


def round_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers q [N, K/GROUP, GROUP] of 0 to 15, int32, and [N, K/GROUP, 2] of scale and offset.

    A weight is (q - 8) · scale + offset. The extremes of a group are 0 and 15, as in GGUF's Q4_1,
    so weights that were of this form are found again.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / _MOST_4
    scales = torch.stack([step, low + _HALF_4 * step], -1).to(torch.bfloat16)
    step, offset = scales.float().unsqueeze(2).unbind(-1)
    step = step.masked_fill(step == 0, 1.0)  # a group of one value, which is its offset
    rounded = groups.sub(offset).div_(step).round_().add_(_HALF_4).clamp_(0, _MOST_4)
    return rounded.to(torch.int32), scales


def quantize(model: PreTrainedModel, form: str) -> None:
    """Round the linear maps of `model` to `form` (int8, int4 or fp8), in place.

    Embeddings, norms, biases and what decode absorbs (`latent.py`) stay. On a CPU int4 leaves the
    head in 8 bits. Raises `ConfigError` if the device has no such product, and `ModelError` if the
    model's weights do not fit it.
    """
    _refuse_experts(model, form)
    join_projections(model)
    if model.device.type == "cuda":
        _quantize_on_gpu(model, form)
        return
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    maps = {name: part for name, part in model.named_modules() if _is_rounded(part, name)}
    for name, source in maps.items():
        # 4 bits cost the head the most; files of 4 bits keep it in 8, too.
        four = form == "int4" and source is not head
        if four and (source.in_features % GROUP or source.out_features % _TILE):
            raise ModelError(
                f"quantization is {form!r}, but {name} has {source.in_features} inputs and "
                f"{source.out_features} outputs, which must be multiples of {GROUP} and {_TILE}: "
                "use int8"
            )
        model.set_submodule(name, Int4Linear(source) if four else Int8Linear(source))


def check_quantization(form: str, device: torch.device) -> None:
    """Raise `ConfigError` if `device` has no product of weights in `form`."""
    if device.type == "cuda":
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"quantization is {form!r}, which needs torchao on a GPU: pip install torchao, or "
                "leave it out"
            )
        capability = torch.cuda.get_device_capability(device)
        if form == "fp8" and capability < (8, 9):
            raise ConfigError(
                f"quantization is {form!r}, which needs a GPU of compute capability 8.9, this one "
                f"has {capability[0]}.{capability[1]}: use int8"
            )
        return
    if form == "fp8":
        raise ConfigError(f"quantization is {form!r}, of which CPUs have no product: use int8")
    # Without these instructions the sums of pairs of products saturate in 16 bits.
    if not torch.cpu._is_vnni_supported():
        raise ConfigError(
            f"quantization is {form!r}, but this CPU lacks AVX512-VNNI, without which products of "
            "8 bits overflow: leave it out"
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


def _quantize_on_gpu(model: PreTrainedModel, form: str) -> None:
    """torchao's products; all three round each row of activations by itself, or not at all."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        PerRow,
        quantize_,
    )

    configs: dict[str, Any] = {
        "fp8": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        "int8": Int8WeightOnlyConfig,
        "int4": lambda: Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d"
        ),
    }
    config = configs[form]()
    # torchao goes from parent to child, and would find what several parents share again.
    for part in [part for name, part in model.named_modules() if _is_rounded(part, name)]:
        quantize_(part, config, filter_fn=lambda module, name: True)


def _is_rounded(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not is_absorbed(name)


def _finish(product: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """`product` [T, N] plus `bias`, in the dtype and the shape of `x`."""
    if bias is not None:
        product.add_(bias)
    return product.to(x.dtype).view(*x.shape[:-1], product.shape[-1])
