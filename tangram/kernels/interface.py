"""What a step asks of the kernels that serve its pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from tangram.plan.form import Bool
from tangram.plan.schedule import Decoding
from tangram.types import Int32

MOST_BYTES = 1 << 29  # of keys and values that prefill copies at a time, unless one row needs more


@dataclass(frozen=True, eq=False)
class PrefillRows:
    """The N prefill rows of a step: where their tokens, their pasts and their new entries lie.

    `address` int32 [L, N, H, 3]: each head's table offset, column and past length. `spans` int32
    [N, 5]: the row's queries [begin, end) and keys [begin, end) in the flattened batch, and the
    position of its first key; the queries belong to its last keys. `kept` int32 [L, N, H]: how many
    of its entries each head keeps. A row may follow on one before it: what that one leaves is part
    of its past. `asking` are the rows that attend.
    """

    address: Int32
    spans: Int32
    kept: Int32
    asking: slice

    @cached_property
    def whole(self) -> Bool:
        """[L, N]: where all heads keep all entries."""
        keys = self.spans[:, 3] - self.spans[:, 2]
        return np.asarray((self.kept == keys[:, None]).all(axis=2), np.bool_)

    @cached_property
    def longest(self) -> int:
        """The most queries of an asking row; 0 if there is none."""
        return int((self.spans[:, 1] - self.spans[:, 0])[self.asking].max(initial=0))

    def repeat_row(self, row: int, tokens: int) -> PrefillRows:
        """`row` asks alone, with the queries of `tokens` tokens behind its own (KVzip's second
        pass).
        """
        _, _, begin, end, position = self.spans[row]
        spans = self.spans.copy()
        spans[row] = 0, tokens, 0, end - begin + tokens, position
        return replace(self, spans=spans, asking=slice(row, row + 1))


@dataclass(frozen=True)
class Room:
    """For one prefill row whose pass is padded: `tokens` of them, and pasts of up to `past` entries
    a head.

    Rows of one `kind`, how their entries are kept and what is done with the row, launch the same.
    """

    tokens: int
    past: int
    kind: Hashable


@dataclass(frozen=True, eq=False)
class Ranking(ABC):
    """In which order the entries of N chunks stay: by `scores` float32 [N, H, C], protected tokens
    before all others.

    Protected are the first `sinks` tokens of a sequence and the last `window` of a chunk.
    """

    scores: Tensor
    sinks: int
    window: int

    @abstractmethod
    def best(self, chunk: int, start: int, counts: Sequence[int] | Int32) -> list[Tensor]:
        """The `counts[h]` best places of each head in a chunk that begins at `start`: int64
        [counts[h]], ascending.
        """


class PoolKernels(Protocol):
    """All that attention does with one pool [N_pages, Hp, 2, P, D], in its dtype.

    `load` the decoding rows when they change, `begin` each forward pass, then in every layer
    `decode`, `seal` and `prefill`. Results of a row depend on its own tokens and past alone, but
    for the rounding of decode, which follows the plan.
    """

    @property
    def fused_scores(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Faster ways to a scorer's scores, by its name: keys [N, H, C, D] of N chunks → float32
        [N, H, C].
        """
        ...

    def width(self, rows: int) -> int:
        """The decode rows that a forward pass has which decodes `rows`; those beyond them mean
        nothing.
        """
        ...

    def load(self, batch: Decoding, width: int) -> str:
        """Plan for the rows of `batch` and decode them from now on; their lengths may grow. Who
        planned: a planner.
        """
        ...

    def rehearsals(self, batch: Decoding, width: int) -> Iterator[None]:
        """Load plans for `batch`, one after the other, which between them launch whatever any plan
        may need.
        """
        ...

    @property
    def captured(self) -> object | None:
        """What a graph of the pass that has begun, if that decodes alone or is `begin_row`'s, needs
        to stay as it is to be replayed. None: nothing can be captured.
        """
        ...

    def begin(self, tables: Tensor, lengths: Int32, decode_rows: int, prefill: PrefillRows) -> None:
        """Get ready for a forward pass: `decode_rows` is 0 or the width of the loaded plan.

        `tables` are the flat block tables, int32 on the pool's device; `lengths`, of any shape, are
        read flat.
        """
        ...

    def begin_row(self, tables: Tensor, row: PrefillRows, room: Room) -> bool:
        """`begin` for one row alone, whose launches are then those of any row with such room; what
        lies in the room behind the row's tokens means nothing. False: it is not done, `begin` has
        to be asked.
        """
        ...

    def decode(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Append the first `decode_rows` of k and v [T, H, D], then attend by the plan: q → out,
        both [T, Q, D].
        """
        ...

    def prefill(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Store the whole rows behind their pasts; then each row attends to its past and, causally,
        to itself.

        q [T, Q, D], k and v [T', H, D] → out [T, Q, D].
        """
        ...

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """Store behind the past of each of N prefill rows the `kept` best of its entries, in their
        order.

        `rows` are of one length C and lie end to end: k, v [N · C, H, D].
        """
        ...

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """[H, count, D]: the oldest keys of prefill row `row`."""
        ...


# What serves a pool, given it and G, the query heads of a KV head.
KernelChoice = Callable[[Tensor, int], PoolKernels]
