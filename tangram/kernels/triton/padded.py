"""Prefill rows on the device: those of any pass, and one padded row in static buffers, for graphs.

Grids, buffers and the choice of kernels of a padded row are those of the longest row that fits the
shape. The kernels read the row's true length, and its past, from the buffers. The path of a row
depends on its own length, so a row alone is computed as in any other step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tangram.kernels.interface import PaddedShape, PrefillRows
from tangram.kernels.transfer import stage, views
from tangram.kernels.triton.fused_causal import CausalRun
from tangram.kernels.triton.gathered import PrefillOrder
from tangram.kernels.triton.stored import LayerRows
from tangram.plan.records import SPAN, as_words
from tangram.types import Int32


@dataclass(frozen=True, eq=False)
class LoadedPrefill:
    """The prefill rows of a pass, and on the device what kernels read of them.

    `runs` are those that need no pages. `address` and `spans` are the words of those in
    `PrefillRows`, `first` is as there, `order`, `offsets` and `sources` as in `PrefillOrder`.
    Launches depend on `rows`, `cells` and `runs` alone.
    """

    rows: PrefillRows
    cells: PrefillOrder
    runs: Sequence[CausalRun]
    address: Tensor
    spans: Tensor
    first: Tensor
    order: Tensor
    offsets: Tensor
    sources: Tensor

    def of_layer(self, layer: int, tables: Tensor, rows: slice = slice(None)) -> LayerRows:
        """`rows` in `layer`."""
        lengths = self.rows.shortest, self.rows.longest
        return LayerRows(layer, tables, self.address[layer, rows], self.spans[rows], *lengths)

    def find_paged(self, plain: bool, gathers: bool) -> slice:
        """The places of a layer's cells that follow pages: others are fused, or gathered."""
        paged = self.cells.paged
        return slice(paged.start if gathers else 0, paged.stop if plain else self.order.shape[1])


@dataclass(frozen=True)
class RowShape(PaddedShape):
    """The shape of a padded row whose past is copied out of its pages if it `gathers`."""

    gathers: bool


@dataclass(frozen=True, eq=False)
class RowBuffers:
    """The buffers of the one row of padded passes, sized for the longest row.

    `loaded` has views of `whole`, as `load` wrote it.
    """

    whole: Tensor
    loaded: LoadedPrefill

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
        spans = np.array([(0, tokens, 0, tokens, 0)], SPAN)
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
        arrays = inputs_of(row, cells)
        whole = torch.empty(sum(array.size for array in arrays), dtype=torch.int32, device=device)
        rows = replace(row, spans=spans, kept=kept, first=first)
        longest = replace(cells, gathered=most)
        return cls(whole, LoadedPrefill(rows, longest, [], *views(whole, arrays)))

    def load(self, row: PrefillRows, cells: PrefillOrder) -> None:
        """Later work on the current stream computes `row`, which must be like the first one."""
        whole = np.concatenate([array.ravel() for array in inputs_of(row, cells)])
        self.whole.copy_(stage(whole, self.whole.device), non_blocking=True)


def inputs_of(row: PrefillRows, cells: PrefillOrder) -> list[Int32]:
    """What kernels read of prefill rows, in the order of `LoadedPrefill`."""
    orders = cells.order, cells.offsets, cells.sources
    return [as_words(row.address), as_words(row.spans), row.first, *orders]
