"""Attention of a chunk's last queries over the chunk: what TOVA and SnapKV read."""

from __future__ import annotations

import torch
from torch import Tensor

from tangram.compress.scorers.base import ChunkView


def group_queries(queries: Tensor, kv_heads: int) -> Tensor:
    """[Q, n, D] → [H, G, n, D]: each KV head's query heads side by side."""
    return queries.reshape(kv_heads, -1, *queries.shape[1:])


def trailing_attention(chunk: ChunkView, window_tokens: int) -> Tensor:
    """[H, G, w, C - w] float32: what the last w queries give to the tokens before them.

    The softmax runs over the whole chunk and is causal inside the window.
    """
    window = window_tokens
    queries = group_queries(chunk.queries[:, -window:].float(), chunk.kv_heads)
    logits = queries @ chunk.keys.float().transpose(-1, -2).unsqueeze(1) * chunk.scaling
    future = torch.ones(window, window, dtype=torch.bool, device=logits.device).triu(1)
    logits[..., -window:].masked_fill_(future, float("-inf"))
    return logits.softmax(dim=-1)[..., :-window]


def append_forced(scores: Tensor, tokens: int) -> Tensor:
    """[H, n] → [H, n + tokens]: appended tokens score one above the best, so they outrank all others."""
    forced = (scores.max() + 1).expand(scores.shape[0], tokens)
    return torch.cat([scores, forced], dim=1)
