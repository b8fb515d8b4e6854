"""Prefill over a pool of latents: they are expanded, and torch's own attention does the rest.

A latent has the width of several heads, so to attend to it costs more than to expand it once for
the hundreds of queries of a chunk. With torch's kernels keys, values and queries have one width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from tangram.kernels.interface import MOST_BYTES, AttentionRule, Expansion, PrefillRows
from tangram.kernels.reference import Part, gather, merge_parts

# Latents [n, D] → the keys [Q, n, D'] and values [Q, n, V] of the query heads.
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
EXPANDED_BYTES = MOST_BYTES // 4  # of keys and values at a time: the model and torch copy them


def prefill(
    q: Tensor,
    latents: Tensor,
    pool: Tensor,
    tables: Tensor,
    address: Sequence[int],
    expand: Expand,
    scaling: float,
) -> Tensor:
    """Attention of n new tokens: q [n, Q, D'] → [n, Q, V] in q's dtype.

    `latents` [m, D] of m ≥ n new tokens are not yet in the pool, and the queries belong to the last
    n of them. `address` is table offset, column and length of the past, all of which is seen. It is
    expanded in parts of at most `EXPANDED_BYTES`. The result depends on this request alone.
    """
    table, column, length = address
    queries, lead = q.transpose(0, 1), len(latents) - len(q)
    keys, values = expand(latents)
    entry_bytes = (keys[:, 0].numel() + values[:, 0].numel()) * q.element_size()
    step = max(1, EXPANDED_BYTES // entry_bytes)
    parts = [_attend(queries, keys[:, lead:], values[:, lead:], scaling, causal=True)]
    if lead:
        parts.append(_attend(queries, keys[:, :lead], values[:, :lead], scaling))
    for begin, end in pairwise([*range(0, length, step), length]):
        past, _ = gather(pool, tables, table, column, begin, end)
        parts.append(_attend(queries, *expand(past.to(q.dtype)), scaling))
    return merge_parts(parts)[0].to(q.dtype).transpose(0, 1)


def prefill_rows(
    q: Tensor,
    latents: Tensor,
    out: Tensor,
    pool: Tensor,
    tables: Tensor,
    rows: PrefillRows,
    layer: int,
    expansion: Expansion,
    rule: AttentionRule,
) -> None:
    """`prefill` of all asking `rows` in one layer, which lie in q [T, Q, D'], latents [T', D]."""
    for row in range(rows.asking.start, rows.asking.stop):
        begin, end, first, last, _ = rows.spans[row].tolist()
        (place,) = rows.address[layer, row].tolist()
        where, how = (pool, tables, place), (expansion.expand, rule.scaling)
        out[begin:end] = prefill(q[begin:end], latents[first:last], *where, *how)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, *, causal: bool = False) -> Part:
    """Attention of q [Q, n, D] over k [Q, m, D] and v [Q, m, V] by torch, as a mergeable part."""
    width = max(q.shape[-1], v.shape[-1])
    padded = [
        (x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1])))[None]
        for x in (q, k, v)
    ]
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *padded, 0.0, causal, scale=scaling
        )
    elif q.element_size() == 2:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*padded, 0.0, causal, scale=scaling)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *padded, None, True, 0.0, causal, scale=scaling
        )
    return out[0, ..., : v.shape[-1]].float(), lse[0, :, : q.shape[1]].float()
