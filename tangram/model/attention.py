"""The one attention function that every model calls, and its work in one step.

Transformers passes the step through as the keyword argument `tangram`, so there is no global state.
Queries, keys and values arrive as [1, heads, T, D] for the flattened batch: DECODE rows first, one
token each, then SEAL and TAIL rows. Layers with latents pass these instead (`latent.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tangram.compress.scorers import ChunkView
from tangram.kernels.interface import AttentionRule, Launch
from tangram.kernels.offload.host_forms import HostForm
from tangram.kernels.stopwatch import Stopwatch
from tangram.model.latent import OURS, join_entries, latent_heads, output_like
from tangram.model.recurrent import PassStates
from tangram.model.sealing import ChunkSealer, GroupSealer
from tangram.plan.records import Records
from tangram.types import Geometry

IMPLEMENTATION = OURS


class AttentionContext(Protocol):
    """Computes attention for one forward pass."""

    @property
    def decodes_only(self) -> bool:
        """Whether every token of the pass is the newest of its row, or a draft."""
        ...

    @property
    def states(self) -> PassStates | None:
        """The states of recurrent layers; None of a model without such layers."""
        ...

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q [T, Q, D], k and v [T, H, D] of one layer → [T, Q, D].

        A layer that reads another's keys and values passes those, after the other layer.
        In a layer with latents k [T, 1, rank] are these and v [T, 1, rotary] their rotary keys, and
        the output is [T, Q, V].
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tangram: AttentionContext | LayerInput,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers calls this in every layer: query, key, value [1, heads, T, D] → [1, T, Q, D].

    Raises `ValueError` for a mask: the engine decides what a token sees.
    """
    if attention_mask is not None:
        raise ValueError("the model built an attention mask of its own")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(tangram, LayerInput):
        tangram, options["hidden"] = tangram
    return tangram.attend(module, q, k, v, **options)[None], None


AttentionInterface.register(IMPLEMENTATION, attention)


def show_hidden(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook for attention modules: gates score the block's input, which it adds."""
    context = kwargs.get("tangram")
    if not isinstance(context, StepAttention):
        return args, kwargs
    return args, {**kwargs, "tangram": LayerInput(context, kwargs["hidden_states"][0])}


class LayerInput(NamedTuple):
    """The attention of a pass, and the input [T, hidden] of the layer that asks for it."""

    context: AttentionContext
    hidden: Tensor


# Not frozen: PyTorch 2.11 compiles layers for the values in a frozen argument.
@dataclass(eq=False)
class StepAttention:
    """The attention of one pass over a model of `geometry`: `launch`, and what seals its chunks.

    `width` tokens are those of decode rows, `spans` [N] those of the prefill rows. `sealers`
    seal the rows that have scores, and `sealing` times them. With a `form` the chunks `sealed`,
    spans of tokens, are rounded to what host memory can hold of them.
    """

    launch: Launch
    geometry: Geometry
    width: int
    spans: Records
    sealers: Sequence[ChunkSealer | GroupSealer]
    sealing: Stopwatch
    form: HostForm | None = None
    sealed: Sequence[slice] = ()
    states: PassStates | None = None

    @property
    def decodes_only(self) -> bool:
        """See `AttentionContext`."""
        return self.width > 0 and not len(self.spans)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        hidden: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Serve one layer of the pass; see `AttentionContext`."""
        heads, out = latent_heads(module), output_like(module, q)
        layer, rule = _rule(self.geometry, module, options)
        if heads is None:
            k, v = self._round(k), self._round(v)
            self.launch.decode(layer, q, k, v, out, rule)
        else:
            k, v = join_entries(k, v)
            k = self._round(k)
            v = k[..., : v.shape[-1]]
            if self.width:
                asked = q[: self.width]
                means = asked.new_empty((*asked.shape[:2], heads.rank))
                self.launch.decode(layer, heads.absorb(asked), k, v, means, rule)
                out[: self.width] = heads.read_values(means)
        # No score depends on the output of attention: with all chunks sealed, rows of one sequence
        # attend in parallel.
        if self.sealers and not rule.shared:
            with self.sealing.timing():
                for sealer in self.sealers:
                    spans = self.spans[sealer.rows]
                    rows = slice(int(spans["query_begin"][0]), int(spans["query_end"][-1]))
                    asked = q[rows] if heads is None else heads.absorb(q[rows])
                    queries, keys, values = (x.transpose(0, 1) for x in (asked, k[rows], v[rows]))
                    known = None if hidden is None else hidden[rows]
                    view = ChunkView(queries, keys, values, 0, layer, rule.scaling, hidden=known)
                    sealer.take(self.launch, view)
        return self.launch.prefill(layer, q, k, v, out, rule, heads)

    def _round(self, entries: Tensor) -> Tensor:
        """Keys or values [T, H, D] of the pass, those of sealed chunks rounded."""
        if self.form is None or not self.sealed:
            return entries
        rounded = entries.clone()
        for tokens in self.sealed:
            rounded[tokens] = self.form.round(entries[tokens])
        return rounded


@dataclass(eq=False)
class RepeatAttention:
    """KVzip's second pass over one chunk.

    The repetition attends to the past, to the chunk and to itself. Nothing of it is stored. The
    sealer gets it layer by layer.
    """

    launch: Launch
    geometry: Geometry
    sealer: ChunkSealer
    sealing: Stopwatch
    states: PassStates | None = None
    decodes_only = False

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Serve one layer of the repetition; see `AttentionContext`."""
        heads = latent_heads(module)
        layer, rule = _rule(self.geometry, module, options)
        if heads is not None:
            k, v = join_entries(k, v)
        keys, values = (
            torch.cat(pair) for pair in zip(self.sealer.chunk_kv[layer], (k, v), strict=True)
        )
        out = self.launch.prefill(layer, q, keys, values, output_like(module, q), rule, heads)
        if layer in self.sealer.pending:
            asked = q if heads is None else heads.absorb(q)
            with self.sealing.timing():
                self.sealer.reconstruct(self.launch, layer, asked, k)
        return out


def _rule(
    geometry: Geometry, module: nn.Module, options: Mapping[str, Any]
) -> tuple[int, AttentionRule]:
    """The layer that a module of attention reads, and how, by Transformers' options."""
    layer, shared = geometry.find_layer(int(module.layer_idx))  # type: ignore[arg-type]
    # Rows of a pass begin where their window does, unless it slides.
    window = None if geometry.chunked else geometry.windows[layer]
    known = window, options.get("softcap"), options.get("s_aux")
    return layer, AttentionRule(options["scaling"], *known, shared)
