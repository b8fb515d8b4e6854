"""Torch's fused causal attention for the first chunks of a prompt, if nothing is dropped.

Without compression and without a past, a run of chunks is an ordinary causal prompt. cuDNN is the
fastest attention that torch has for it on Hopper. Later chunks attend to pages (`gathered.py`),
because cuDNN makes a new plan for every pair of lengths. First chunks have only as many lengths as
chunks fit into a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tangram.kernels.interface import PrefillRows
from tangram.kernels.triton.card import HOPPER, Card

LEAST_TOKENS = 2048  # of a run; for shorter ones the other kernels are as fast (H200)
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CausalRun:
    """Consecutive prefill `rows` whose `tokens` lie end to end in the flattened batch."""

    rows: slice
    tokens: slice


def find_runs(rows: PrefillRows) -> list[CausalRun]:
    """The runs of at least `LEAST_TOKENS` among whole rows of `rows`.

    Each begins with its sequence's first token.
    """
    spans = rows.spans
    alike = (spans["query_begin"] == spans["key_begin"]) & (rows.queries == rows.keys)
    whole = rows.whole.all(axis=0) & alike
    found = list[CausalRun]()
    for number in range(rows.asking.start, rows.asking.stop):
        begin, end, _, _, position = spans[number].tolist()
        last = found[-1] if found else None
        if not whole[number]:
            continue
        if position == 0:
            found.append(CausalRun(slice(number, number + 1), slice(begin, end)))
        elif last is not None and _follows(rows, last, number):
            found[-1] = CausalRun(slice(last.rows.start, number + 1), slice(last.tokens.start, end))
    return [run for run in found if run.tokens.stop - run.tokens.start >= LEAST_TOKENS]


def _follows(rows: PrefillRows, run: CausalRun, number: int) -> bool:
    begin, end, _, _, position = rows.spans[number].tolist()
    together = (
        run.rows.stop == number
        and run.tokens.stop == begin
        and position == begin - run.tokens.start
    )
    # A window that does not slide begins elsewhere in the table of its layers.
    one_sequence = not np.ptp(rows.address["table"][:, [run.rows.start, number], 0], axis=1).any()
    # No tails: they have too many lengths.
    return bool(together and one_sequence and end - begin == rows.queries[run.rows.start])


def serves(pool: Tensor, card: Card) -> bool:
    """Whether torch has such attention for this pool, and it is known to be the fastest."""
    return (
        pool.is_cuda
        and card.capability >= HOPPER
        and pool.dtype in DTYPES
        and pool.shape[-1] in (64, 128)
    )


def attend(q: Tensor, k: Tensor, v: Tensor, run: CausalRun, *, scaling: float) -> Tensor:
    """Causal attention of the n tokens of a run: q [T, Q, D], k, v [T, H, D] → [n, Q, D]."""
    query, key, value = (x[run.tokens].transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True
    ):
        result = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    return result[0].transpose(0, 1)
