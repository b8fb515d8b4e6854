"""Block tables, on the host and on the pool's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.transfer import upload
from tangram.types import Int32, Int64

WHOLE_ROW = 16  # a block table with at least this part written is copied as a whole


class BlockTables(Protocol):
    """Block tables, as `CacheManager` and `PartTables` have them."""

    tables: Int32
    lengths: Int32

    def follow(self, follower: Callable[[int, Int64], None]) -> None:
        """See `CacheManager`."""
        ...


class DeviceTables:
    """Block tables on the pool's device: a copy of those of `cache` that follows every write.

    In host memory they are the same tables.
    """

    def __init__(self, cache: BlockTables, device: torch.device) -> None:
        self._host, self._device = cache.tables, torch.from_numpy(cache.tables).to(device)
        self._written: dict[int, list[Int64]] = {}
        if not self._device.is_cpu:
            cache.follow(lambda slot, entries: self._written.setdefault(slot, []).append(entries))

    def flat(self) -> Tensor:
        """int32 [slots · width]: the current block tables of all sequences, end to end."""
        if self._written:
            width, places, rows = self._host.shape[1], [], []
            for slot, parts in self._written.items():
                if sum(map(len, parts)) * WHOLE_ROW > width:
                    rows.append(slot)
                else:
                    places += [slot * width + entries for entries in parts]
            self._written.clear()
            self._copy_places(places)
            self._copy_rows(rows)
        return self._device.view(-1)

    def write(self, slots: Int64, tables: Int32) -> None:
        """Replace the block tables of `slots` [n] by `tables` [n, width], in both places."""
        self._host[slots] = tables
        self._copy_rows(slots.tolist())

    def _copy_places(self, places: list[Int64]) -> None:
        """A place that was written twice is copied twice, with its current value."""
        if places:
            where = np.concatenate(places)
            target, pages = upload(
                np.stack([where, self._host.ravel().take(where)]), self._device.device
            )
            # Their low halves: a conversion would be a launch at every step.
            self._device.view(-1).index_copy_(0, target, pages.view(torch.int32)[::2])

    def _copy_rows(self, slots: list[int]) -> None:
        if slots:
            target = upload(slots, self._device.device)
            self._device.index_copy_(0, target, upload(self._host[slots], self._device.device))
