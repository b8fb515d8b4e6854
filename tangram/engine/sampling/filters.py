"""The tokens that a random row draws from: integer weights after the filters, in vLLM's order.

These are temperature, min-p, top-k and top-p. A weight is `floor(exp((x - max) / temperature) ·
2**40)`. Integer sums do not depend on their order, so a row's weights are the same alone or in any
batch. A filtered token has weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tangram.kernels.transfer import upload
from tangram.types import SamplingValues

ONE = 2**40  # weight of the likeliest token: 2**22 of them still fit in an int64
# Top-p looks at this many of the likeliest tokens before it sorts the vocabulary.
_NUCLEUS_WIDTHS = (128, 2048)


def weights_of(logits: Tensor, rows: Sequence[SamplingValues]) -> Tensor:
    """[R, V] int64 weights after temperature, min-p, top-k and top-p, the values of each row.

    Tokens that tie with the last token kept stay.
    """
    temperature = upload([row.temperature for row in rows], logits.device).float()[:, None]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_().mul_(ONE).long()
    vocab_size = weights.shape[1]
    _keep(
        weights,
        [math.ceil(row.min_p * ONE) if row.min_p > 0 else None for row in rows],
        _min_p_floor,
    )
    top_k = [row.top_k for row in rows]
    _keep(weights, [k if 0 < k < vocab_size else None for k in top_k], _top_k_floor)
    _keep(weights, [row.top_p if row.top_p < 1.0 else None for row in rows], _top_p_floor)
    return weights


def pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """The chosen rows of `values` [R, …], without a copy when all are chosen."""
    return (
        values if len(rows) == len(values) else values.index_select(0, upload(rows, values.device))
    )


def _keep(
    weights: Tensor,
    values: Sequence[float | None],
    floor: Callable[[Tensor, Sequence[float]], Tensor],
) -> None:
    """Zero, in place, the weights below their row's floor; None leaves a row unchanged."""
    rows = [index for index, value in enumerate(values) if value is not None]
    if not rows:
        return
    floors = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    least = floor(pick(weights, rows), [value for value in values if value is not None])
    floors.index_copy_(0, upload(rows, weights.device), least)
    weights.masked_fill_(weights < floors[:, None], 0)


def _min_p_floor(weights: Tensor, min_weights: Sequence[float]) -> Tensor:
    return upload(min_weights, weights.device)


def _top_k_floor(weights: Tensor, top_k: Sequence[float]) -> Tensor:
    largest = weights.topk(int(max(top_k)), dim=-1).values
    return largest.gather(1, upload(top_k, weights.device)[:, None] - 1)[:, 0]


def _top_p_floor(weights: Tensor, top_p: Sequence[float]) -> Tensor:
    """[R]: the smallest weight in the nucleus, the fewest tokens that reach top-p.

    Holtzman et al. 2020, section 3.
    """
    needed = (weights.sum(dim=-1) * upload(top_p, weights.device)).ceil().long().clamp_(min=1)
    return (
        find_threshold_by_halving(weights, needed)
        if weights.is_cuda
        else find_threshold_by_sorting(weights, needed)
    )


def find_threshold_by_halving(weights: Tensor, needed: Tensor) -> Tensor:
    """[R]: the largest weight such that it and all larger ones reach `needed`.

    By halving, so that the host does not wait for a GPU. `weights` is int64 [R, V] and `needed`
    int64 [R].
    """
    low, high = torch.zeros_like(needed), torch.full_like(needed, ONE)
    for _ in range(ONE.bit_length()):
        middle = (low + high + 1) // 2
        enough = weights.where(weights >= middle[:, None], 0).sum(dim=-1) >= needed
        low, high = low.where(~enough, middle), high.where(enough, middle - 1)
    return low


def find_threshold_by_sorting(weights: Tensor, needed: Tensor) -> Tensor:
    """The same [R], from the likeliest tokens on, which are few where a nucleus is small.

    `weights` is int64 [R, V] and `needed` int64 [R].
    """
    floors = torch.zeros_like(needed)
    open_rows = torch.arange(len(needed), device=weights.device)
    for width in [*(w for w in _NUCLEUS_WIDTHS if w < weights.shape[1]), weights.shape[1]]:
        largest = weights[open_rows].topk(width, dim=-1).values
        reached = largest.cumsum(dim=-1)
        last = torch.searchsorted(reached, needed[open_rows, None]).clamp_(max=width - 1)
        floors[open_rows] = largest.gather(1, last)[:, 0]
        open_rows = open_rows[reached[:, -1] < needed[open_rows]]
        if not len(open_rows):
            break
    return floors
