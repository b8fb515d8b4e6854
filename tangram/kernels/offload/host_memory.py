"""Host memory behind a pool: whole pages are copied out and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tangram.kernels.offload.host_forms import HostForm
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
    """`HostMemory` of `pages` pages for a pool in host memory; also the specification.

    `form` None keeps pages as they are.
    """

    def __init__(self, pool: Tensor, pages: int, form: HostForm | None = None) -> None:
        self._pool, self._form = words(pool) if form is None else pool, form
        self._host = torch.empty(pages, page_words(pool, form), dtype=torch.int32)

    def move(self, moves: Sequence[PageMove], *, awaited: bool) -> None:
        """See `HostMemory`; every copy is complete at once."""
        for move in moves:
            pages = torch.from_numpy(move.pages)
            if move.slots is None:
                self._pool[pages] = 0
                continue
            slots = torch.from_numpy(move.slots)
            if move.inward:
                packed = self._host[slots]
                self._pool[pages] = (
                    packed if self._form is None else self._form.unpack(packed, self._pool)
                )
            else:
                found = self._pool[pages]
                self._host[slots] = found if self._form is None else self._form.pack(found)


def words(pool: Tensor) -> Tensor:
    """`pool` [N, Hp, S, P, D] as int32 [N, words of a page]: copies do not depend on the dtype."""
    return pool.view(len(pool), -1).view(torch.int32)


def page_words(pool: Tensor, form: HostForm | None = None) -> int:
    """The 32-bit words of a page of `pool`, as it is or in `form`."""
    if form is None:
        return pool[0].nbytes // 4
    dim = pool.shape[-1]
    return form.page_bytes(pool[0].numel() // dim, dim) // 4
