"""The rotary embeddings that scorers undo: half-rotation, and of each layer as it shows itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tangram.compress.scorers.rotation import unrotate
from tangram.errors import ModelError
from tangram.model.probe import listen
from tangram.model.recurrent import StateShape, begin_rows
from tangram.types import Geometry

# int64 positions [n] → (cos, sin), each float32 [n, D_rot]; see `ChunkView.rotary`.
Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]

_TOKENS, _POSITIONS = (0, 1), (0, 3, 1000)
_ROUNDING = 0.02  # of the largest element, in 16 bits


@torch.inference_mode()
def layer_rotaries(
    model: PreTrainedModel, geometry: Geometry, states: Sequence[StateShape] = ()
) -> Mapping[int, Rotary]:
    """The rotary embedding of each full-attention layer; that of a layer without one turns nothing.

    A pass of a few tokens at several positions tells: undoing a layer's own embedding leaves the
    same queries everywhere. Dimension i must rotate with i + D_rot/2. Raises `ModelError` if the
    layer rotates other pairs (GLM and Cohere interleave) or knows positions otherwise: scores would
    be silently wrong. `states` are those of the model's recurrent layers.
    """
    places = [min(place, geometry.max_positions - 1) for place in _POSITIONS for _ in _TOKENS]
    begun = begin_rows(states, len(places), model.device) if states else None
    calls, _ = listen(model, [*_TOKENS] * len(_POSITIONS), places, [0], begun)
    queries = {  # of the layers that store what they read, which come before others
        geometry.find_layer(int(call.module.layer_idx))[0]: call.q  # type: ignore[arg-type]
        for call in reversed(calls)
    }
    known = [*_embeddings(model), _still(geometry.head_dim)]
    positions = torch.tensor(places, device=model.device)
    found = dict[int, Rotary]()
    for layer in geometry.full_layers:
        fitting = (rotary for rotary in known if _undoes(rotary, queries[layer], positions))
        rotary = next(fitting, None)
        if rotary is None:
            raise ModelError(
                f"the queries of layer {layer} of {type(model).__name__} depend on positions by "
                "more than a rotation of halves, which this scorer could undo: choose another one"
            )
        found[layer] = rotary
    return found


def _undoes(rotary: Rotary, queries: Tensor, positions: Tensor) -> bool:
    """Whether it makes `queries` [T, Q, D], of the same tokens at each position, equal."""
    cos, sin = rotary(positions)
    if cos.shape[-1] > queries.shape[-1]:
        return False
    still = unrotate(queries.transpose(0, 1).float(), cos, sin)
    still = torch.unflatten(still, 1, (-1, len(_TOKENS)))
    return bool((still - still[:, :1]).abs().max() <= _ROUNDING * still.abs().max())


def _embeddings(model: PreTrainedModel) -> Iterator[Rotary]:
    """Those of the model's modules, for each type of layers that they tell apart."""
    like = torch.empty(0, dtype=torch.float32, device=model.device)

    def embedding(module: Any, **options: str) -> Rotary:
        def embed(positions: Tensor) -> tuple[Tensor, Tensor]:
            angles = module(like, positions[None], **options)
            # Llama 4 has a complex number for both.
            cos, sin = (angles.real, angles.imag) if isinstance(angles, Tensor) else angles
            return cos[0], sin[0]

        return embed

    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        for options in (
            [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]
        ):
            embed = embedding(module, **options)
            yield from (embed, _twice(embed))


def _twice(embed: Rotary) -> Rotary:
    """GPT-OSS gives each angle once; other models give it twice, once for each half."""

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = embed(positions)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    return rotary


def _still(head_dim: int) -> Rotary:
    """No rotation, as one by angles of zero."""

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.ones(len(positions), head_dim, device=positions.device)
        return cos, torch.zeros_like(cos)

    return rotary
