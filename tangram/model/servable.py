"""Which models can be served correctly, from the config and from a probe of the model itself."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tangram.errors import ModelError
from tangram.model.latent import LatentHeads, join_entries, latent_heads, output_like
from tangram.types import Geometry

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# These change their frequencies with the longest sequence of the batch: one request would change
# another's keys.
_ROPE_TYPES_REFUSED = {"dynamic", "longrope"}


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise `ModelError`, naming the config field, if attention would be computed wrongly."""
    text = config.get_text_config()
    name = getattr(config, "model_type", "?")
    for field in _COUNTS:
        value = getattr(text, field, None)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ModelError(
                f"{name}: {field} is {value!r}, it must be at least 1: fetch config.json again"
            )
    layer_types = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise ModelError(
            f"{name}: layer_types has {', '.join(unknown)}; only full and sliding attention are "
            "served"
        )
    for rope_type in _rope_types(getattr(text, "rope_parameters", None)):
        if rope_type in _ROPE_TYPES_REFUSED:
            raise ModelError(
                f"{name}: rope_type {rope_type!r} depends on the longest sequence of a batch, so "
                "one request would change another's cache; set a fixed rope_type such as 'yarn' or "
                "'linear' in config.json"
            )
    for field, why in (
        ("index_topk", "sparse attention reads the entries that an index chooses, not all of them"),
        ("attention_chunk_size", "chunked attention is not full or sliding attention"),
        (
            "num_kv_shared_layers",
            "layers that share another layer's keys cannot be paged on their own",
        ),
        ("use_bidirectional_attention", "bidirectional attention is not causal"),
        ("is_encoder_decoder", "encoder–decoder models are not decoders"),
    ):
        if getattr(text, field, None):
            raise ModelError(f"{name}: {field} is {getattr(text, field)}: {why}")


def _rope_types(parameters: Any) -> list[str]:
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(entry.get("rope_type", "default")) for entry in nested or [parameters]]


class _Probe:
    """Replaces a step's attention and records what each layer passes."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Size, torch.Size, torch.Size, int | None]] = {}
        self.problems: list[str] = []
        self.value_dim: int | None = None

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer in self.layers:
            self.problems.append(f"layer {layer} calls attention more than once")
        if not getattr(module, "is_causal", True):
            self.problems.append(f"layer {layer} is not causal")
        heads = latent_heads(module)
        out = output_like(module, q).zero_()
        if heads is not None:
            self.value_dim = heads.rank
            k, v = join_entries(k, v)
            self._check_latents(layer, heads, q, k, options)
            q, v = heads.absorb(q), k
        self.layers[layer] = (q.shape, k.shape, v.shape, options.get("sliding_window"))
        return out

    def _check_latents(
        self, layer: int, heads: LatentHeads, q: torch.Tensor, k: torch.Tensor, options: Any
    ) -> None:
        """Note what decode would compute wrongly: it absorbs the expansion of any latents."""
        for name in ("sliding_window", "softcap", "s_aux"):
            if options.get(name) is not None:
                self.problems.append(f"layer {layer} has latents and {name}")
        random = torch.Generator(q.device).manual_seed(0)
        q, k = (torch.randn(x.shape, generator=random, device=q.device).to(q) for x in (q, k))
        keys, values = heads.expand(k[:, 0])
        expanded = torch.einsum("tqd,qnd->tqn", q, keys), values.transpose(0, 1)
        latents = k[:, 0].expand(q.shape[1], -1, -1).transpose(0, 1)
        absorbed = heads.absorb(q) @ k[:, 0].T, heads.read_values(latents[..., : heads.rank])
        for ours, theirs in zip(absorbed, expanded, strict=True):
            if (ours - theirs).abs().max() > 0.05 * theirs.abs().max():
                self.problems.append(f"layer {layer} expands latents by more than a matrix")


def probe_geometry(model: PreTrainedModel) -> Geometry:
    """The geometry as the model's own layers report it in one forward pass over two tokens.

    Raises `ModelError` if a layer does not call the registered attention, or layers differ in
    shape.
    """
    config = model.config.get_text_config()
    probe = _Probe()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=positions, use_cache=False, tangram=probe)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} does not pass the step through to its attention: {error}"
        ) from error
    layers = int(config.num_hidden_layers)
    if sorted(probe.layers) != list(range(layers)):
        probe.problems.append(
            f"{len(probe.layers)} of {layers} layers went through the registered attention"
        )
    if len({entry[:3] for entry in probe.layers.values()}) != 1:
        probe.problems.append("layers differ in their numbers of heads or head dims")
    if probe.problems:
        raise ModelError(f"{type(model).__name__} cannot be served: {'; '.join(probe.problems)}")
    query, key, value, _ = probe.layers[0]
    if key != value or query[-1] != key[-1] or query[1] % key[1]:
        raise ModelError(
            f"{type(model).__name__}: queries {query}, keys {key} and values {value} do not fit "
            "together"
        )
    return Geometry(
        layers=layers,
        kv_heads=int(key[1]),
        query_heads=int(query[1]),
        head_dim=int(key[2]),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
        windows=tuple(probe.layers[layer][3] for layer in range(layers)),
        value_dim=probe.value_dim,
    )
