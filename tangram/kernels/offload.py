"""Host memory behind a pool: whole pages go out and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tangram.types import PageMove

STAGING_BYTES = 256 << 20  # what may be on its way out of a GPU, in device memory


class HostMemory(Protocol):
    """Host pages as large as those of one pool [N, Hp, 2, P, D], which `PageMove.slots` numbers."""

    def move(self, moves: Sequence[PageMove], *, awaited: bool) -> None:
        """Copy in order, before whatever is asked of the pool's device from now on.

        No page comes in and goes out again by the same call. Unless they are `awaited`, pages that
        come in may only be there from the next call on.
        """
        ...


class PlainHostMemory:
    """`HostMemory` of `pages` pages for a pool in host memory; also the specification."""

    def __init__(self, pool: Tensor, pages: int) -> None:
        self._pool, self._host = (
            words(pool),
            torch.empty(pages, page_words(pool), dtype=torch.int32),
        )

    def move(self, moves: Sequence[PageMove], *, awaited: bool) -> None:
        """See `HostMemory`; everything is there at once."""
        for move in moves:
            pages, slots = torch.from_numpy(move.pages), torch.from_numpy(move.slots)
            if move.inward:
                self._pool[pages] = self._host[slots]
            else:
                self._host[slots] = self._pool[pages]


def words(pool: Tensor) -> Tensor:
    """`pool` [N, Hp, 2, P, D] as int32 [N, words of a page]: what is copied does not depend on the
    dtype.
    """
    return pool.view(len(pool), -1).view(torch.int32)


def page_words(pool: Tensor) -> int:
    """The 32-bit words of a page of `pool`."""
    return pool[0].nbytes // 4
