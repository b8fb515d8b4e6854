"""Host memory behind a pool: whole pages are copied out and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tangram.types import PageMove

STAGING_BYTES = 256 << 20  # the most that is being copied out of a GPU, in device memory


class HostMemory(Protocol):
    """Host pages as large as those of one pool [N, Hp, S, P, D]; `PageMove.slots` numbers them."""

    def move(self, moves: Sequence[PageMove], *, awaited: bool) -> None:
        """Copy in order, before any later work on the pool's device.

        No page is copied in and out again by the same call. Unless they are `awaited`, pages that
        are copied in may be missing until the next call.
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
        """See `HostMemory`; every copy is complete at once."""
        for move in moves:
            pages, slots = torch.from_numpy(move.pages), torch.from_numpy(move.slots)
            if move.inward:
                self._pool[pages] = self._host[slots]
            else:
                self._host[slots] = self._pool[pages]


def words(pool: Tensor) -> Tensor:
    """`pool` [N, Hp, S, P, D] as int32 [N, words of a page]: copies do not depend on the dtype."""
    return pool.view(len(pool), -1).view(torch.int32)


def page_words(pool: Tensor) -> int:
    """The 32-bit words of a page of `pool`."""
    return pool[0].nbytes // 4
