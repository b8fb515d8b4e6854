"""Flat block tables of the kernels, computed on the device from vLLM's cells."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.transfer import upload
from tangram.types import Int64
from tangram_vllm.slab import Slab


class TableEntries(NamedTuple):
    """Entries [E] of a flat table, on the device: `at` is where the table has them.

    An entry is page `place` of its `group`, of whose pages a sealed chunk has `sealed`. If it is
    part of a sealed chunk, `cell` is the chunk's cell of a row, and `page` its page of the block.
    """

    at: Tensor
    place: Tensor
    sealed: Tensor
    cell: Tensor
    page: Tensor
    group: Tensor


class FlatTables:
    """`tables` flat tables: each has the sealed chunks before one chunk, and the raw pages of it.

    What tables have behind these is of no meaning.
    """

    def __init__(self, slab: Slab, tables: int, device: torch.device) -> None:
        self._slab, self._device = slab, device
        self._tables = torch.zeros(tables, self.width, dtype=torch.int32, device=device)
        self._entries = lru_cache(self._find_entries)  # few, see `write`
        self._made_of = np.zeros((tables, 0), np.int64)
        block, page = np.divmod(slab.raw_numbers.ravel(), slab.pages)
        self._raw_block, self._raw_page = upload(block, device), upload(page, device)

    @cached_property
    def width(self) -> int:
        """Entries of a table."""
        return int(self._slab.layout.group_offset[-1])

    @property
    def flat(self) -> Tensor:
        """The tables end to end, on the device."""
        return self._tables.view(-1)

    def write(self, tables: Int64, cells: Tensor, chunks: Int64) -> None:
        """Make `tables` [N] those of tokens in `chunks` [N].

        `cells` [N, n], on the device, are rows of vLLM's block table.
        """
        if cells.is_cpu:  # a host would wait for a GPU to compare
            changed = self._changes(tables, cells, chunks)
            tables, cells, chunks = tables[changed], cells[changed], chunks[changed]
            if not len(tables):
                return
        slab, entries = self._slab, self._entries(int(chunks.max()).bit_length())
        known = upload(np.stack([tables, chunks]), self._device)
        table, chunk = known[0][:, None], known[1][:, None]
        raw_row = entries.place - chunk * entries.sealed
        last = slab.layout.chunk_pages - 1
        number = raw_row.clamp(0, last) * len(slab.layout.groups) + entries.group
        sealed = raw_row < 0
        cell = torch.where(sealed, entries.cell, chunk * slab.columns + self._raw_block[number])
        page = torch.where(sealed, entries.page, self._raw_page[number])
        blocks = cells.gather(1, cell.clamp(max=cells.shape[1] - 1))
        self._tables[table, entries.at] = (blocks * slab.pages + page).int()

    def _changes(self, tables: Int64, cells: Tensor, chunks: Int64) -> Int64:
        """Which of the N rows differ from what their tables were made of last."""
        known = np.column_stack([cells.numpy(), chunks])
        if self._made_of.shape[1] != known.shape[1]:
            self._made_of = np.full((len(self._tables), known.shape[1]), -1)
        changed = np.flatnonzero((self._made_of[tables] != known).any(axis=1))
        self._made_of[tables] = known
        return changed

    def _find_entries(self, bits: int) -> TableEntries:
        """Those that tables of chunks whose number has so many `bits` have."""
        slab, layout = self._slab, self._slab.layout
        sealed_pages = layout.sealed_pages.astype(np.int64)
        group = np.repeat(np.arange(len(sealed_pages)), np.diff(layout.group_offset))
        place = np.arange(self.width) - layout.group_offset[group]
        at = np.flatnonzero(place < (1 << bits) * sealed_pages[group] + layout.chunk_pages)
        group, place = group[at], place[at]
        chunk, rank = np.divmod(place, sealed_pages[group])
        first = np.cumsum(sealed_pages) - sealed_pages
        page = slab.sealed_places[first[group] + rank]
        cell = chunk * slab.columns + slab.columns - 1
        arrays = np.stack([at, place, sealed_pages[group], cell, page, group])
        return TableEntries(*upload(arrays, self._device))
