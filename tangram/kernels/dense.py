"""Chunks of one prompt from its first token on, of which nothing is dropped: torch's fused causal
attention.

Without compression and without a past, a run of chunks is an ordinary causal prompt, and cuDNN is
the fastest attention that torch has for one on Hopper. What comes later in a prompt stands on pages
(`gathered.py`): cuDNN plans anew for every pair of lengths, and of the first chunks there are only
as many lengths as chunks fit a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tangram.kernels.card import HOPPER, Card
from tangram.kernels.interface import PrefillRows

LEAST_TOKENS = 2048  # of a run; for shorter ones the other kernels are as fast (H200)
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DenseRun:
    """Prefill `rows` that follow on each other, whose `tokens` lie end to end in the flattened
    batch.
    """

    rows: slice
    tokens: slice


def runs(rows: PrefillRows) -> list[DenseRun]:
    """The runs of at least `LEAST_TOKENS` among whole rows of `rows`, each from its sequence's
    first token on.
    """
    whole = rows.whole.all(axis=0) & (rows.spans[:, :2] == rows.spans[:, 2:4]).all(axis=1)
    found = list[DenseRun]()
    for number in range(rows.asking.start, rows.asking.stop):
        begin, end, _, _, position = rows.spans[number].tolist()
        last = found[-1] if found else None
        if not whole[number]:
            continue
        if position == 0:
            found.append(DenseRun(slice(number, number + 1), slice(begin, end)))
        elif last is not None and _follows(rows, last, number):
            found[-1] = DenseRun(slice(last.rows.start, number + 1), slice(last.tokens.start, end))
    return [run for run in found if run.tokens.stop - run.tokens.start >= LEAST_TOKENS]


def _follows(rows: PrefillRows, run: DenseRun, number: int) -> bool:
    begin, end, _, _, position = rows.spans[number].tolist()
    first = rows.spans[run.rows.start]
    together = (
        run.rows.stop == number
        and run.tokens.stop == begin
        and position == begin - run.tokens.start
    )
    one_sequence = np.ptp(rows.address[0, [run.rows.start, number], 0, 0]) == 0
    # No tails: of these there are many
    return bool(together and one_sequence and end - begin == first[1] - first[0])


def serves(pool: Tensor, card: Card) -> bool:
    """Whether there is such attention for entries of this pool, and it is known to be
    the fastest.
    """
    return (
        pool.is_cuda
        and card.capability >= HOPPER
        and pool.dtype in DTYPES
        and pool.shape[-1] in (64, 128)
    )


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, run: DenseRun, *, scaling: float) -> None:
    """The run's tokens of q [T, Q, D] against those of k, v [T, H, D], causally → its tokens of out
    [T, Q, D].
    """
    query, key, value = (x[run.tokens].transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True
    ):
        result = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    out[run.tokens] = result[0].transpose(0, 1)
