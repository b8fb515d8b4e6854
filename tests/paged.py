"""Heads at scattered pages with dense attention beside them: what kernel tests compare with.

Whatever a kernel has no business reading holds NaN: free pages, the rest of the last page, entries
a window has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import (
    eager_attention_forward as gpt_oss_attention,
)

from tangram.plan.form import DecodeRows

WINDOW = 50
SCALING = 0.2


@dataclass
class Batch:
    """R rows over 2 layers (full, window 50); kv[r][l][h] [2, n, D] holds each head's entries,
    dense. The last `counts[r]` of them are those of the row's tokens.
    """

    rows: DecodeRows
    pool: Tensor
    tables: Tensor
    lengths: Tensor
    kv: list[list[list[Tensor]]]
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    counts: np.ndarray

    def copy(self) -> Batch:
        return replace(self, pool=self.pool.clone())

    def address(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            self.rows.table[:, layer],
            self.rows.column[:, layer],
            self.rows.length_index[:, layer],
        )


def make_batch(
    r: int,
    h: int,
    g: int,
    d: int,
    *,
    page: int = 16,
    per_page: int = 4,
    longest: int = 300,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    counts: Sequence[int] | None = None,
    value_dim: int | None = None,
) -> Batch:
    """Heads at scattered pages, random columns and unrelated table offsets, as rows of several
    layouts have. With `value_dim` entries are latents, and their values the first elements.
    """
    rng, _ = np.random.default_rng(seed), torch.manual_seed(seed)
    shape = (r, 2, h)
    lengths = rng.integers(1, longest + 1, shape)
    tokens = np.ones(r, np.int32) if counts is None else np.asarray(counts, np.int32)
    lengths = np.maximum(lengths, tokens[:, None, None])
    pages = -(-lengths // page) + rng.integers(0, 3, shape)
    table = np.cumsum(pages.ravel()) - pages.ravel() + 5
    count = int(pages.sum())
    tables = np.full(count + 5, count, np.int32)
    tables[5:] = rng.permutation(count)
    index = rng.permutation(lengths.size)
    flat_lengths = np.empty(lengths.size, np.int32)
    flat_lengths[index] = lengths.ravel()
    rows = DecodeRows.of(
        table.reshape(shape),
        rng.integers(0, per_page, shape),
        index.reshape(shape),
        lengths.astype(float),
        (None, WINDOW),
        page,
    )
    vectors = 2 if value_dim is None else 1
    pool = torch.full((count + 1, per_page, vectors, page, d), torch.nan, dtype=dtype)
    kv = [
        [[_entries(vectors, n, d, dtype) for n in heads] for heads in layers] for layers in lengths
    ]
    for cell in np.ndindex(shape):
        own = tokens[cell[0]]
        first = 0 if cell[1] == 0 else max(0, lengths[cell] - WINDOW - own + 1)
        for entry in range(first, lengths[cell] - own):  # the last ones are appended by the kernel
            page_id = tables[rows.table[cell] + entry // page]
            entries = kv[cell[0]][cell[1]][cell[2]]
            pool[page_id, rows.column[cell], :, entry % page] = entries[:vectors, entry]
    k, v = (_newest(kv, tokens, side) for side in (0, 1))
    ends = np.cumsum(tokens)
    for i, j in np.ndindex(r, h):
        own = slice(int(ends[i] - tokens[i]), int(ends[i]))
        kv[i][1][j][:, -int(tokens[i]) :] = torch.stack([k[own, j], v[own, j]])
    q, sinks = torch.randn(len(k), h * g, d).to(dtype), torch.randn(h * g)
    flat = torch.from_numpy(flat_lengths)
    v = v[..., :value_dim]
    return Batch(rows, pool, torch.from_numpy(tables), flat, kv, q, k, v, sinks, tokens)


def _entries(vectors: int, n: int, d: int, dtype: torch.dtype) -> Tensor:
    """Keys and values [2, n, D], the same where an entry is one vector."""
    return torch.randn(vectors, int(n), d).to(dtype).expand(2, -1, -1).clone()


def _newest(kv: Sequence[Sequence[Sequence[Tensor]]], tokens: np.ndarray, side: int) -> Tensor:
    """Keys (side 0) or values (1) of the tokens that rows decode: [T, H, D]."""
    return torch.cat(
        [
            torch.stack([head[side, -own:] for head in layers[0]], 1)
            for layers, own in zip(kv, tokens.tolist(), strict=True)
        ]
    )


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [n, G, D] over k, v [m, D] of one KV head, by Transformers: torch SDPA, Gemma 2's or
    GPT-OSS' own function.
    """
    query, key, value = (
        q.transpose(0, 1)[None].float(),
        k[None, None].float(),
        v[None, None].float(),
    )
    group = q.shape[1]
    if softcap is None and sinks is None:
        keys, values = key.expand(-1, group, -1, -1), value.expand(-1, group, -1, -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=SCALING
        )
        return out[0].transpose(0, 1)
    if softcap is None:
        module = SimpleNamespace(num_key_value_groups=group, sinks=sinks, training=False)
        return gpt_oss_attention(module, query, key, value, mask, SCALING)[0][0]
    module = SimpleNamespace(num_key_value_groups=group, training=False)
    return gemma2_attention(module, query, key, value, mask, scaling=SCALING, softcap=softcap)[0][0]


def dense_decode(
    batch: Batch, layer: int, *, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    heads = batch.k.shape[1]
    grouped, value_dim = batch.q.unflatten(1, (heads, -1)), batch.v.shape[2]
    out = grouped.new_empty((*grouped.shape[:3], value_dim))
    tokens = [(row, behind) for row, n in enumerate(batch.counts) for behind in range(n)[::-1]]
    for (token, (row, behind)), head in product(enumerate(tokens), range(heads)):
        k, v = batch.kv[row][layer][head][:, : len(batch.kv[row][layer][head][0]) - behind]
        seen = slice(-WINDOW if layer else 0, None)
        sink = None if sinks is None else sinks.view(heads, -1)[head]
        out[token, head] = dense_attention(
            grouped[token, head][None],
            k[seen],
            v[seen, :value_dim],
            None,
            softcap=softcap,
            sinks=sink,
        )[0]
    return out.flatten(1, 2)
