"""What rounds a model's linear maps to 8 or 4 bits for its device, and which devices have products.

A row's product does not depend on the rows beside it (`RoundedLinear`): the purity law needs that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tangram.errors import ConfigError, ModelError
from tangram.model.cpu_weights import Int8Linear, make_rounded
from tangram.model.fused import join_projections
from tangram.model.gpu_weights import Int4GpuLinear, Int8GpuLinear, find_layout, pack_tiles
from tangram.model.latent import is_absorbed
from tangram.model.modules import replace_modules

# The compute capability of a GPU that each form needs.
_LEAST_CAPABILITY = {"int8": (7, 5), "int4": (8, 0), "fp8": (8, 9)}


def quantize(model: PreTrainedModel, form: str) -> None:
    """Replace the linear maps of `model` by rounded ones in `form` (int8, int4 or fp8).

    Embeddings, norms, biases and what decode absorbs (`latent.py`) stay. On a CPU int4 leaves the
    head in 8 bits. Raises `ConfigError` if the device has no such product, and `ModelError` if the
    model's weights do not fit it.
    """
    _refuse_experts(model, form)
    join_projections(model)
    replace_modules(model, _is_rounded, _maker(model, form))


def _maker(model: PreTrainedModel, form: str) -> Callable[[str, Any], nn.Module]:
    if model.device.type == "cpu":
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return lambda name, part: make_rounded(part, name, form, is_head=part is head)
    if form == "fp8":
        return lambda name, part: _round_by_torchao(part)
    if form == "int8":
        return lambda name, part: Int8GpuLinear(part, name)
    layout = find_layout(pack_tiles, model.device)
    return lambda name, part: Int4GpuLinear(part, layout)


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


def _round_by_torchao(part: nn.Linear) -> nn.Module:
    """`part` itself with a weight in FP8; each row of activations is rounded by itself."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    quantize_(part, config, filter_fn=lambda module, name: True)
    return part


def _is_rounded(name: str, part: Any) -> bool:
    return isinstance(part, nn.Linear) and not is_absorbed(name)
