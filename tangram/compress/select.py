"""WHICH tokens stay: scores and counts in, kept positions out.

Runs on the scores' device without waiting for it. The order is the same everywhere: higher scores
first, equal scores by lower index, NaN last. So the same scores give the same positions on any
machine. Shape letters: `L` layers · `H` KV heads · `C` tokens of the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tangram.config import Scope
from tangram.errors import IntegrityError
from tangram.types import Int32


def protect(scores: Tensor, start: int, sinks: int, window: int) -> Tensor:
    """A copy of `scores` [..., C] with +inf where a token is always kept.

    These are the first `sinks` tokens of the sequence, so only where `start` is 0, and the last
    `window` tokens of the chunk.
    """
    forced = scores.clone()
    forced[..., : sinks if start == 0 else 0] = math.inf
    forced[..., max(scores.shape[-1] - window, 0) :] = math.inf
    return forced


def keep(scores: Tensor, counts: Sequence[int] | Int32) -> list[Tensor]:
    """The `counts[h]` best positions of each head: int64 [counts[h]], ascending.

    `scores` is [H, C], already protected. Selection is one batch over the heads; the results are
    views of one tensor. Raises `IntegrityError` unless there is one count of 0 to C for each head.
    """
    return order(scores, counts, counts)


def order(
    scores: Tensor, first: Sequence[int] | Int32, kept: Sequence[int] | Int32
) -> list[Tensor]:
    """The `first[h]` best positions, then the others if `kept[h]` is C: int64 [kept[h]].

    Both parts ascend. Raises `IntegrityError` if `kept[h]` is neither `first[h]` nor C.
    """
    heads, tokens = scores.shape
    limits, stored = [int(count) for count in first], [int(count) for count in kept]
    if len(limits) != heads or any(not 0 <= count <= tokens for count in limits):
        raise IntegrityError(
            f"counts are {limits}, there must be {heads} of them, each 0 to {tokens}"
        )
    if any(count not in (limit, tokens) for limit, count in zip(limits, stored, strict=True)):
        raise IntegrityError(f"heads keep {stored} of {tokens} entries, {limits} of them first")
    # A blocking copy would make the host wait for all work queued on the device.
    dropped = ~choose_entries(scores, torch.tensor(limits).to(scores.device, non_blocking=True))
    # A stable sort of the flags puts the kept positions first and leaves both parts ascending.
    ordered = torch.argsort(dropped.to(torch.uint8), dim=-1, stable=True)
    return [positions[:count] for positions, count in zip(ordered.unbind(), stored, strict=True)]


def choose_entries(scores: Tensor, counts: Tensor) -> Tensor:
    """[H, C] bool: the `counts` [H] best of each head's `scores` [H, C], already protected."""
    return _ranks(scores) < counts.unsqueeze(1)


def dynamic_fractions(
    scores: Tensor, retention: float, scope: Scope, sinks: int, window: int, start: int
) -> Tensor:
    """[L, H] float64: the fraction of its tokens that each head gets by `dynamic_choice`."""
    return (
        dynamic_choice(scores, retention, scope, sinks, window, start)
        .to(torch.float64)
        .mean(dim=-1)
    )


def dynamic_choice(
    scores: Tensor, retention: float, scope: Scope, sinks: int, window: int, start: int
) -> Tensor:
    """[L, H, C] bool: the entries that stay when the best `retention` of all entries are kept.

    `scores` is [L, H, C] float32. In scope "layer" the heads of a layer compete (Ada-KV, arXiv
    2407.11550, without its floor). In scope "model" those of all layers compete by their raw scores
    (KVzip). Protected tokens are kept first and count towards the total; if they alone exceed it,
    they alone are kept. Equal scores go to the lower position, then to the lower head, so that no
    head is preferred by its number.
    """
    tokens = scores.shape[-1]
    forced = protect(scores, start, sinks, window)
    pools = forced if scope == "layer" else forced.flatten(0, 1).unsqueeze(0)
    heads = pools.shape[1]
    protected_tokens = min(tokens, (sinks if start == 0 else 0) + window)
    total = max(round(retention * (heads * tokens)), heads * protected_tokens)
    # Position before head, so that ties are shared out among the heads.
    kept = _ranks(pools.transpose(1, 2).flatten(1)) < total
    return kept.reshape(-1, tokens, heads).transpose(1, 2).reshape(scores.shape)


def _ranks(scores: Tensor) -> Tensor:
    """The place of each entry along the last dimension, int64, 0 = best."""
    # Ascending order of the negated scores: torch sorts NaN last.
    order = torch.argsort(scores.neg(), dim=-1, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
