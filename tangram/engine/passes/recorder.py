"""Notes which entries of each sealed chunk were kept, for those who watch (`tangram/watch.py`).

The kernels write a byte for each entry beside what they seal. A copy of it goes to the host, and is
packed to bits when it has arrived. No step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tangram.cache.kept import KeptStore
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.kernels.transfer import HostCopies
from tangram.watch import KeptPositions

POOL_SHARE = 0.005  # of the pool's bytes: what the bits may take


@dataclass(frozen=True, eq=False)
class _Note:
    """The chunk of `row`, which is number `at` in `copies`."""

    row: Row
    copies: HostCopies
    at: int


class KeptRecorder:
    """Notes what is kept of the chunks that a pass seals, up to `rows` of them, in `store`.

    The kernels of the pool write it to `chosen` (`KvPool`). Call `note` after each pass, `commit`
    and `collect` after each step.
    """

    def __init__(self, retention: Retention, rows: int, device: torch.device, limit: int) -> None:
        geometry = retention.layout.geometry
        self._shape = geometry.layers, geometry.kv_heads, retention.layout.chunk_tokens
        self._full = list(geometry.full_layers)
        # Layers with other heads keep everything, and are not noted.
        apart = geometry.window_heads is not None
        self._noted_at = list(range(len(self._full))) if apart else self._full
        layers = len(self._full) if apart else geometry.layers
        shape = rows, layers, *self._shape[1:]
        self.chosen = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.store = KeptStore(limit)
        self._noted: list[_Note] = []
        self._named: deque[tuple[bytes, _Note]] = deque()

    def note(self, rows: Sequence[Row]) -> None:
        """A pass of these prefill rows is launched. Chunks that keep all entries need no note."""
        sealed = [at for at, row in enumerate(rows) if _is_chosen(row)]
        if sealed:
            masks = self.chosen[: sealed[-1] + 1]
            # The next pass writes the same buffer. On a GPU it follows the copy.
            copies = HostCopies(masks.clone() if masks.is_cpu else masks)
            self._noted += [_Note(rows[at], copies, at) for at in sealed]

    def commit(self, computing: Sequence[TokenSequence]) -> None:
        """Name what was noted of the sequences that are still computed.

        Call it once all tokens of the noted chunks are known.
        """
        if self._noted:
            self._name({entry.cache.slot: entry for entry in computing if entry.cache is not None})

    def collect(self, *, awaited: bool = False) -> None:
        """Store what has arrived on the host, or all if `awaited`."""
        while self._named and (awaited or self._named[0][1].copies.arrived):
            key, note = self._named.popleft()
            if self.store.get(key) is None:
                self.store.put(key, self._pack(note))

    def _name(self, sequences: Mapping[int, TokenSequence]) -> None:
        for note in self._noted:
            sequence = sequences.get(note.row.slot)
            if sequence is not None:
                chunk = note.row.start // sequence.retention.layout.chunk_tokens
                key = sequence.keys.after(chunk + 1, sequence.computable_tokens)
                self._named.append((key, note))
        self._noted.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._noted.clear()
        self._named.clear()
        self.store.clear()

    def _pack(self, note: _Note) -> KeptPositions:
        chosen = np.ones(self._shape, np.uint8)
        chosen[self._full] = note.copies.get()[0][note.at].numpy()[self._noted_at]
        bits = np.packbits(chosen, bitorder="little")
        layers, heads, tokens = chosen.shape
        return KeptPositions(bits, layers, heads, tokens)


def _is_chosen(row: Row) -> bool:
    return row.kind is RowKind.SEAL and row.retention.scorer is not None and row.retention.orders
