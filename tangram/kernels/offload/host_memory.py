"""Host memory behind a pool: whole pages are copied out and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tangram.kernels.offload.host_forms import HostForm
from tangram.types import HostFill, Int32, LinkName, LinkTouch, Move, PageSave

STAGING_BYTES = 256 << 20  # the most that is being copied out of a GPU, in device memory


class LinkWriter(Protocol):
    """What writes links to disk."""

    def accepts(self, size_bytes: int) -> bool:
        """Whether there is room for a link of so many bytes, which is counted if it is dropped."""
        ...

    def save(self, name: LinkName, size_bytes: int, read: Callable[[], Int32]) -> None:
        """Write link `name`: another thread calls `read`, which may wait for a device.

        That gives the pages, int32 [n, words of a page].
        """
        ...

    def touch(self, names: Sequence[LinkName]) -> None:
        """The links of `names`, parents before their children, are in use."""
        ...


class HostMemory(Protocol):
    """Host pages as large as those of one pool [N, Hp, S, P, D]; `PageMove.slots` numbers them."""

    def move(self, moves: Sequence[Move], *, awaited: bool) -> None:
        """Copy in order, before any later work on the pool's device. What is saved is packed, too.

        No page is copied in and out again by the same call. Unless they are `awaited`, pages that
        are copied in may be missing until the next call.
        """
        ...


class PlainHostMemory:
    """`HostMemory` of `pages` pages for a pool in host memory; also the specification.

    `form` None keeps pages as they are. `writer` takes the links that go to disk.
    """

    def __init__(
        self,
        pool: Tensor,
        pages: int,
        form: HostForm | None = None,
        writer: LinkWriter | None = None,
    ) -> None:
        self._writer, self._page_bytes = writer, 4 * page_words(pool, form)
        self._pool, self._form = words(pool) if form is None else pool, form
        self._host = torch.empty(pages, page_words(pool, form), dtype=torch.int32)

    def move(self, moves: Sequence[Move], *, awaited: bool) -> None:
        """See `HostMemory`; every copy is complete at once."""
        for move in moves:
            if isinstance(move, HostFill):
                self._host[torch.from_numpy(move.slots)] = torch.from_numpy(move.words)
                continue
            if isinstance(move, LinkTouch):
                if self._writer is not None:
                    self._writer.touch(move.names)
                continue
            pages = torch.from_numpy(move.pages)
            if isinstance(move, PageSave):
                if self._writer is not None and self._writer.accepts(
                    size := len(pages) * self._page_bytes
                ):
                    self._writer.save(move.name, size, self._pack(pages).numpy)
                continue
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
                self._host[slots] = self._pack(pages)

    def _pack(self, pages: Tensor) -> Tensor:
        found = self._pool[pages]
        return found if self._form is None else self._form.pack(found)


def words(pool: Tensor) -> Tensor:
    """`pool` [N, Hp, S, P, D] as int32 [N, words of a page]: copies do not depend on the dtype."""
    return pool.view(len(pool), -1).view(torch.int32)


def page_words(pool: Tensor, form: HostForm | None = None) -> int:
    """The 32-bit words of a page of `pool`, as it is or in `form`."""
    if form is None:
        return pool[0].nbytes // 4
    dim = pool.shape[-1]
    return form.page_bytes(pool[0].numel() // dim, dim) // 4
