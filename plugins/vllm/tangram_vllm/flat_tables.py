"""Flat block tables of the kernels, written from vLLM's cells."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.transfer import upload
from tangram.types import Int32, Int64
from tangram_vllm.slab import Slab


class FlatTables:
    """`tables` flat tables: each has the sealed chunks before one chunk, and the raw pages of it.

    They are written on the host. `flat` brings what has changed to their copy on `device`.
    """

    def __init__(self, slab: Slab, tables: int, device: torch.device) -> None:
        self._slab = slab
        self._host = np.zeros((tables, int(slab.layout.group_offset[-1])), np.int32)
        self._device = torch.from_numpy(self._host).to(device)
        most_chunks = -(-slab.layout.max_tokens // slab.layout.chunk_tokens) + 1
        self._cells = np.zeros((tables, most_chunks, slab.columns), np.int32)
        self._chunks = np.zeros(tables, np.int64)
        self._changed: set[int] = set()

    @property
    def host(self) -> Int32:
        """[tables, entries of a table]."""
        return self._host

    def flat(self) -> Tensor:
        """The tables end to end, on the device."""
        if self._changed and not self._device.is_cpu:
            changed = sorted(self._changed)
            target = upload(changed, self._device.device)
            self._device.index_copy_(0, target, upload(self._host[changed], self._device.device))
        self._changed.clear()
        return self._device.view(-1)

    def write(self, tables: Int64, cells: Int32, chunks: Int64) -> None:
        """The tables that tokens of `chunks` [N] read; `cells` [N, n] are rows of vLLM's table.

        What a table holds already is left.
        """
        columns = self._slab.columns
        given = min(cells.shape[1] // columns, self._cells.shape[1])
        now = np.zeros((len(tables), *self._cells.shape[1:]), np.int32)
        now[:, :given] = cells[:, : given * columns].reshape(len(tables), given, columns)
        now[np.arange(now.shape[1]) > chunks[:, None]] = 0
        differs = (now != self._cells[tables]).any(axis=2)
        # Where the raw pages of another chunk were, its sealed ones are now, or the reverse.
        open_before = self._chunks[tables]
        differs[np.arange(len(tables)), np.minimum(open_before, chunks)] |= open_before != chunks
        for row in np.flatnonzero(differs.any(axis=1)):
            first = int(differs[row].argmax())
            self._write(int(tables[row]), now[row], first, int(chunks[row]))
        self._cells[tables], self._chunks[tables] = now, chunks

    def _write(self, table: int, cells: Int32, first: int, chunk: int) -> None:
        """The table of `chunk`, of whose chunks those before the `first` stay as they are."""
        slab, layout, row = self._slab, self._slab.layout, self._host[table]
        blocks = cells.astype(np.int64)
        for before in range(first, chunk):
            row[layout.span_entries(before)] = blocks[before, -1] * slab.pages + slab.sealed_places
        raw = slab.raw_pages(blocks[chunk, : slab.raw_blocks])
        row[layout.raw_entries(chunk, np.arange(layout.chunk_pages))] = raw
        self._changed.add(table)
