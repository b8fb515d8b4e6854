"""Pages on their way to host memory and back: the kernel against torch, and an order of moves
against plain copies.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.kernels.dispatch import host_memory
from tangram.kernels.offload.host_forms import HOST_FORMS, HostForm
from tangram.kernels.offload.host_memory import PlainHostMemory, words
from tangram.types import PageMove

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def pool_of(
    pages: int, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = (3, 2, 4, 10)
) -> Tensor:
    """A pool [pages, Hp, 2, P, D] of noise."""
    generator = torch.Generator().manual_seed(pages)
    return torch.randn(pages, *shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programs", [1, 3, 500])
@pytest.mark.parametrize("count", [1, 7])
def test_pages_go_where_they_are_told_and_nowhere_else(
    dtype: torch.dtype, programs: int, count: int, device: torch.device
) -> None:
    from tangram.kernels.triton.page_copies import copy

    source, target = (words(pool_of(pages, dtype, device)) for pages in (9, 12))
    read = torch.tensor([8, 0, 3, 3, 5, 1, 2], dtype=torch.int32, device=device)[:count]
    write = torch.tensor([11, 0, 4, 7, 2, 9, 1], dtype=torch.int32, device=device)[:count]
    expected = target.clone()
    expected[write] = source[read]
    copy(source, read, target, write, programs=programs)
    assert torch.equal(target, expected)


def test_pages_larger_than_a_block_are_copied_whole(device: torch.device) -> None:
    from tangram.kernels.triton.page_copies import copy

    source, target = (words(pool_of(3, torch.float32, device, (2, 2, 16, 70))) for _ in range(2))
    target.zero_()
    pages = torch.tensor([2, 0], dtype=torch.int32, device=device)
    copy(source, pages, target, pages.flip(0), programs=1)
    assert (
        torch.equal(target[0], source[2])
        and torch.equal(target[2], source[0])
        and not target[1].any()
    )


def random_moves(rng: np.random.Generator, pages: int, slots: int, count: int) -> list[PageMove]:
    """Moves in any order; what comes in was once sent out, and does not go out again."""
    moves, written = (
        [PageMove(*(np.arange(min(pages, slots), dtype=np.int32),) * 2, inward=False)],
        min(pages, slots),
    )
    came = np.zeros(pages, np.bool_)
    for _ in range(count):
        size, inward = int(rng.integers(1, written)), bool(rng.integers(2))
        chosen = rng.permutation(pages if inward else np.flatnonzero(~came))[:size]
        moves.append(
            PageMove(
                chosen.astype(np.int32),
                rng.permutation(written)[: len(chosen)].astype(np.int32),
                inward,
            )
        )
        came[chosen] |= inward
    return moves


FORMS = [
    *((dtype, None) for dtype in DTYPES),
    *((dtype, form) for dtype in DTYPES[:2] for form in HOST_FORMS.values()),
]


@pytest.mark.parametrize(("dtype", "form"), FORMS)
@pytest.mark.parametrize("awaited", [True, False])
def test_moves_leave_what_plain_copies_in_their_order_leave(
    dtype: torch.dtype, form: HostForm | None, awaited: bool, device: torch.device
) -> None:
    """Also of pages that are packed on the way, if they were rounded before."""
    rng = np.random.default_rng(int(awaited))
    pool = pool_of(40, dtype, device)
    if form is not None:
        pool = form.round(pool)
    plain = pool.cpu().clone()
    ours, theirs = host_memory(pool, 30, form), PlainHostMemory(plain, 30)
    assert torch.equal(words(pool).cpu(), words(plain)), "starting has changed the pool"
    for step in range(6):
        moves = random_moves(rng, 40, 30, 5)
        ours.move(moves, awaited=awaited)
        theirs.move(moves, awaited=awaited)
        if not awaited:  # they are there at the next call
            ours.move((), awaited=False)
        pool[step] = pool[step + 1].clone()  # as a step writes
        plain[step] = plain[step + 1].clone()
        assert torch.equal(words(pool).cpu(), words(plain))
