"""The device memory of decode launches: plans, addresses and lengths at places that graphs know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tangram.errors import ConfigError, IntegrityError
from tangram.kernels.interface import DecodedRows, PassShape
from tangram.kernels.transfer import stage
from tangram.kernels.triton.decode_launch import FEW_PARTS, MANY_PARTS, GpuDecode, PlanBuffers
from tangram.kernels.triton.packed import Capacity, DecodeOptions
from tangram.kernels.triton.stored import StoredPool
from tangram.plan.records import ADDRESS, Records, as_words
from tangram.types import Int32


@dataclass(frozen=True)
class DecodeShape(PassShape):
    """The shape of a pass whose rows decode up to `queries` tokens each.

    Tasks of `tile_tokens` serve one row each, or if `shared` several.
    """

    queries: int
    tile_tokens: int
    shared: bool


@dataclass(frozen=True, eq=False)
class LoadedRows:
    """The decode rows of a pass of `shape` on the device.

    `decoder` has their plan. `address` int32 [L, R, H, 3] is that of `DecodeRows`, `lengths` int32
    [slots · groups + 1] those of the pass, and a 0 for rows beyond the batch. `first_tokens` int32
    [R + 1] says where the tokens of each row begin; None means one a row.
    """

    shape: DecodeShape
    decoder: GpuDecode
    address: Tensor
    lengths: Tensor
    first_tokens: Tensor | None


class DecodeBuffers:
    """Loads the decode rows of passes over `pool`, one pass at a time.

    `group` is G. Every plan runs by `options`.
    """

    def __init__(self, pool: StoredPool, group: int, options: DecodeOptions) -> None:
        self._pool, self._group, self._options = pool, group, options
        self._device = pool.entries.device
        self._plans = PlanBuffers(self._device)
        # By rows, and what their shape has but its tokens, which drafts change from step to step.
        self._decoders: dict[tuple[int, int, int, bool], GpuDecode] = {}
        self._reserved = set[tuple[int, int, int, bool]]()
        self._addresses: dict[int, tuple[Records, Tensor]] = {}  # by rows: whose, and where
        self._first_tokens: dict[int, Tensor] = {}
        self._lengths: Tensor | None = None

    def load(self, decode: DecodedRows, lengths: Int32) -> LoadedRows:
        """The rows of `decode` at `lengths`. The plan replaces the last, if it fits.

        Each number of queries has its own kernels.
        """
        rows, plan = _count_rows(decode, len(lengths)), decode.plan
        place = rows, decode.queries, plan.tile_tokens, plan.shares_rows
        known = self._decoders.get(place)
        if known is None or not known.takes(plan, decode.lengths):
            if place in self._reserved:
                raise IntegrityError(f"a plan of {rows} rows does not fit what is reserved for all")
            least = None if known is None else known.capacity
            if plan.shares_rows and least is None:
                least = self._sharing(decode, rows)
            needed = self._capacity(decode, self._options).with_slack(least)
            known = self._decoders[place] = self._decoder(decode, self._options, needed)
        return self._load(known, decode, lengths)

    def reserve(self, decode: DecodedRows, most_tasks: int) -> None:
        """See `PoolKernels`: a layer has up to `most_tasks` tasks. Raises `ConfigError`."""
        plan = decode.plan
        if plan.shares_rows or decode.queries > 1:
            raise ConfigError("only rows of one token that share nothing have reserved buffers")
        options, cells = self._options.of_rows(1), decode.width * plan.kv_heads
        needed = self._capacity(decode, options).sharing(options, self._group, 1, most_tasks)
        capacity = needed.holding(plan.layers, most_tasks, cells)
        place = decode.width, 1, plan.tile_tokens, False
        self._decoders[place] = self._decoder(decode, options, capacity)
        self._reserved.add(place)

    def rehearse(self, decode: DecodedRows, lengths: Int32) -> Iterator[LoadedRows]:
        """The rows of `decode`, by plans that together launch all decode kernels."""
        apart = replace(self._options, merge="kernel")
        for options, parts in (
            (self._options, FEW_PARTS[0]),
            *((apart, parts) for parts in (*FEW_PARTS[1:], MANY_PARTS)),
        ):
            needed = self._capacity(decode, options)
            launched = needed.with_slack(needed.launching_all(options, parts))
            decoder = self._decoder(decode, options, launched)
            yield self._load(decoder, decode, lengths)

    def _load(self, decoder: GpuDecode, decode: DecodedRows, lengths: Int32) -> LoadedRows:
        rows, plan = _count_rows(decode, len(lengths)), decode.plan
        kind = decode.width, decode.queries, plan.tile_tokens, plan.shares_rows
        shape = DecodeShape(*kind, room=decoder.capacity)
        address = self._load_address(decode.address, lengths.size, rows)
        first = self._load_first_tokens(decode.counts, rows) if shape.queries > 1 else None
        return LoadedRows(shape, decoder, address, self._load_lengths(lengths), first)

    def _capacity(self, decode: DecodedRows, options: DecodeOptions) -> Capacity:
        rows = self._group * decode.queries, options.of_rows(decode.queries)
        return Capacity.for_plan(decode.plan, *rows, decode.lengths)

    def _sharing(self, decode: DecodedRows, rows: int) -> Capacity:
        """Capacity for plans of as many rows that share other prefixes: few need a new graph.

        In them other rows may have parts that only a merge finishes, so there is space for all.
        """
        queries, processors = decode.queries, self._pool.card.processors
        options, group = self._options.of_rows(queries), self._group * queries
        needed = self._capacity(decode, replace(options, merge="kernel"))
        return needed.doubled.doubled.sharing(options, group, rows, processors)

    def _decoder(
        self, decode: DecodedRows, options: DecodeOptions, capacity: Capacity
    ) -> GpuDecode:
        return GpuDecode(
            decode.plan,
            self._pool,
            self._group,
            lengths=decode.lengths,
            options=options,
            capacity=capacity,
            queries=decode.queries,
            buffers=self._plans,
        )

    def _load_address(self, address: Records, nowhere: int, width: int) -> Tensor:
        """[L, width, H, 3]: the words of `ADDRESS` of each head.

        Rows beyond the batch have length 0.
        """
        known = self._addresses.get(width)
        if known is not None and known[0] is address:
            return known[1]
        layers, count, heads = address.shape
        words = as_words(address)
        if width > count:
            padded = np.zeros((layers, width, heads), ADDRESS)
            padded[:, count:]["length_index"] = nowhere
            as_words(padded)[:, :count] = words
            words = as_words(padded)
        target = self._make(words.shape) if known is None else known[1]
        self._addresses[width] = address, self._copy(words, target)
        return target

    def _load_lengths(self, lengths: Int32) -> Tensor:
        if self._lengths is None:
            self._lengths = self._make((lengths.size + 1,))
        return self._copy(np.append(lengths, np.int32(0)), self._lengths)

    def _load_first_tokens(self, counts: Int32, rows: int) -> Tensor:
        """Where the tokens of each row begin; rows beyond the batch have none."""
        if rows not in self._first_tokens:
            self._first_tokens[rows] = self._make((rows + 1,))
        first = np.full(rows + 1, counts.sum(), np.int32)
        first[0] = 0
        first[1 : len(counts) + 1] = np.cumsum(counts)
        return self._copy(first, self._first_tokens[rows])

    def _make(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)

    def _copy(self, array: Int32, target: Tensor) -> Tensor:
        return target.copy_(stage(array, target.device), non_blocking=True)


def _count_rows(decode: DecodedRows, slots: int) -> int:
    """The most rows of a pass of its width: those with several tokens are fewer."""
    return decode.width if decode.queries == 1 else min(decode.width, slots)
