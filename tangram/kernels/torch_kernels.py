"""Attention without Triton.

Decode and prefill are compiled where `cpu.py` can, the torch specification otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tangram.errors import ConfigError
from tangram.kernels import cpu, latents, reference
from tangram.kernels.interface import Expansion, PaddedShape, PrefillRows, Ranking
from tangram.kernels.narrow import NARROW
from tangram.kernels.transfer import advance
from tangram.kernels.waiting import WaitPolicy
from tangram.plan.cost import CostModel
from tangram.plan.rehearsal import rehearse_planning
from tangram.plan.schedule import ONE_TILE, Decoding, Schedule
from tangram.types import Int32, Int64

# Plans are made for so many workers, whatever the number of threads: how a sum is split decides its
# last bit, and an answer must not depend on the threads that computed it (docs/cpu.md).
WORKERS = 4
BY_BUDGETS = "aot+ctas=1+tasks=4+min=128+tile=128"
# Rows that share pages read these together.
SHARING = "packing:thrifty+ctas=1+tasks=4+tile=128"
NOTHING_FUSED: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})


class TorchKernels:
    """`PoolKernels` for any device and dtype.

    Every batch is decoded by `schedule`. None splits by budgets, and where rows share pages, packs
    them. Raises `ConfigError` if the schedule has options that only the GPU's kernels support.
    """

    fused_scores = NOTHING_FUSED
    fused_gate = None
    captured = None
    _plan: cpu.CpuPlan
    _rows: PrefillRows
    _tables: Tensor
    _lengths: Tensor
    _shape: tuple[int, ...]
    _first_tokens: Int64
    _pass: cpu.DecodePass | None = None
    _mask: Tensor | None = None
    _scales: Tensor | None = None

    def __init__(self, pool: Tensor, schedule: Schedule | None = None) -> None:
        self._pool, self._width, self._waiting = pool, 0, WaitPolicy()
        self._schedule = schedule
        self._plans = WeakKeyDictionary[Decoding, tuple[cpu.CpuPlan, str]]()
        given = set() if schedule is None else set(schedule.numbers)
        if schedule is not None and schedule.one_tile:
            given.add(ONE_TILE)
        if schedule is not None and (foreign := sorted(given - {*schedule.planner.numbers})):
            raise ConfigError(
                f"the schedule is {schedule.text!r}: +{foreign[0]} is an option of "
                f"the GPU's kernels, leave it out on {pool.device.type}"
            )
        rehearse_planning()
        if cpu.runs_compiled(pool):
            cpu.warm_up(pool.dtype)

    def width(self, tokens: int, queries: int) -> int:
        """See `PoolKernels`: always `tokens`."""
        return tokens

    def load(self, batch: Decoding, width: int) -> str:
        """See `PoolKernels`: the same plan for any number of threads."""
        if batch not in self._plans:
            schedule = self._schedule
            if schedule is None:
                schedule = Schedule.parse(SHARING if batch.forest.nodes else BY_BUDGETS)
            plan = schedule.plan(batch, WORKERS, CostModel())
            self._plans[batch] = cpu.CpuPlan.build(plan, batch.rows), schedule.kind
        self._plan, kind = self._plans[batch]
        return kind

    def rehearsals(self, batch: Decoding, width: int) -> Iterator[None]:
        """See `PoolKernels`: nothing is compiled."""
        return iter(())

    def begin(
        self, tables: Tensor, lengths: Int32, width: int, counts: Int32, prefill: PrefillRows
    ) -> None:
        """See `PoolKernels`."""
        self._waiting.adjust()
        self._tables, self._width, self._rows = tables, width, prefill
        self._first_tokens = np.append(0, np.cumsum(counts, dtype=np.int64))
        self._shape = lengths.shape
        self._lengths = torch.tensor(lengths, device=self._pool.device).view(-1)
        if cpu.runs_compiled(self._pool):
            self._pass = cpu.DecodePass(self._pool, tables, self._lengths, self._first_tokens)

    def advance(self, slots: Tensor, growth: Tensor) -> None:
        """See `PoolKernels`."""
        advance(self._lengths.view(self._shape), slots, growth)

    def begin_row(self, tables: Tensor, row: PrefillRows, shape: PaddedShape) -> bool:
        """See `PoolKernels`: nothing is launched."""
        return False

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
        """See `PoolKernels`."""
        tokens = self._width
        if not tokens:
            return
        own, q, k, v = out[:tokens], q[:tokens], k[:tokens], v[:tokens]
        rule = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
        narrow = self._scales is not None and out.dtype is not torch.float32
        if narrow:  # products with scales are not rounded to 16 bits
            own, q, k, v = own.float(), q.float(), k.float(), v.float()
        folded = self._fold(layer, q, k, v)
        if self._pass is not None:
            self._pass.run(*folded, own, self._plan, layer, **rule)  # type: ignore[arg-type]
        else:
            where = self._pool, self._tables, self._lengths, self._plan, layer
            own[:] = cpu.decode_step(*folded, *where, first_tokens=self._first_tokens, **rule)  # type: ignore[arg-type]
        self._unfold(layer, own)
        if narrow:
            out[:tokens] = own

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
        expansion: Expansion | None,
    ) -> None:
        """See `PoolKernels`."""
        rows = range(self._rows.asking.start, self._rows.asking.stop)
        if not rows:
            return
        spans = self._rows.spans
        for row in rows:
            if self._rows.whole[layer, row]:
                own = slice(*spans[row, 2:4].tolist())
                keys, values = self._divide(layer, k[own].float(), v[own].float())
                self._store(layer, row, keys.transpose(0, 1), values.transpose(0, 1))
        q, k, v = self._fold(layer, q, k, v)
        where = self._pool, self._tables
        rule = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}
        compiled = expansion is None and cpu.prefills_compiled(q, self._pool)
        if compiled:
            asking = self._rows.asking
            addresses = self._rows.address[layer, asking]
            cpu.prefill(q, k, v, out, *where, addresses, spans[asking], **rule)  # type: ignore[arg-type]
        for row in rows:
            begin, end, first, last, position = spans[row].tolist()
            asked, keys = q[begin:end], k[first:last]
            if expansion is not None:
                (address,) = self._rows.address[layer, row].tolist()
                out[begin:end] = latents.prefill(
                    asked, keys[:, 0], *where, address, expand=expansion.expand, scaling=scaling
                )
                continue
            if not compiled:
                out[begin:end] = reference.prefill(
                    asked,
                    keys,
                    v[first:last],
                    *where,
                    *self._find_address(layer, row),
                    past_tokens=position,
                    **rule,  # type: ignore[arg-type]
                )
            self._unfold(layer, out[begin:end])

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """See `PoolKernels`."""
        count = rows.stop - rows.start
        for chunk, parts in enumerate(zip(k.chunk(count), v.chunk(count), strict=True)):
            row = rows.start + chunk
            first, kept = self._rows.first[layer, row], self._rows.kept[layer, row]
            places = ranking.places(chunk, int(self._rows.spans[row, 4]), first, kept)
            if self._mask is not None:
                _note_first(self._mask[row, layer], places, first)
            divided = self._divide(layer, *(x.float() for x in parts))
            keys, values = ([x[:, head][own] for head, own in enumerate(places)] for x in divided)
            self._store(layer, row, keys, values)

    def record(self, mask: Tensor) -> None:
        """See `PoolKernels`."""
        self._mask = mask

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """See `PoolKernels`."""
        table, column, _ = self._find_address(layer, row)
        keys = reference.first_keys(self._pool, self._tables, table, column, count)
        return keys if self._scales is None else keys.float() * self._scales[layer, :, :1, None]

    def adopt_scales(self, scales: Tensor) -> None:
        """See `PoolKernels`."""
        if self._pool.dtype in NARROW.values():
            self._scales = scales

    def _fold(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [T, H, D] as the pool holds them; queries [T, Q, D] that fit these keys.

        Attention of the three is that of the given ones divided by the scales of the values.
        """
        if self._scales is None:
            return q, k, v
        keys = self._scales[layer, :, :1].to(q.dtype)
        return q * self._by_query(keys, q), *self._divide(layer, k, v)

    def _divide(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, H, D] divided by their scales. In float32 they are what is stored."""
        if self._scales is None:
            return k, v
        keys, values = self._scales[layer].to(k.dtype)[..., None].unbind(1)
        return k / keys, v / values

    def _unfold(self, layer: int, out: Tensor) -> None:
        """Attention [T, Q, D] of what `_fold` gave becomes that of what it took."""
        if self._scales is not None:
            out *= self._by_query(self._scales[layer, :, 1:].to(out.dtype), out)

    @staticmethod
    def _by_query(scales: Tensor, queries: Tensor) -> Tensor:
        """`scales` [H, 1] for each query head of `queries` [T, Q, D]."""
        return scales.repeat_interleave(queries.shape[1] // len(scales), 0)

    def _store(
        self, layer: int, row: int, k: Tensor | list[Tensor], v: Tensor | list[Tensor]
    ) -> None:
        reference.store(k, v, self._pool, self._tables, *self._find_address(layer, row))

    def _find_address(self, layer: int, row: int) -> tuple[Int32, Int32, Int32]:
        table, column, past = self._rows.address[layer, row].T
        return table, column, past


def _note_first(mask: Tensor, places: list[Tensor], first: Int32) -> None:
    """Write 1 into `mask` [H, C] at the first places of each head, 0 at the others."""
    mask.zero_()
    for head, own in enumerate(places):
        mask[head, own[: first[head]]] = 1
