"""What a pass asks of the kernels of its pool, and what they do for it.

The host describes the attention of a pass once, in numbers (`PassAddresses`). The kernels of a pool
launch it: what a launch does depends on its pass alone, so nothing has to be called before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from tangram.plan.form import Bool, WorkPlan
from tangram.plan.records import Records
from tangram.plan.schedule import Decoding
from tangram.types import Int32

MOST_QUERIES = 128  # of one KV head that a task on a GPU serves: its largest tile
MOST_BYTES = 1 << 29  # of keys and values that prefill copies at a time, unless one row needs more


@dataclass(frozen=True, eq=False)
class PrefillRows:
    """The N prefill rows of a step: where their tokens, their pasts and their new entries lie.

    `address` has a `PAST` for each head [L, N, H], `spans` [N] a `SPAN` for each row, whose queries
    belong to its last keys. `kept` int32 [L, N, H]: how many of its entries each head keeps, of
    them `first` int32 [L, N, H] by score, before all others. A row may follow another row of its
    sequence, whose entries are then part of its past. `asking` are the rows that attend.
    """

    address: Records
    spans: Records
    kept: Int32
    first: Int32
    asking: slice

    @cached_property
    def whole(self) -> Bool:
        """[L, N]: where all heads keep all entries as they come."""
        return np.asarray((self.first == self.keys[:, None]).all(axis=2), np.bool_)

    @property
    def queries(self) -> Int32:
        """int32 [N]: the queries of each row."""
        return np.asarray(self.spans["query_end"] - self.spans["query_begin"], np.int32)

    @property
    def keys(self) -> Int32:
        """int32 [N]: the keys of each row."""
        return np.asarray(self.spans["key_end"] - self.spans["key_begin"], np.int32)

    @cached_property
    def longest(self) -> int:
        """The most queries of an asking row; 0 if there is none."""
        return int(self.queries[self.asking].max(initial=0))

    @cached_property
    def shortest(self) -> int:
        """The least queries of an asking row; 0 if there is none."""
        queries = self.queries[self.asking]
        return int(queries.min()) if len(queries) else 0

    def repeat_row(self, row: int, tokens: int) -> PrefillRows:
        """`row` alone, with queries for `tokens` repeated tokens after its own.

        This is KVzip's second pass.
        """
        spans = self.spans.copy()
        spans[row] = 0, tokens, 0, self.keys[row] + tokens, spans["position"][row]
        return replace(self, spans=spans, asking=slice(row, row + 1))


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """The R decode rows of a pass, and the `plan` made for them.

    `address` [L, R, H] is that of `DecodeRows`. `counts` int32 [R] are the tokens of the rows, up
    to `queries` each, which lie end to end from the first of the flattened batch on. These are
    padded to `width` tokens. The plan and its launches are made for `lengths` int32 [slots ·
    groups]: those of the first pass of the plan, or in a rehearsal longer ones.
    """

    address: Records
    lengths: Int32
    queries: int
    plan: WorkPlan
    counts: Int32
    width: int

    @classmethod
    def of(cls, batch: Decoding, plan: WorkPlan, counts: Int32, width: int) -> DecodedRows:
        """The rows of `batch`, for which `plan` is made."""
        return cls(batch.rows.address, batch.lengths, batch.queries, plan, counts, width)

    @cached_property
    def tokens(self) -> int:
        """The tokens of all rows, without padding."""
        return int(self.counts.sum())


@dataclass(frozen=True)
class PassShape:
    """What passes have in common that one graph replays: its key, to which kernels add fields.

    `tokens` are those of the flattened batch, with padding. `room` says how large the buffers are
    that the kernels now keep for the shape; a graph over smaller ones is captured anew.
    """

    tokens: int
    room: object = field(default=None, compare=False, kw_only=True)

    @property
    def form(self) -> type[PassShape]:
        """Which shapes are captured, or refused, as this one is."""
        return type(self)


@dataclass(frozen=True)
class PaddedShape(PassShape):
    """The shape of a pass of one prefill row, with pasts of up to `past` entries a head.

    Rows of one `kind` launch the same kernels: `kind` says how entries are kept and what is done
    with the row.
    """

    past: int
    kind: Hashable


@dataclass(frozen=True, eq=False)
class PassAddresses:
    """The attention of one pass, in numbers: where its tokens, pasts and new entries lie.

    `lengths` int32 [slots, groups] count the entries of all sequences, those of the decode rows
    with the tokens of the pass. The rows `prefill` follow the decode rows in the flattened batch.
    A pass of one prefill row that may be padded has a `padding`.
    """

    lengths: Int32
    decode: DecodedRows | None
    prefill: PrefillRows
    padding: PaddedShape | None = None

    @property
    def width(self) -> int:
        """The tokens of the decode rows, with their padding."""
        return 0 if self.decode is None else self.decode.width


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer attends: products times `scaling`, and what else the model asks for.

    `window` is the sliding window in tokens, `softcap` bounds logits, `sinks` [Q] are logits that
    take part in the softmax without a value. Keys and values that are `shared` another layer of the
    pass has stored already.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    shared: bool = False


@dataclass(frozen=True, eq=False)
class KvPool:
    """The pool of a model, as its kernels see it: `entries` [N_pages, Hp, S, P, D] in its dtype.

    S is 2 where an entry is a key and a value. It is 1 in a pool of latents: each is the one key of
    all query heads, H is 1, and its value is the first V of its D elements. `group` is G; `layers`
    and `heads` are L and H. A pool of 8 bits holds keys and values divided by `scales` float32
    [L, H, 2], as `narrow.stored_scales` gives them; None are 1. If `chosen` uint8 [N, L, H, C] is
    given, a launch notes what it seals there: a 1 for the entries of a prefill row that are the
    `first` of its head, a 0 for the others.
    """

    entries: Tensor
    group: int
    layers: int
    heads: int
    scales: Tensor | None = None
    chosen: Tensor | None = None

    @property
    def latent(self) -> bool:
        """Whether it holds latents."""
        return self.entries.shape[2] == 1


@dataclass(frozen=True, eq=False)
class Ranking(ABC):
    """The order in which the entries of N chunks are kept, by `scores` float32 [N, H, C].

    Protected tokens precede all others: the first `sinks` tokens of a sequence and the last
    `window` of a chunk.
    """

    scores: Tensor
    sinks: int
    window: int

    @abstractmethod
    def places(self, chunk: int, start: int, first: Int32, kept: Int32) -> list[Tensor]:
        """The `kept[h]` places that each head stores, in their order: int64 [kept[h]].

        The `first[h]` best come first; these and the others ascend. The chunk begins at position
        `start`. Raises `IntegrityError` if a head keeps some of the others, but not all.
        """


class Expansion(Protocol):
    """How a layer's latents become keys and values of its query heads."""

    @property
    def up(self) -> Tensor:
        """[Q, D' - rotary + V, rank]: the map to keys, without rotary elements, and values."""
        ...

    @property
    def value_dim(self) -> int:
        """V."""
        ...

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [n, D] → keys [Q, n, D'] and values [Q, n, V], by the model's own code."""
        ...


class Launch(Protocol):
    """The attention of one pass on the device, layer by layer: `decode`, `seal` and `prefill`.

    Results of a row depend on its own tokens and past alone. An exception is the rounding of
    decode, which depends on the plan. A launch is invalid once its kernels have made another.
    """

    @property
    def shape(self) -> PassShape | None:
        """The shape of a pass that only decodes, or of one row that is padded to a `PaddedShape`.

        None if the kernels keep no buffers for such passes, so that no graph can replay them.
        """
        ...

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule
    ) -> None:
        """Append the decoded tokens of k and v [T, H, D] unless shared, then attend by the plan.

        Each token attends to the entries up to its own; the plan knows the windows. q → out, both
        [T, Q, D]. In a pool of latents v [T, 1, V] is a part of k, and out is [T, Q, V].
        """
        ...

    def prefill(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        rule: AttentionRule,
        expansion: Expansion | None,
    ) -> Tensor:
        """Store whole rows after their pasts unless shared; then attend to past and row, causally.

        q [T, Q, D], k and v [T', H, D] → out [T, Q, D]. A pool of latents needs `expansion`: then q
        [T, Q, D'] are queries of its keys, and out is [T, Q, V'], as its values are. Returns out,
        or where that saves a copy another tensor that replaces it.
        """
        ...

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """Store the `kept` entries of each of N prefill rows after its past, the `first` in front.

        Both parts keep their order. `rows` have one length C and lie end to end: k, v [N · C, H,
        D].
        """
        ...

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """[H, count, D]: the oldest keys of prefill row `row`."""
        ...


class PoolKernels(Protocol):
    """The attention kernels of one `KvPool`."""

    @property
    def fused_scores(self) -> Mapping[str, Callable[..., Tensor]]:
        """Kernels of scorers, by name: their `kernel_inputs` → float32 [N, H, C]."""
        ...

    def width(self, tokens: int, queries: int) -> int:
        """The number of tokens of a pass that decodes `tokens`; the excess is padding.

        A row has up to `queries` of them.
        """
        ...

    def plan(self, batch: Decoding) -> tuple[WorkPlan, str]:
        """A plan for `batch`, whose lengths may grow, and the name of its planner.

        With several queries a row they may also shrink again, by refused drafts.
        """
        ...

    def launch(self, addresses: PassAddresses, tables: Tensor) -> Launch:
        """Bring the attention of a pass to the device.

        `tables` are the flat block tables, int32 on the pool's device. The contents of a padded
        pass after its row's tokens are padding.
        """
        ...

    def rehearse(self, addresses: PassAddresses, tables: Tensor) -> Iterator[Launch]:
        """Launches of a pass, one after the other, that together run all decode kernels."""
        ...

    def reserve(self, rows: DecodedRows) -> None:
        """Keep buffers for passes of as many rows, with one token each, of any lengths.

        Later launches of the same width, whose rows share nothing, use these buffers: a graph that
        was captured over one of them replays all. Raises `ConfigError` if `rows` share something.
        """
        ...


# Chooses the kernels of a pool.
KernelChoice = Callable[[KvPool], PoolKernels]
