"""One prefill row in a room: buffers that stay, and launches that follow from the room alone, as a
graph needs them.

What a launch fixes (grids, buffers, which kernels) is that of the longest row that the room holds;
the kernels read how long the row really is, and its past, from the buffers. A row that shares no
launch with others is computed as it is in any step: its path depends on its own length.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.gathered import PrefillOrder
from tangram.kernels.interface import PrefillRows, Room
from tangram.kernels.transfer import stage, views
from tangram.types import Int32


@dataclass(eq=False)
class RowBuffers:
    """Where the kernels find the one row of a pass; launches go by `rows` and `cells`, the longest
    that there may be.

    `views` of `whole` are the row's address, spans, kept counts, order, offsets and sources, as
    `load` left them. `copies` are what its past is gathered into, which has to stay as long as a
    graph.
    """

    rows: PrefillRows
    cells: PrefillOrder
    whole: Tensor
    views: list[Tensor]
    copies: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls, row: PrefillRows, cells: PrefillOrder, room: Room, entries: int, device: torch.device
    ) -> RowBuffers:
        """For rows like `row`, whose gathered pasts and own entries are at most `entries` in a
        layer.
        """
        tokens, layers = room.tokens, len(row.address)
        spans = np.array([[0, tokens, 0, tokens, 0]], np.int32)
        kept = np.where(row.whole[:, :, None], np.int32(tokens), row.kept)
        most = [
            replace(
                part,
                queries=tokens,
                keys=tokens,
                longest=np.full(layers, room.past),
                total=np.full(layers, entries),
            )
            for part in cells.gathered
        ]
        arrays = _arrays(row, cells)
        whole = torch.empty(sum(array.size for array in arrays), dtype=torch.int32, device=device)
        return cls(
            replace(row, spans=spans, kept=kept),
            replace(cells, gathered=most),
            whole,
            views(whole, arrays),
        )

    def load(self, row: PrefillRows, cells: PrefillOrder) -> None:
        """What follows on the current stream computes `row`, which is like the first."""
        whole = np.concatenate([array.ravel() for array in _arrays(row, cells)])
        self.whole.copy_(stage(whole, self.whole.device), non_blocking=True)


def _arrays(row: PrefillRows, cells: PrefillOrder) -> list[Int32]:
    return [row.address, row.spans, row.kept, cells.order, cells.offsets, cells.sources]
