"""Prefill over expanded latents: rows beside each other against each alone, in full precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.plan.records import PAST, SPAN
from tests.gpu.cards import CARDS
from tests.interpreter import interpreter_few

RANK = 32
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass
class Heads:
    """Heads with a random map, expanded as Transformers does."""

    up: Tensor
    value_dim: int

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.einsum("nr,qdr->qnd", latents[:, :RANK], self.up)
        plain, value = both.split([both.shape[2] - self.value_dim, self.value_dim], -1)
        rotary = latents[None, :, RANK:].expand(len(plain), -1, -1)
        return torch.cat([plain, rotary], -1), value


@pytest.mark.parametrize(
    ("plain", "value", "rotary", "whole", "dtype"),
    interpreter_few(
        [
            (*sizes, whole, dtype)
            for sizes in ((16, 16, 8), (24, 32, 16), (128, 128, 64), (192, 256, 64))
            for whole in (True, False)
            for dtype in (torch.float16, torch.bfloat16)
        ],
        (24, 32, 16, True, torch.float16),
        (16, 16, 8, False, torch.bfloat16),
    ),
)
def test_rows_of_several_sequences_answer_as_alone(
    plain: int, value: int, rotary: int, whole: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Three rows of one sequence, whose past grows, one without a past, and one of another.

    Where the past is not expanded as a `whole`, only 64 entries are at a time.
    """
    from tangram.kernels import latents
    from tangram.kernels.triton import expanded
    from tangram.kernels.triton.stored import StoredPool

    torch.manual_seed(5)
    heads = Heads((torch.randn(3, plain + value, RANK) / RANK**0.5).to(device, dtype), value)
    pool = torch.randn(19, 2, 1, 16, RANK + rotary).to(device, dtype)
    tables, tokens = torch.randperm(19).int().to(device), np.array([70, 64, 13, 5, 20])
    ends = np.cumsum(tokens)
    spans = np.stack([ends - tokens, ends, ends - tokens, ends, 0 * ends], 1).astype(np.int32)
    past = np.array([(0, 1, 30), (0, 1, 90), (0, 1, 150), (10, 0, 0), (10, 0, 33)], np.int32)
    q = torch.randn(ends[-1], 3, plain + rotary).to(device, dtype)
    new = torch.randn(ends[-1], RANK + rotary).to(device, dtype)
    out = torch.full((ends[-1], 3, value), torch.nan, dtype=dtype, device=device)
    expanded.attend(
        q,
        new,
        StoredPool.of(pool),
        expanded.LatentRows(spans.view(SPAN)[:, 0], past.view(PAST)[:, 0], tables),
        heads,
        out,
        scaling=0.2,
        most_bytes=1 << 29 if whole else 64 * heads.up[:, :, 0].numel() * dtype.itemsize,
    )
    exact = Heads(heads.up.double(), value)
    for (begin, end, *_), address in zip(spans.tolist(), past.tolist(), strict=True):
        alone = latents.prefill(
            *(x[begin:end].float() for x in (q, new)),
            pool.float(),
            tables,
            address,
            expand=lambda entries: tuple(x.float() for x in exact.expand(entries.double())),  # type: ignore[arg-type,return-value]
            scaling=0.2,
        )
        error = (out[begin:end].float() - alone).norm() / alone.norm()
        assert error < TOLERANCE[dtype], error


def test_a_row_has_the_same_bits_beside_others_as_alone(device: torch.device) -> None:
    """Behind nothing, behind pasts that are cut once and twice, and beside a past that is not."""
    from tangram.kernels.triton import expanded
    from tangram.kernels.triton.stored import StoredPool

    torch.manual_seed(6)
    heads = Heads((torch.randn(2, 32, RANK) / RANK**0.5).to(device, torch.float16), 16)
    pool = torch.randn(24, 2, 1, 16, RANK + 8).to(device, torch.float16)
    tables, tokens = torch.randperm(24).int().to(device), np.array([9, 20, 64, 64, 7])
    ends = np.cumsum(tokens)
    spans = np.stack([ends - tokens, ends, ends - tokens, ends, 0 * ends], 1).astype(np.int32)
    past = np.array([(20, 1, 0), (0, 1, 60), (0, 1, 120), (0, 1, 184), (12, 1, 40)], np.int32)
    q = torch.randn(ends[-1], 2, 24).to(device, torch.float16)
    new = torch.randn(ends[-1], RANK + 8).to(device, torch.float16)

    def attend(rows: slice) -> Tensor:
        out = torch.full((ends[-1], 2, 16), torch.nan, dtype=torch.float16, device=device)
        expanded.attend(
            q,
            new,
            StoredPool.of(pool),
            expanded.LatentRows(spans.view(SPAN)[rows, 0], past.view(PAST)[rows, 0], tables),
            heads,
            out,
            scaling=0.2,
            most_bytes=64 * heads.up[:, :, 0].numel() * 2,
        )
        return out

    together = attend(slice(0, 5))
    assert together.isfinite().all()
    for row, (begin, end, *_) in enumerate(spans.tolist()):
        alone = attend(slice(row, row + 1))
        assert torch.equal(together[begin:end], alone[begin:end]), row


def test_no_more_than_allowed_is_expanded_behind_a_row_without_a_past() -> None:
    from tangram.kernels.triton import expanded

    lengths = [(0, 0, 0), (10, 0, 500), (20, 0, 30), (30, 0, 30), (40, 0, 70)]
    rows = expanded.LatentRows(np.zeros(5, SPAN), np.array(lengths, PAST), torch.zeros(0))
    lots = [range(5)[lot] for lot in expanded._lots(rows, 128)]
    assert [list(lot) for lot in lots] == [[0], [1], [2, 3], [4]]


@pytest.mark.parametrize("card", CARDS)
def test_latents_are_attended_so_where_a_tile_fits(card: int) -> None:
    """DeepSeek's keys and values on every card since Hopper, GLM-4.7-Flash's not in 99 KiB."""
    from tangram.kernels.triton import expanded
    from tangram.kernels.triton.stored import StoredPool

    pool = torch.empty(1, 1, 1, 16, 576, dtype=torch.bfloat16)
    deepseek, glm = (Heads(torch.empty(1, p + v, 512), v) for p, v in ((128, 128), (192, 256)))
    stored = StoredPool.of(pool, card=CARDS[card])
    served = [expanded.serves(stored, pool.dtype, heads) for heads in (deepseek, glm)]
    assert served == [card >= 90, card in (90, 100)]
