"""One padded prefill row: static buffers, and launches that depend on its shape alone, for graphs.

Grids, buffers and the choice of kernels are those of the longest row that fits the shape. The
kernels read the row's true length, and its past, from the buffers. The path of a row depends on its
own length, so a row alone is computed as in any other step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.gathered import PrefillOrder
from tangram.kernels.interface import PaddedShape, PrefillRows
from tangram.kernels.transfer import stage, views
from tangram.types import Int32


@dataclass(eq=False)
class RowBuffers:
    """The buffers of the one row of a pass, sized for the longest row, as are `rows` and `cells`.

    Launches depend on `rows` and `cells` alone. `views` of `whole` are the row's address, spans,
    counts, order, offsets and sources, as `load` wrote them.
    """

    rows: PrefillRows
    cells: PrefillOrder
    whole: Tensor
    views: list[Tensor]

    @classmethod
    def of(
        cls,
        row: PrefillRows,
        cells: PrefillOrder,
        shape: PaddedShape,
        entries: int,
        device: torch.device,
    ) -> RowBuffers:
        """Buffers for rows like `row`, with at most `entries` gathered entries in a layer."""
        tokens, layers = shape.tokens, len(row.address)
        spans = np.array([[0, tokens, 0, tokens, 0]], np.int32)
        kept, first = (
            np.where(row.whole[:, :, None], np.int32(tokens), counts)
            for counts in (row.kept, row.first)
        )
        most = [
            replace(
                part,
                queries=tokens,
                keys=tokens,
                longest=np.full(layers, shape.past),
                total=np.full(layers, entries),
            )
            for part in cells.gathered
        ]
        arrays = _arrays(row, cells)
        whole = torch.empty(sum(array.size for array in arrays), dtype=torch.int32, device=device)
        return cls(
            replace(row, spans=spans, kept=kept, first=first),
            replace(cells, gathered=most),
            whole,
            views(whole, arrays),
        )

    def load(self, row: PrefillRows, cells: PrefillOrder) -> None:
        """Later work on the current stream computes `row`, which must be like the first one."""
        whole = np.concatenate([array.ravel() for array in _arrays(row, cells)])
        self.whole.copy_(stage(whole, self.whole.device), non_blocking=True)


def _arrays(row: PrefillRows, cells: PrefillOrder) -> list[Int32]:
    orders = cells.order, cells.offsets, cells.sources
    return [row.address, row.spans, row.first, *orders]
