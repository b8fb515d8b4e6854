"""Layers of passes that decode, through torch.compile on a CPU.

Norms, rotations and gates of a layer become few loops (torch, Inductor). Attention and products of
packed weights stay as they are: each is an operator that torch.compile calls and does not look
into. What seals a chunk is never compiled: a compiled loop may round an element by its place among
others, and the entries of a chunk must not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tangram.errors import ConfigError
from tangram.model.attention import IMPLEMENTATION, AttentionContext, attention
from tangram.model.latent import latent_heads
from tangram.model.onednn import PackedLinear
from tangram.model.quantized import Int8Linear

# Few rows are too little work for several threads, and a second pool of them would disturb torch's.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "cpp.threads": 1,
    "compile_threads": 1,
    "size_asserts": False,
}


class LayerAttention(OpaqueBase):
    """The attention of layer `module` in one pass."""

    def __init__(self, context: AttentionContext, module: nn.Module) -> None:
        self.context, self.module = context, module


class Product(OpaqueBase):
    """y of x [T, K] → [T, N] by weights that torch.compile cannot read."""

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self.multiply = multiply


for _type in (LayerAttention, Product):
    register_opaque_type(_type, typ="reference")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`AttentionContext.attend` of `layer`, a `LayerAttention`."""
    options = {"scaling": scaling, "softcap": softcap, "s_aux": sinks}
    out: Tensor = layer.context.attend(layer.module, q, k, v, **options)
    return out.contiguous()


def _multiply(x: Tensor, product: Any, outputs: int) -> Tensor:
    return product.multiply(x)  # type: ignore[no-any-return]


_attend_op = torch.library.custom_op(
    "tangram::attend",
    _attend,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {get_opaque_type_name(LayerAttention)} layer, "
    "float scaling, float? softcap, Tensor? sinks) -> Tensor",
)
_multiply_op = torch.library.custom_op(
    "tangram::multiply",
    _multiply,
    mutates_args=(),
    schema=f"(Tensor x, {get_opaque_type_name(Product)} product, int outputs) -> Tensor",
)


@_attend_op.register_fake
def _make_output(q: Tensor, k: Tensor, v: Tensor, layer: Any, *options: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[-1]))


@_multiply_op.register_fake
def _make_product(x: Tensor, product: Any, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def _attention_of_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tangram: AttentionContext | LayerAttention,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attention`, and what is compiled of it."""
    if not isinstance(tangram, LayerAttention):
        return attention(module, query, key, value, attention_mask, tangram=tangram, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    known = options["scaling"], options.get("softcap"), options.get("s_aux")
    return _attend_op(q, k, v, tangram, *known)[None], None


class _Rehearsal:
    """Stands for the attention of a pass that decodes, and computes nothing."""

    decodes_only = True

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return q.new_zeros((*q.shape[:2], v.shape[-1]))


def check_compilable(model: PreTrainedModel) -> None:
    """Raise `ConfigError` if the layers of `model` cannot be compiled here."""
    check_compiler(model.device)
    if not any(isinstance(part, GradientCheckpointingLayer) for part in model.modules()):
        raise ConfigError(
            f"compile_decode is set, but {type(model).__name__} has no layers of the kind that is "
            "compiled: leave it out"
        )
    if any(latent_heads(part) is not None for part in model.modules()):
        raise ConfigError(
            "compile_decode is set, but layers with latent attention are not compiled: leave it out"
        )


def check_compiler(device: torch.device) -> None:
    """Raise `ConfigError` if no layers can be compiled on `device`, whatever they are."""
    if device.type != "cpu":
        raise ConfigError(
            "compile_decode is set, but the model is on a GPU, where layers are compiled without "
            "it: leave it out"
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "compile_decode needs a C++ compiler, and none is found: install g++ (Debian: "
            "apt-get install g++), or leave it out"
        ) from error


def compile_decode(model: PreTrainedModel) -> None:
    """Let passes of `model` whose `AttentionContext.decodes_only` run compiled layers.

    They are compiled at their first call. What is compiled already stays so: several engines may
    use one model one after the other.
    """
    AttentionInterface.register(IMPLEMENTATION, _attention_of_layer)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and "forward" not in vars(layer):
            for part in layer.modules():
                if isinstance(part, PackedLinear | Int8Linear):
                    _call_as_operator(part)
            vars(layer)["forward"] = _switch(layer)


def _switch(layer: nn.Module) -> Callable[..., Any]:
    """The forward of `layer`, compiled for passes that decode."""
    # Without Transformers' wrapper, which all families share: graphs of a function are limited.
    compiled: Callable[..., Any] = torch.compile(unwrap(type(layer).forward), options=_OPTIONS)
    eager = layer.forward
    module = next(part for part in layer.modules() if hasattr(part, "layer_idx"))

    def forward(*args: Any, tangram: AttentionContext, **options: Any) -> Any:
        if not tangram.decodes_only:
            return eager(*args, tangram=tangram, **options)
        return compiled(layer, *args, tangram=LayerAttention(tangram, module), **options)

    return forward


def _call_as_operator(part: PackedLinear | Int8Linear) -> None:
    """Let torch.compile call the product of `part` without looking into it."""
    eager = part.forward
    product = Product(eager)
    outputs: int = part.scales.numel() if isinstance(part, Int8Linear) else part.out_features  # type: ignore[operator]

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _multiply_op(x, product, outputs)  # type: ignore[no-any-return]
        return eager(x)

    vars(part)["forward"] = forward


@torch.inference_mode()
def rehearse_decode(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """Compile for passes of each number of `tokens`, or read what was compiled before."""
    for count in tokens:
        model(
            input_ids=torch.zeros(1, count, dtype=torch.int64),
            position_ids=torch.zeros(1, count, dtype=torch.int64),
            use_cache=False,
            logits_to_keep=1,
            tangram=_Rehearsal(),
        )
