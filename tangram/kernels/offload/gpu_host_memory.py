"""Host memory behind a pool on a GPU: pinned, and copied beside the forward passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.errors import ConfigError, IntegrityError
from tangram.kernels.offload.host_forms import HostForm
from tangram.kernels.offload.host_memory import STAGING_BYTES, page_words, words
from tangram.kernels.transfer import upload_together
from tangram.kernels.triton.page_copies import copy
from tangram.types import Move, PageMove

_PARTS = 4  # of the staging memory: one is filled while others empty
_PACKING = 8  # bytes that torch takes for packing, for each byte of the pages
# Programs: all of the device for a moment, or few while a forward pass runs.
_GATHERING, _TRAVELLING = (2048, 32)
_log = logging.getLogger("tangram")


class GpuHostMemory:
    """`HostMemory` of `pages` pages, at least one, for a pool on a GPU. The host never waits.

    Outgoing pages are gathered in device memory on the main stream, so that they may be overwritten
    at once. All else happens on a side stream, in order, so that host pages may be reused
    immediately. Incoming copies wait for all earlier work of the main stream, since a step in
    flight may still read those pages. Pages in a `form` are packed on the main stream and unpacked
    on the side stream, by torch.
    """

    def __init__(self, pool: Tensor, pages: int, form: HostForm | None = None) -> None:
        size, self._device, self._form = page_words(pool, form), pool.device, form
        self._pool, self._host = words(pool) if form is None else pool, _pin(pages, size)
        most = STAGING_BYTES // _PARTS // (1 if form is None else _PACKING)
        self._capacity = max(1, most // (4 * page_words(pool)))
        self._staging = torch.empty(
            _PARTS, self._capacity, size, dtype=torch.int32, device=pool.device
        )
        self._order = torch.arange(self._capacity, dtype=torch.int32, device=pool.device)
        self._side: Any = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._emptied: list[Any] = [torch.cuda.Event() for _ in range(_PARTS)]  # type: ignore[no-untyped-call]
        self._arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._turn, self._coming = 0, False
        first = np.zeros(1, np.int32)
        # Compile the kernels.
        self.move([PageMove(first, first, inward) for inward in (False, True)], awaited=True)

    def move(self, moves: Sequence[Move], *, awaited: bool) -> None:
        """See `HostMemory`. Raises `IntegrityError` for moves to or from a disk."""
        self._move([_of_host_memory(move) for move in moves], awaited=awaited)

    def _move(self, moves: Sequence[PageMove], *, awaited: bool) -> None:
        main = torch.cuda.current_stream(self._device)
        if self._coming:
            main.wait_event(self._arrived)
        self._coming = any(move.inward and move.slots is not None for move in moves)
        if not moves:
            return
        arrays = [(move.pages, move.pages if move.slots is None else move.slots) for move in moves]
        places = upload_together([array for pair in arrays for array in pair], self._device)
        places[0].record_stream(self._side)  # they share one buffer
        self._side.wait_stream(main)
        for move, pages, slots in zip(moves, places[::2], places[1::2], strict=True):
            if move.slots is None:
                self._pool.index_fill_(0, pages.long(), 0)
                self._side.wait_stream(main)  # what comes in may follow
            elif move.inward:
                with torch.cuda.stream(self._side):
                    self._receive(pages, slots)
            else:
                for part in self._parts(pages, slots):
                    self._send(main, *part)
        if self._coming:
            self._arrived.record(self._side)
            if awaited:
                main.wait_event(self._arrived)

    def _parts(self, *places: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """`places` cut into what the staging memory takes at a time."""
        return zip(*(torch.split(array, self._capacity) for array in places), strict=True)

    def _receive(self, pages: Tensor, slots: Tensor) -> None:
        if self._form is None:
            copy(self._host, slots, self._pool, pages, programs=_TRAVELLING)
            return
        for places, sources in self._parts(pages, slots):
            packed = torch.empty(
                len(sources), self._host.shape[1], dtype=torch.int32, device=self._device
            )
            copy(self._host, sources, packed, self._order[: len(sources)], programs=_TRAVELLING)
            self._pool.index_copy_(0, places.long(), self._form.unpack(packed, self._pool))

    def _send(self, main: Any, pages: Tensor, slots: Tensor) -> None:
        """Copy pages to the host, up to a part of the staging memory.

        The main stream waits for a part that is still being copied.
        """
        staging, emptied = self._staging[self._turn], self._emptied[self._turn]
        self._turn = (self._turn + 1) % _PARTS
        order = self._order[: len(pages)]
        main.wait_event(emptied)
        if self._form is None:
            copy(self._pool, pages, staging, order, programs=_GATHERING)
        else:
            staging[: len(pages)] = self._form.pack(self._pool[pages.long()])
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            copy(staging, order, self._host, slots, programs=_TRAVELLING)
            emptied.record()


def _of_host_memory(move: Move) -> PageMove:
    if not isinstance(move, PageMove):
        raise IntegrityError("a GPU's pages do not go to disk")
    return move


def _pin(pages: int, size: int) -> Tensor:
    """int32 [pages, size] that a GPU can read and write.

    Raises `ConfigError` if the driver refuses. The memory is registered with CUDA, not allocated by
    torch, which would round up to a power of two.
    """
    memory = torch.empty(pages, size, dtype=torch.int32)
    _log.info("pinning %.1f GiB of host memory", memory.nbytes / 2**30)
    memory.zero_()  # on all cores, unlike the driver
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise ConfigError(
            f"kv_offload_gib: CUDA cannot pin {memory.nbytes / 2**30:.1f} GiB of host memory "
            f"(error {error}): lower it"
        )
    weakref.finalize(memory.untyped_storage(), driver.cudaHostUnregister, memory.data_ptr())
    return memory
