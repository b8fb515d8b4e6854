"""The reference backend: attention as `reference.py` specifies it, on any device in any dtype.

It computes what has failed elsewhere (`tangram replay`), and serves where no other backend does: on
a CPU pools in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tangram.kernels import latents, reference
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
NOTHING_FUSED: Mapping[str, Callable[..., Tensor]] = MappingProxyType({})


class ReferenceKernels:
    """`PoolKernels` for any device and dtype.

    Every batch is decoded by `schedule`. None splits by budgets, and where rows share pages, packs
    them.
    """

    fused_scores = NOTHING_FUSED

    def __init__(self, pool: KvPool, schedule: Schedule | None = None) -> None:
        self.pool, self._schedule = pool, schedule
        rehearse_planning()

    def width(self, tokens: int, queries: int) -> int:
        """See `PoolKernels`: always `tokens`."""
        return tokens

    def plan(self, batch: Decoding) -> tuple[WorkPlan, str]:
        """See `PoolKernels`: the same plan for any number of threads."""
        schedule = self._schedule or (SHARING if batch.forest.nodes else BY_BUDGETS)
        return schedule.plan(batch, WORKERS, CostModel()), schedule.kind

    def launch(self, addresses: PassAddresses, tables: Tensor) -> ReferenceLaunch:
        """See `PoolKernels`. No pass is padded."""
        return ReferenceLaunch(self.pool, addresses, tables)

    def rehearse(self, addresses: PassAddresses, tables: Tensor) -> Iterator[ReferenceLaunch]:
        """See `PoolKernels`: nothing is compiled."""
        return iter(())

    def reserve(self, rows: DecodedRows) -> None:
        """See `PoolKernels`: there are no buffers, and no graphs."""


@dataclass(frozen=True, eq=False)
class ReferenceLaunch:
    """`Launch` of the pass at `addresses`, over the block `tables`."""

    pool: KvPool
    addresses: PassAddresses
    tables: Tensor
    shape = None

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule
    ) -> None:
        """See `Launch`."""
        rows = self.addresses.decode
        if rows is None:
            return
        tokens = rows.tokens
        if tokens < rows.width:  # planned for other kernels, as a pass that is replayed
            out[tokens : rows.width] = 0
        found, q, k, v = (x[:tokens] for x in (out, q, k, v))
        narrow = self.pool.scales is not None and out.dtype is not torch.float32
        if narrow:  # products with scales are not rounded to 16 bits
            found, q, k, v = found.float(), q.float(), k.float(), v.float()
        q, k, v = self._fold(layer, q, k, v)
        self._run_plan(rows, layer, rule, q, k, v, found)
        self._unfold(layer, found)
        if narrow:
            out[:tokens] = found

    def _run_plan(self, rows: DecodedRows, layer: int, rule: AttentionRule, *x: Tensor) -> None:
        """Append the tokens k and v of `rows`, then decode: `x` are q, k, v and out of a layer."""
        q, k, v, out = x
        lengths = torch.tensor(self.addresses.lengths, device=q.device).view(-1)
        pages, heads = (self.pool.entries, self.tables, lengths), rows.address[layer]
        places = heads["table"], heads["column"], heads["length_index"]
        if not rule.shared:
            reference.append(k, v, *pages, *places, rows.counts)
        how, value_dim = (rows.plan, layer, rule), v.shape[-1]
        out.copy_(reference.decode(q, *pages, *how, counts=rows.counts, value_dim=value_dim))

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
        known, asking = self.addresses.prefill, self._asking
        for row in asking:
            if known.whole[layer, row] and not rule.shared:
                _, _, first, last, _ = known.spans[row].tolist()
                keys, values = self._divide(layer, k[first:last].float(), v[first:last].float())
                self._store(layer, row, keys.transpose(0, 1), values.transpose(0, 1))
        if expansion is not None:
            latents.prefill_rows(
                q, k[:, 0], out, self.pool.entries, self.tables, known, layer, expansion, rule
            )
        elif asking:
            self._attend(layer, rule, *self._fold(layer, q, k, v), out)
            spans = known.spans[known.asking]
            self._unfold(layer, out[spans["query_begin"][0] : spans["query_end"][-1]])
        return out

    @property
    def _asking(self) -> range:
        asking = self.addresses.prefill.asking
        return range(asking.start, asking.stop)

    def _attend(self, layer: int, rule: AttentionRule, *x: Tensor) -> None:
        """Attend from all asking rows to their pasts and themselves; `x` as in `_run_plan`."""
        q, k, v, out = x
        pages, spans = (self.pool.entries, self.tables), self.addresses.prefill.spans
        for row in self._asking:
            begin, end, first, last, past = spans[row].tolist()
            new, place = (k[first:last], v[first:last]), self._find_address(layer, row)
            out[begin:end] = reference.prefill(
                q[begin:end], *new, *pages, place, rule, past_tokens=past
            )

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
