"""The one attention function that every model calls, and its work in one step.

Transformers passes the step through as the keyword argument `tangram`, so there is no global state.
Queries, keys and values arrive as [1, heads, T, D] for the flattened batch: DECODE rows first, one
token each, then SEAL and TAIL rows. Layers with latents pass these instead (`latent.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tangram.kernels.host_forms import HostForm
from tangram.kernels.interface import PoolKernels, PrefillRows
from tangram.kernels.stopwatch import Stopwatch
from tangram.model.latent import LatentHeads, join_entries, latent_heads, output_like
from tangram.model.sealing import ChunkSealer, GroupSealer

IMPLEMENTATION = "tangram"


class AttentionContext(Protocol):
    """Computes attention for one forward pass."""

    @property
    def decodes_only(self) -> bool:
        """Whether every token of the pass is the newest of its row, or a draft."""
        ...

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q [T, Q, D], k and v [T, H, D] of one layer → [T, Q, D].

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
    tangram: AttentionContext,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers calls this in every layer: query, key, value [1, heads, T, D] → [1, T, Q, D].

    Raises `ValueError` for a mask: the engine decides what a token sees.
    """
    if attention_mask is not None:
        raise ValueError("the model built an attention mask of its own")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tangram.attend(module, q, k, v, **options)[None], None


AttentionInterface.register(IMPLEMENTATION, attention)


def keep_hidden(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook for attention modules: keep the block's input for gates that score it."""
    context = kwargs.get("tangram")
    if isinstance(context, StepAttention):
        context.hidden = kwargs["hidden_states"][0]


@dataclass
class StepAttention:
    """Attention of one pass, begun by `kernels` with `width` decode rows and the rows `prefill`.

    `sealers` seal the rows that have scores, and `sealing` times them. A pass with `padded_tokens`
    is padded to this number, and launches the same as any other pass of its `PaddedShape`. With a
    `form` the chunks `sealed`, spans of tokens, are rounded to what host memory can hold of them.
    """

    kernels: PoolKernels
    windows: Sequence[int | None]
    width: int
    prefill: PrefillRows
    sealers: Sequence[ChunkSealer | GroupSealer]
    sealing: Stopwatch
    padded_tokens: int | None = None
    hidden: Tensor | None = None
    form: HostForm | None = None
    sealed: Sequence[slice] = ()

    @property
    def decodes_only(self) -> bool:
        """See `AttentionContext`."""
        return self.width > 0 and not len(self.prefill.spans)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Serve one layer of the pass; see `AttentionContext`."""
        layer, heads = int(module.layer_idx), latent_heads(module)  # type: ignore[arg-type]
        out, known = output_like(module, q), _translate(options)
        if heads is None:
            k, v = self._round(k), self._round(v)
            self.kernels.decode(layer, q, k, v, out, **known)
        else:
            k, v = join_entries(k, v)
            k = self._round(k)
            v = k[..., : v.shape[-1]]
            self._decode_latents(heads, layer, q[: self.width], k, v, out[: self.width], known)
        # No score depends on the output of attention: with all chunks sealed, rows of one sequence
        # attend in parallel.
        if self.sealers:
            with self.sealing.timing():
                for sealer in self.sealers:
                    self._seal(sealer, layer, heads, q, k, v, options["scaling"])
        self.kernels.prefill(
            layer, q, k, v, out, window=self.windows[layer], expansion=heads, **known
        )
        return out

    def _decode_latents(
        self,
        heads: LatentHeads,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        known: Mapping[str, Any],
    ) -> None:
        if self.width:
            means = torch.empty((*q.shape[:2], heads.rank), dtype=q.dtype, device=q.device)
            self.kernels.decode(layer, heads.absorb(q), k, v, means, **known)
            out.copy_(heads.read_values(means))

    def _round(self, entries: Tensor) -> Tensor:
        """Keys or values [T, H, D] of the pass, those of sealed chunks rounded."""
        if self.form is None or not self.sealed:
            return entries
        rounded = entries.clone()
        for tokens in self.sealed:
            rounded[tokens] = self.form.round(entries[tokens])
        return rounded

    def _seal(
        self,
        sealer: ChunkSealer | GroupSealer,
        layer: int,
        heads: LatentHeads | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
    ) -> None:
        own = slice(
            int(self.prefill.spans[sealer.rows.start, 0]),
            int(self.prefill.spans[sealer.rows.stop - 1, 1]),
        )
        hidden = None if self.hidden is None else self.hidden[own]
        asked = q[own] if heads is None else heads.absorb(q[own])
        sealer.take(layer, asked, k[own], v[own], scaling=scaling, hidden=hidden)


@dataclass
class RepeatAttention:
    """KVzip's second pass over one chunk.

    The repetition attends to the past, to the chunk and to itself. Nothing of it is stored. The
    sealer gets it layer by layer.
    """

    kernels: PoolKernels
    windows: Sequence[int | None]
    sealer: ChunkSealer
    sealing: Stopwatch
    decodes_only = False

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Serve one layer of the repetition; see `AttentionContext`."""
        layer, heads = int(module.layer_idx), latent_heads(module)  # type: ignore[arg-type]
        if heads is not None:
            k, v = join_entries(k, v)
        keys, values = (
            torch.cat(pair) for pair in zip(self.sealer.chunk_kv.pop(layer), (k, v), strict=True)
        )
        out = output_like(module, q)
        self.kernels.prefill(
            layer,
            q,
            keys,
            values,
            out,
            window=self.windows[layer],
            expansion=heads,
            **_translate(options),
        )
        if layer in self.sealer.pending:
            with self.sealing.timing():
                self.sealer.reconstruct(layer, q if heads is None else heads.absorb(q), k)
        return out


def _translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers' options of a layer's attention, by the kernels' names."""
    return {
        "scaling": options["scaling"],
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
    }
