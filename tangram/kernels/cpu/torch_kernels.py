"""Attention without Triton.

Decode and prefill are compiled where `compiled_attention.py` can, and the torch specification
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tangram.kernels import latents, reference
from tangram.kernels.cpu import compiled_attention
from tangram.kernels.cpu.waiting import WaitPolicy
from tangram.kernels.interface import (
    AttentionRule,
    DecodedRows,
    Expansion,
    KvPool,
    PassAddresses,
    Ranking,
)
from tangram.plan.cost import CostModel
from tangram.plan.form import WorkPlan
from tangram.plan.records import as_words
from tangram.plan.rehearsal import rehearse_planning
from tangram.plan.schedule import Decoding, Schedule, plan_by_budgets, plan_shared
from tangram.types import Int32

# Plans are made for so many workers, whatever the number of threads: how a sum is split decides its
# last bit, and an answer must not depend on the threads that computed it (docs/cpu.md).
WORKERS = 4
GRAIN = {"tasks_per_worker": 4, "min_tokens": 128, "tile_tokens": 128}
BY_BUDGETS = Schedule("aot", plan_by_budgets, GRAIN, ctas=1)
# Rows that share pages read these together.
SHARING = Schedule("packing:thrifty", plan_shared, GRAIN, ctas=1)
# Decodes q [T, Q, D], k and v into out [T, Q, V], all of the decode rows, in one `layer`.
LoadedDecode = Callable[..., object]
NOTHING_FUSED: Mapping[str, Callable[..., Tensor]] = MappingProxyType({})


class TorchKernels:
    """`PoolKernels` for any device and dtype.

    Every batch is decoded by `schedule`. None splits by budgets, and where rows share pages, packs
    them. Without `compiled` everything runs as `reference.py` specifies, on a CPU, too.
    """

    fused_scores = NOTHING_FUSED

    def __init__(
        self, pool: KvPool, schedule: Schedule | None = None, *, compiled: bool = True
    ) -> None:
        self._pool, self._schedule, self._waiting = pool, schedule, WaitPolicy()
        # By queries of a row: the last plan, and what compiled code reads of it.
        self._plans: dict[int, tuple[WorkPlan, compiled_attention.CpuPlan]] = {}
        rehearse_planning()
        self._compiled = compiled and compiled_attention.runs_compiled(pool.entries)
        if self._compiled:
            compiled_attention.warm_up(pool.entries.dtype)

    def width(self, tokens: int, queries: int) -> int:
        """See `PoolKernels`: always `tokens`."""
        return tokens

    def plan(self, batch: Decoding) -> tuple[WorkPlan, str]:
        """See `PoolKernels`: the same plan for any number of threads."""
        schedule = self._schedule or (SHARING if batch.forest.nodes else BY_BUDGETS)
        return schedule.plan(batch, WORKERS, CostModel()), schedule.kind

    def launch(self, addresses: PassAddresses, tables: Tensor) -> TorchLaunch:
        """See `PoolKernels`. No pass is padded."""
        self._waiting.adjust()
        decoding = self._load(addresses, tables)
        return TorchLaunch(self._pool, addresses, tables, decoding, self._compiled)

    def rehearse(self, addresses: PassAddresses, tables: Tensor) -> Iterator[TorchLaunch]:
        """See `PoolKernels`: nothing is compiled."""
        return iter(())

    def _load(self, addresses: PassAddresses, tables: Tensor) -> LoadedDecode | None:
        decode = addresses.decode
        if decode is None:
            return None
        entries = self._pool.entries
        where = entries, tables, torch.tensor(addresses.lengths, device=entries.device).view(-1)
        if self._compiled:
            first = np.append(0, np.cumsum(decode.counts, dtype=np.int64))
            rows = compiled_attention.DecodePass(*where, first)
            return partial(rows.run, plan=self._find_plan(decode))
        plan, counts, address = decode.plan, decode.counts, decode.batch.rows.address

        def by_reference(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, layer: int, rule: AttentionRule
        ) -> None:
            heads, width = address[layer], v.shape[-1]
            places = heads["table"], heads["column"], heads["length_index"]
            reference.append(k, v, *where, *places, counts)
            out.copy_(
                reference.decode(q, *where, plan, layer, rule, counts=counts, value_dim=width)
            )

        return by_reference

    def _find_plan(self, decode: DecodedRows) -> compiled_attention.CpuPlan:
        queries = decode.batch.queries
        known, plan = self._plans.get(queries, (None, None))
        if plan is None or known is not decode.plan:
            plan = compiled_attention.CpuPlan.build(decode.plan, decode.batch.rows)
            self._plans[queries] = decode.plan, plan
        return plan


@dataclass(frozen=True, eq=False)
class TorchLaunch:
    """`Launch` of the pass at `addresses`; `decoding` computes its decode rows in one layer.

    Prefill is `compiled` where it can be.
    """

    pool: KvPool
    addresses: PassAddresses
    tables: Tensor
    decoding: LoadedDecode | None
    compiled: bool
    padded_tokens = None
    captured = None

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule
    ) -> None:
        """See `Launch`."""
        tokens = self.addresses.width
        if self.decoding is None:
            return
        found, q, k, v = out[:tokens], q[:tokens], k[:tokens], v[:tokens]
        narrow = self.pool.scales is not None and out.dtype is not torch.float32
        if narrow:  # products with scales are not rounded to 16 bits
            found, q, k, v = found.float(), q.float(), k.float(), v.float()
        q, k, v = self._fold(layer, q, k, v)
        self.decoding(q, k, v, found, layer=layer, rule=rule)
        self._unfold(layer, found)
        if narrow:
            out[:tokens] = found

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
        """See `Launch`."""
        known, pool = self.addresses.prefill, self.pool.entries
        rows = range(known.asking.start, known.asking.stop)
        if not rows:
            return out
        spans = known.spans
        for row in rows:
            if known.whole[layer, row]:
                stored = slice(int(spans["key_begin"][row]), int(spans["key_end"][row]))
                keys, values = self._divide(layer, k[stored].float(), v[stored].float())
                self._store(layer, row, keys.transpose(0, 1), values.transpose(0, 1))
        q, k, v = self._fold(layer, q, k, v)
        where = pool, self.tables
        compiled = (
            self.compiled and expansion is None and compiled_attention.prefills_compiled(q, pool)
        )
        if compiled:
            asking = known.asking
            addresses, asked_spans = as_words(known.address[layer, asking]), as_words(spans[asking])
            compiled_attention.prefill(q, k, v, out, *where, addresses, asked_spans, rule)
        for row in rows:
            begin, end, first, last, position = spans[row].tolist()
            asked, keys = q[begin:end], k[first:last]
            if expansion is not None:
                (address,) = known.address[layer, row].tolist()
                out[begin:end] = latents.prefill(
                    asked,
                    keys[:, 0],
                    *where,
                    address,
                    expand=expansion.expand,
                    scaling=rule.scaling,
                )
                continue
            if not compiled:
                out[begin:end] = reference.prefill(
                    asked,
                    keys,
                    v[first:last],
                    *where,
                    self._find_address(layer, row),
                    rule,
                    past_tokens=position,
                )
            self._unfold(layer, out[begin:end])
        return out

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """See `Launch`."""
        count, known, chosen = rows.stop - rows.start, self.addresses.prefill, self.pool.chosen
        for chunk, parts in enumerate(zip(k.chunk(count), v.chunk(count), strict=True)):
            row = rows.start + chunk
            first, kept = known.first[layer, row], known.kept[layer, row]
            places = ranking.places(chunk, int(known.spans["position"][row]), first, kept)
            if chosen is not None:
                _note_first(chosen[row, layer], places, first)
            divided = self._divide(layer, *(x.float() for x in parts))
            keys, values = ([x[:, head][at] for head, at in enumerate(places)] for x in divided)
            self._store(layer, row, keys, values)

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """See `Launch`."""
        table, column, _ = self._find_address(layer, row)
        keys = reference.first_keys(self.pool.entries, self.tables, table, column, count)
        scales = self.pool.scales
        return keys if scales is None else keys.float() * scales[layer, :, :1, None]

    def _fold(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [T, H, D] as the pool holds them; queries [T, Q, D] that fit these keys.

        Attention of the three is that of those given, divided by the scales of the values.
        """
        if self.pool.scales is None:
            return q, k, v
        keys = self.pool.scales[layer, :, :1].to(q.dtype)
        return q * self._by_query(keys, q), *self._divide(layer, k, v)

    def _divide(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, H, D] divided by their scales. In float32 they are what is stored."""
        if self.pool.scales is None:
            return k, v
        keys, values = self.pool.scales[layer].to(k.dtype)[..., None].unbind(1)
        return k / keys, v / values

    def _unfold(self, layer: int, out: Tensor) -> None:
        """Attention [T, Q, D] of what `_fold` gave becomes that of what it took."""
        if self.pool.scales is not None:
            out *= self._by_query(self.pool.scales[layer, :, 1:].to(out.dtype), out)

    @staticmethod
    def _by_query(scales: Tensor, queries: Tensor) -> Tensor:
        """`scales` [H, 1] for each query head of `queries` [T, Q, D]."""
        return scales.repeat_interleave(queries.shape[1] // len(scales), 0)

    def _store(
        self, layer: int, row: int, k: Tensor | list[Tensor], v: Tensor | list[Tensor]
    ) -> None:
        reference.store(k, v, self.pool.entries, self.tables, *self._find_address(layer, row))

    def _find_address(self, layer: int, row: int) -> tuple[Int32, Int32, Int32]:
        heads = self.addresses.prefill.address[layer, row]
        return heads["table"], heads["column"], heads["length"]


def _note_first(mask: Tensor, places: list[Tensor], first: Int32) -> None:
    """Write 1 into `mask` [H, C] at the first places of each head, 0 at the others."""
    mask.zero_()
    for head, order in enumerate(places):
        mask[head, order[: first[head]]] = 1
