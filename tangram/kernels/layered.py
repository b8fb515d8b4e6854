"""The kernels of a pool for layers with heads of two shapes (Gemma 4).

A page has fixed bytes. Layers of each shape see it in columns of their own head dim, and have
kernels of their own, with plans and addresses of those layers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from tangram.kernels.interface import (
    DecodedRows,
    KernelChoice,
    KvPool,
    Launch,
    PassAddresses,
    PassShape,
    PoolKernels,
    Ranking,
)
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.schedule import Decoding
from tangram.types import Geometry, Int64, LayerHeads


@dataclass(frozen=True)
class LayersShape(PassShape):
    """The shapes of one pass for the layers of each shape of heads."""

    parts: tuple[PassShape, ...]

    @property
    def form(self) -> type[PassShape]:
        """See `PassShape`."""
        return self.parts[0].form


@dataclass(frozen=True, eq=False)
class _Part:
    """The layers of one shape of heads: their numbers [n], and their kernels."""

    layers: Int64
    heads: LayerHeads
    kernels: PoolKernels

    def batch(self, whole: Decoding) -> Decoding:
        """A batch as planners of these layers see it."""
        rows, heads = whole.rows, slice(0, self.heads.kv_heads)
        windows = tuple(rows.windows[layer] for layer in self.layers)
        return replace(
            whole,
            rows=DecodeRows(
                rows.address[self.layers, :, heads],
                rows.budget[:, self.layers, heads],
                windows,
                rows.page_tokens,
            ),
            group=self.heads.group_size,
            kept_tokens=whole.kept_tokens[:, self.layers, heads],
            prefixes=lambda: whole.forest,
        )

    def decode_rows(self, whole: DecodedRows, plan: WorkPlan) -> DecodedRows:
        """The decode rows of a pass in these layers."""
        address = whole.address[self.layers, :, : self.heads.kv_heads]
        return replace(whole, address=address, plan=plan)

    def addresses(self, whole: PassAddresses, decode: DecodedRows | None) -> PassAddresses:
        """A pass in these layers."""
        rows, heads = whole.prefill, slice(0, self.heads.kv_heads)
        prefill = replace(
            rows,
            address=rows.address[self.layers, :, heads],
            kept=rows.kept[self.layers, :, heads],
            first=rows.first[self.layers, :, heads],
        )
        return replace(whole, decode=decode, prefill=prefill)


class LayeredKernels:
    """`PoolKernels` that pass each layer on to the kernels of its shape."""

    def __init__(self, pool: KvPool, geometry: Geometry, choose: KernelChoice) -> None:
        """`pool` has the heads of full-attention layers, and notes as `chosen` theirs alone."""
        self._parts = [
            _Part(np.asarray(layers, np.int64), heads, choose(_view(pool, geometry, layers, heads)))
            for heads, layers in _layers_by_shape(geometry)
        ]
        self._places = {
            int(layer): (number, place)
            for number, part in enumerate(self._parts)
            for place, layer in enumerate(part.layers)
        }
        # The addresses of the last decode rows in each part, by queries of a row.
        self._decoded: dict[int, tuple[DecodedRows, list[DecodedRows]]] = {}

    @property
    def fused_scores(self) -> Mapping[str, Callable[..., Tensor]]:
        """See `PoolKernels`: only full-attention layers are scored."""
        return self._parts[0].kernels.fused_scores

    def width(self, tokens: int, queries: int) -> int:
        """See `PoolKernels`."""
        return self._parts[0].kernels.width(tokens, queries)

    def plan(self, batch: Decoding) -> tuple[WorkPlan, str]:
        """See `PoolKernels`."""
        plans = [part.kernels.plan(part.batch(batch)) for part in self._parts]
        (first, kind), *others = plans
        return replace(first, others=tuple(plan for plan, _ in others)), kind

    def launch(self, addresses: PassAddresses, tables: Tensor) -> LayeredLaunch:
        """See `PoolKernels`."""
        parts = zip(self._parts, self._split(addresses), strict=True)
        return self._join([part.kernels.launch(own, tables) for part, own in parts])

    def rehearse(self, addresses: PassAddresses, tables: Tensor) -> Iterator[LayeredLaunch]:
        """See `PoolKernels`."""
        parts = list(zip(self._parts, self._split(addresses), strict=True))
        launches = [part.kernels.launch(own, tables) for part, own in parts]
        for number, (part, own) in enumerate(parts):
            for launches[number] in part.kernels.rehearse(own, tables):
                yield self._join(launches)

    def reserve(self, rows: DecodedRows) -> None:
        """See `PoolKernels`."""
        for part, own in zip(self._parts, self._split_decoded(rows), strict=True):
            part.kernels.reserve(own)

    def _join(self, launches: Sequence[Launch]) -> LayeredLaunch:
        return LayeredLaunch(tuple(launches), self._places)

    def _split(self, addresses: PassAddresses) -> list[PassAddresses]:
        rows = addresses.decode
        decoded = [None] * len(self._parts) if rows is None else self._split_decoded(rows)
        return [
            part.addresses(addresses, own) for part, own in zip(self._parts, decoded, strict=True)
        ]

    def _split_decoded(self, rows: DecodedRows) -> list[DecodedRows]:
        """Under one plan the parts keep their addresses, by which kernels know them."""
        known = self._decoded.get(rows.queries)
        if known is None or known[0].plan is not rows.plan or known[0].address is not rows.address:
            plans = replace(rows.plan, others=()), *rows.plan.others
            made = [
                part.decode_rows(rows, plan) for part, plan in zip(self._parts, plans, strict=True)
            ]
            known = self._decoded[rows.queries] = rows, made
        return [replace(rows, address=own.address, plan=own.plan) for own in known[1]]


@dataclass(frozen=True, eq=False)
class LayeredLaunch:
    """`Launch` that passes each layer on: `places` has its part and its number there."""

    parts: tuple[Launch, ...]
    places: Mapping[int, tuple[int, int]]

    @property
    def shape(self) -> PassShape | None:
        """See `Launch`."""
        shapes = [part.shape for part in self.parts]
        known = tuple(shape for shape in shapes if shape is not None)
        if len(known) < len(shapes):
            return None
        return LayersShape(known[0].tokens, known, room=tuple(shape.room for shape in known))

    def decode(self, layer: int, *rest: Any) -> None:
        """See `Launch`."""
        part, place = self._find(layer)
        part.decode(place, *rest)

    def prefill(self, layer: int, *rest: Any) -> Tensor:
        """See `Launch`."""
        part, place = self._find(layer)
        return part.prefill(place, *rest)

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """See `Launch`."""
        part, place = self._find(layer)
        part.seal(place, rows, ranking, k, v)

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """See `Launch`."""
        part, place = self._find(layer)
        return part.first_keys(place, row, count)

    def _find(self, layer: int) -> tuple[Launch, int]:
        number, place = self.places[layer]
        return self.parts[number], place


def _layers_by_shape(geometry: Geometry) -> list[tuple[LayerHeads, list[int]]]:
    """The layers of each shape of heads, those with full attention first."""
    found = dict[LayerHeads, list[int]]()
    for layer in sorted(range(geometry.layers), key=lambda at: geometry.windows[at] is not None):
        found.setdefault(geometry.heads_of(layer), []).append(layer)
    return list(found.items())


def _view(pool: KvPool, geometry: Geometry, layers: Sequence[int], heads: LayerHeads) -> KvPool:
    """The pool as layers of these heads see it."""
    pages, heads_per_page, vectors, page_tokens, _ = pool.entries.shape
    columns = heads_per_page * geometry.head_dim // heads.head_dim
    entries = pool.entries.view(pages, columns, vectors, page_tokens, heads.head_dim)
    chosen = None if geometry.windows[layers[0]] is not None else pool.chosen
    return KvPool(
        entries, heads.group_size, len(layers), heads.kv_heads, scales=None, chosen=chosen
    )
