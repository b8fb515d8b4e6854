"""Which models can be served correctly: from the config and a probe of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from tangram.config import MOST_TOKENS
from tangram.errors import ModelError
from tangram.model.auto_classes import foreign_code
from tangram.model.probe import (
    AttentionCall,
    asked_calls,
    check_cache,
    check_computation,
    check_options,
    check_rows,
    check_states,
    find_shared,
    find_states,
    window_of,
)
from tangram.model.recurrent import StateShape, has_states
from tangram.types import Geometry, LayerHeads

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_NEEDED = {"vocab_size", "num_hidden_layers", "max_position_embeddings"}
_OF_LAYERS = {
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
}  # `probe_model` looks at those of each layer
# Layers of the other types are looked at by `probe_model`: they have states, or need none.
_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
    *("conv", "hybrid", "mlp", "moe"),
}


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise `ModelError`, naming the config field, if attention would be computed wrongly."""
    text, name = _text_part(config), config.model_type
    for field in _COUNTS:
        value = _read(name, text, field)
        if value is None and field in _NEEDED:
            raise ModelError(f"{name}: the config has no {field}, which bounds what is served")
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ModelError(
                f"{name}: {field} is {value!r}, it must be at least 1: fetch config.json again"
            )
    longest = _read(name, text, "max_position_embeddings")
    if longest > MOST_TOKENS:  # a mask of as many positions is looked at, and page tables are made
        raise ModelError(
            f"{name}: max_position_embeddings is {shortened(longest)}, at most {MOST_TOKENS} are "
            "served: set it to the length that the model was made for"
        )
    shared = _read(name, text, "num_kv_shared_layers")
    if shared and shared >= text.num_hidden_layers:
        raise ModelError(
            f"{name}: num_kv_shared_layers is {shared}, all layers: another model has their keys "
            "and values"
        )
    layer_types = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise ModelError(f"{name}: layer_types has {', '.join(unknown)}, which is not served")
    for field, why in (
        ("index_topk", "sparse attention reads the entries that an index chooses, not all of them"),
        ("use_bidirectional_attention", "bidirectional attention is not causal"),
        ("is_encoder_decoder", "encoder–decoder models are not decoders"),
    ):
        # "vision": only tokens of one picture see those after them.
        if (value := _read(name, text, field)) and value != "vision":
            raise ModelError(f"{name}: {field} is {value}: {why}")


def _read(name: str, config: PretrainedConfig, field: str) -> Any:
    """The value of a field, None if the config has none, or one for each layer that is looked at.

    Raises `ModelError` if layers differ in another one.
    """
    try:
        return getattr(config, field, None)
    except AmbiguousGlobalPerLayerAttributeError as error:
        if field in _OF_LAYERS:
            return None
        raise ModelError(
            f"{name}: {field} differs from layer to layer, but a cache has heads of one size"
        ) from error


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"{config.model_type}: its config has several text models and does not say which of "
            "them answers"
        ) from error


