"""Layers of passes that decode, through torch.compile on a CPU.

Norms, rotations and gates of a layer become few loops (torch, Inductor). Attention and products of
packed weights stay as they are: each is an operator that torch.compile calls and does not look
into. What seals a chunk is never compiled: a compiled loop may round an element by its place among
others, and the entries of a chunk must not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase
from transformers import AttentionInterface, PreTrainedModel

from tangram.errors import ConfigError
from tangram.model.attention import AttentionContext, attention
from tangram.model.compiled import is_layer
from tangram.model.cpu_weights import Int8Linear, PackedLinear
from tangram.model.latent import OURS, has_latents
from tangram.model.modules import CompiledPart, derive, remake, replace_modules
from tangram.model.positions import find_counting

# Few rows are too little work for several threads, and a second pool of them would disturb torch's.
# PyTorch 2.11 fails to write its benchmark of a graph with packed weights.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "cpp.threads": 1,
    "compile_threads": 1,
    "size_asserts": False,
    "benchmark_harness": False,
}


class Uncompiled(OpaqueBase):
    """What torch.compile calls and does not look into: attention of a layer, or a product."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        self.call = call


register_opaque_type(Uncompiled, typ="reference")


_UNCOMPILED = get_opaque_type_name(Uncompiled)


@torch.library.custom_op(
    "tangram::attend",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_UNCOMPILED} layer, float scaling, float? softcap, "
    "Tensor? sinks) -> Tensor",
)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`AttentionContext.attend` of a layer."""
    out: Tensor = layer.call(q, k, v, scaling=scaling, softcap=softcap, s_aux=sinks)
    return out.contiguous()


@torch.library.custom_op(
    "tangram::multiply",
    mutates_args=(),
    schema=f"(Tensor x, {_UNCOMPILED} product, int outputs) -> Tensor",
)
def _multiply(x: Tensor, product: Any, outputs: int) -> Tensor:
    return product.call(x)  # type: ignore[no-any-return]


@_attend.register_fake
def _make_output(q: Tensor, k: Tensor, v: Tensor, layer: Any, *options: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[-1]))


@_multiply.register_fake
def _make_product(x: Tensor, product: Any, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def _attention_of_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tangram: AttentionContext | Uncompiled,
    **options: Any,
) -> tuple[Tensor, None]:
    """`attention`, and what is compiled of it."""
    if not isinstance(tangram, Uncompiled):
        return attention(module, query, key, value, attention_mask, tangram=tangram, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    known = options["scaling"], options.get("softcap"), options.get("s_aux")
    return _attend(q, k, v, tangram, *known)[None], None


IMPLEMENTATION = f"{OURS}-decode"
AttentionInterface.register(IMPLEMENTATION, _attention_of_layer)


class _Rehearsal:
    """Stands for the attention of a pass that decodes, and computes nothing."""

    decodes_only = True

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return q.new_zeros((*q.shape[:2], v.shape[-1]))


def check_compilable(model: PreTrainedModel) -> None:
    """Raise `ConfigError` if the layers of `model` cannot be compiled here."""
    check_compiler(model.device)
    if not any(map(is_layer, model.modules())):
        raise ConfigError(
            f"compile_decode is set, but {type(model).__name__} has no layers of the kind that is "
            "compiled: leave it out"
        )
    if any(map(has_latents, model.modules())):
        raise ConfigError(
            "compile_decode is set, but layers with latent attention are not compiled: leave it out"
        )
    if any(getattr(part, "is_kv_shared_layer", False) for part in model.modules()):
        # They are of more kinds than torch compiles of one function.
        raise ConfigError(
            "compile_decode is set, but layers that read the keys and values of another layer are "
            "not compiled: leave it out"
        )
    if find_counting(model):
        raise ConfigError(
            "compile_decode is set, but attention that is told positions is not compiled: leave it "
            "out"
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
    use one model one after the other. Raises the error of `check_compilable`.
    """
    check_compilable(model)
    model.set_attn_implementation(IMPLEMENTATION)

    def make(name: str, layer: nn.Module) -> nn.Module:
        replace_modules(layer, _is_product, lambda _, part: _CalledProduct(part))
        attends = next(name for name, part in layer.named_modules() if hasattr(part, "layer_idx"))
        return remake(layer, partial(_switching, attends=attends))

    replace_modules(
        model, lambda _, part: is_layer(part) and not isinstance(part, CompiledPart), make
    )


def _is_product(name: str, part: nn.Module) -> bool:
    return isinstance(part, PackedLinear | Int8Linear)


@cache
def _switching(kind: type[Any], attends: str) -> type[nn.Module]:
    """Layers of `kind`, compiled for passes that decode; attention begins in the part `attends`."""
    # Without Transformers' wrapper, which all families share: graphs of a function are limited.
    compiled: Callable[..., Any] = torch.compile(unwrap(kind.forward), options=_OPTIONS)
    eager: Callable[..., Any] = kind.forward

    def forward(self: nn.Module, *args: Any, tangram: AttentionContext, **options: Any) -> Any:
        if not tangram.decodes_only:
            return eager(self, *args, tangram=tangram, **options)
        attention = Uncompiled(partial(tangram.attend, self.get_submodule(attends)))
        return compiled(self, *args, tangram=attention, **options)

    return derive(kind, CompiledPart, forward=forward)


class _CalledProduct(nn.Module):
    """A map whose product torch.compile calls, and does not look into."""

    def __init__(self, part: PackedLinear | Int8Linear) -> None:
        super().__init__()
        self.part, self.product = part, Uncompiled(part.forward)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _multiply(x, self.product, self.part.out_features)  # type: ignore[no-any-return]
        return self.part.forward(x)


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
