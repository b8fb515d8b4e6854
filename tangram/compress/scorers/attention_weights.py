"""Attention logits by KV head, and the attention of a chunk's last queries (for TOVA, SnapKV)."""

from __future__ import annotations

import torch
from torch import Tensor

from tangram.compress.scorers.base import ChunkView


def group_queries(queries: Tensor, kv_heads: int) -> Tensor:
    """[Q, n, D] → [H, G, n, D]: each KV head's query heads side by side."""
    return queries.reshape(kv_heads, -1, *queries.shape[1:])


def compute_grouped_logits(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """[Q, n, D] and [H, m, D] → [H, G, n, m] float32: the scaled products.

    Keys are not copied per query head.
    """
    kv_heads, tokens, _ = keys.shape
    stacked = group_queries(queries.float(), kv_heads).flatten(1, 2)
    logits = stacked @ keys.float().transpose(-1, -2) * scaling
    return logits.reshape(kv_heads, -1, queries.shape[1], tokens)


def causal_softmax(logits: Tensor) -> Tensor:
    """Softmax of [..., n, m] along m; query i of n sees all keys but the last n - 1 - i.

    Overwrites `logits`.
    """
    tokens = logits.shape[-2]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=logits.device).triu(1)
    logits[..., -tokens:].masked_fill_(future, float("-inf"))
    return logits.softmax(dim=-1)


def trailing_attention(chunk: ChunkView, window_tokens: int) -> Tensor:
    """[H, G, w, C - w] float32: the last w queries' attention to the tokens before them.

    The softmax runs over the whole chunk and is causal inside the window.
    """
    logits = compute_grouped_logits(chunk.queries[:, -window_tokens:], chunk.keys, chunk.scaling)
    return causal_softmax(logits)[..., :-window_tokens]


def append_forced(scores: Tensor, tokens: int) -> Tensor:
    """[H, n] → [H, n + tokens]: appended tokens score one above the best.

    So they outrank all others.
    """
    forced = (scores.max() + 1).expand(scores.shape[0], tokens)
    return torch.cat([scores, forced], dim=1)