def refuse_class(config: PretrainedConfig) -> None:
    """Raise `ModelError` if Transformers has no class that would call the registered attention."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if getattr(config, "auto_map", None):
            raise foreign_code(str(config.name_or_path))
        raise ModelError(
            f"{config.model_type}: Transformers has no causal language model of this type"
        )
    if not _class_of(config)._can_set_attn_implementation():
        raise own_attention(config)


def own_attention(config: PretrainedConfig) -> ModelError:
    """The error of a model that calls attention of its own."""
    return ModelError(
        f"{config.model_type} ({_class_of(config).__name__}) cannot be served: it computes "
        "attention by code of its own, not through Transformers' attention interface"
    )


def _class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    known: type[PreTrainedModel] = made
    return known


@torch.inference_mode()
def probe_model(model: PreTrainedModel) -> tuple[Geometry, tuple[StateShape, ...]]:
    """The geometry as the model's own layers report it in forward passes of a few tokens, and what
    its recurrent layers keep of a sequence.

    Raises `ModelError` if a layer does not call the registered attention, or would be served
    wrongly, or if layers differ in shape.
    """
    config = model.config.get_text_config()
    longest, layers = int(config.max_position_embeddings), int(config.num_hidden_layers)
    with _blaming(f"{config.model_type} ({type(model).__name__}) cannot be served"):
        calls = asked_calls(model)
        numbers = [getattr(call.module, "layer_idx", None) for call in calls]
        by_layer = {at: call for at, call in zip(numbers, calls, strict=True) if type(at) is int}
        every = set(range(layers))
        expected = by_layer.keys() & every if has_states(model) else every
        if not calls or len(calls) != len(by_layer) or by_layer.keys() != expected:
            raise ModelError(
                f"{len(by_layer)} of {layers} layers call Transformers' attention interface, "
                f"{len(calls)} times in all; each layer must do so once"
            )
        windows, kinds = dict[int, int | None](), set[tuple[int | None, bool]]()
        for layer in sorted(expected):
            with _blaming(f"layer {layer}"):
                windows[layer], chunked = _check_call(by_layer[layer], longest)
                kinds |= {(windows[layer], chunked)} - {(None, False)}
        if len(kinds) > 1 and any(chunked for _, chunked in kinds):
            raise ModelError("layers attend within chunks and windows, or chunks of several sizes")
        size = getattr(config, "attention_chunk_size", None)
        if size is not None and size < longest and (size, True) not in kinds:
            raise ModelError(f"attention_chunk_size is {size}, but no layer attends within chunks")
        readers = _find_readers(calls, windows)
        full, windowed = _find_heads(by_layer, windows)
        check_cache(model.config, windows, longest)
        states = find_states(model)
        check_rows(model, calls[0], longest, states)
        check_states(model, states)
    latents = calls[0].heads
    storing = [layer for layer in windows if layer not in readers]
    geometry = Geometry(
        layers=len(storing),
        **full._asdict(),
        vocab_size=int(config.vocab_size),
        max_positions=longest,
        windows=tuple(windows[layer] for layer in storing),
        value_dim=None if latents is None else latents.rank,
        kv_layers=() if len(storing) == layers else _number_layers(storing, readers, layers),
        state_bytes=sum(state.bytes for state in states),
        chunked=any(chunked for _, chunked in kinds),
        window_heads=windowed,
    )
    return geometry, states


def _find_heads(
    calls: Mapping[int, AttentionCall], windows: Mapping[int, int | None]
) -> tuple[LayerHeads, LayerHeads | None]:
    """The heads of layers with full attention, and of those with a window if they are others.

    Raises `ModelError` if layers of one kind differ.
    """
    found = dict[bool, set[LayerHeads]]()
    for layer, window in windows.items():
        query, key, _ = (tuple(part.shape[1:]) for part in calls[layer].entries)
        found.setdefault(window is None, set()).add(LayerHeads(key[0], query[0], key[1]))
    if any(len(kinds) > 1 for kinds in found.values()):
        raise ModelError("layers of one kind differ in their numbers of heads or head dims")
    full, windowed = (found.get(kind, set()) for kind in (True, False))
    (heads,) = full or windowed
    others = windowed - {heads}
    return heads, others.pop() if others else None


def _find_readers(
    calls: Sequence[AttentionCall], windows: Mapping[int, int | None]
) -> dict[int, int]:
    """The layers that read an earlier one's keys and values, each with that layer.

    Raises `ModelError` if the two have other windows: a window decides which entries are held.
    """
    readers = dict[int, int]()
    for reading, read in find_shared(calls).items():
        layer, source = (int(calls[at].module.layer_idx) for at in (reading, read))  # type: ignore[arg-type]
        if layer < source:
            raise ModelError(f"layer {layer} runs after layer {source}, whose keys it reads")
        if windows[layer] != windows[source]:
            raise ModelError(
                f"layer {layer}: its window is {windows[layer]}, but it reads the keys of layer "
                f"{source}, whose window is {windows[source]}"
            )
        readers[layer] = source
    return readers


def _number_layers(
    storing: Sequence[int], readers: Mapping[int, int], layers: int
) -> tuple[int | None, ...]:
    """For each of `layers` the number of the `storing` one that it reads, None if it reads none."""
    numbers = {layer: number for number, layer in enumerate(storing)}
    return tuple(numbers.get(readers.get(layer, layer)) for layer in range(layers))


@contextmanager
def _blaming(subject: str) -> Iterator[None]:
    """What is raised within says of whom."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{subject}: {error}") from error


def _check_call(call: AttentionCall, longest: int) -> tuple[int | None, bool]:
    """`window_of` a layer. Raises `ModelError` if its attention would be computed wrongly."""
    check_options(call)
    window, chunked = window_of(call, longest)
    if call.heads is not None and window is not None:
        raise ModelError(f"it has latents and a window of {window} tokens")
    query, key, value = (tuple(part.shape[1:]) for part in call.entries)
    if query[1] != key[1] or query[0] % key[0] or (call.heads is None and key != value):
        raise ModelError(
            f"queries {query}, keys {key} and values {value} (heads, elements) do not fit together"
        )
    check_computation(call)
    return window, chunked
