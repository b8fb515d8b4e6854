"""The tokens that each KV head kept, recorded when the engine's kernels stored them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tangram.kernels.cpu.cpu_kernels import CpuKernels, CpuLaunch
from tangram.kernels.interface import KvPool, PassAddresses, PoolKernels, Ranking
from tangram.types import Int32


class KeptEntries:
    """Records sealed chunks; give `kernels` to `engine_of`.

    `places[layer, start]` are positions in the sequence, int64 [kept] for each head, of the chunk
    that was last sealed at position `start`.
    """

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], list[Tensor]] = {}

    def kernels(self, pool: KvPool) -> PoolKernels:
        """The CPU kernels with a recorder. Their results do not change."""
        return _WatchedKernels(pool, self)

    def shares(self, begin: int, end: int) -> list[float]:
        """The share of all KV heads that hold each token of [begin, end), of sealed chunks."""
        counts, heads = torch.zeros(end, dtype=torch.int64), dict[int, int]()
        for (layer, _), places in self.places.items():
            heads[layer] = len(places)
            for own in places:
                counts[own[own < end]] += 1
        return (counts[begin:] / sum(heads.values())).tolist()


class _WatchedKernels(CpuKernels):
    def __init__(self, pool: KvPool, kept: KeptEntries) -> None:
        super().__init__(pool)
        self._kept = kept

    def launch(self, addresses: PassAddresses, tables: Tensor) -> CpuLaunch:
        own = super().launch(addresses, tables)
        parts = own.pool, own.addresses, own.tables, own.decoding
        return _WatchedLaunch(*parts, self._kept)


@dataclass(frozen=True, eq=False)
class _WatchedLaunch(CpuLaunch):
    kept: KeptEntries

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        note = partial(self._note, layer)
        noted = _NotedRanking(ranking.scores, ranking.sinks, ranking.window, ranking, note)
        super().seal(layer, rows, noted, k, v)

    def _note(self, layer: int, start: int, best: list[Tensor]) -> None:
        self.kept.places[layer, start] = [start + own for own in best]


@dataclass(frozen=True, eq=False)
class _NotedRanking(Ranking):
    """A ranking that also passes its results to `note`."""

    asked: Ranking
    note: Callable[[int, list[Tensor]], None]

    def places(self, chunk: int, start: int, first: Int32, kept: Int32) -> list[Tensor]:
        places = self.asked.places(chunk, start, first, kept)
        self.note(start, places)
        return places
