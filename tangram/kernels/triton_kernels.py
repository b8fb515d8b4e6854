"""Attention by the Triton kernels, for pools on the GPU.

In Triton's interpreter pools are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tangram.kernels import (
    expanded,
    fused_causal,
    gate,
    gathered,
    keydiff,
    latents,
    prefill,
    reference,
    store,
)
from tangram.kernels.card import Card
from tangram.kernels.card_cost import count_programs, estimate_cost
from tangram.kernels.e4m3 import address
from tangram.kernels.gpu import FEW_PARTS, MANY_PARTS, GpuDecode, PlanBuffers
from tangram.kernels.interface import MOST_BYTES, Expansion, PaddedShape, PrefillRows, Ranking
from tangram.kernels.packed import Capacity, DecodeOptions, pack, rehearse_packing
from tangram.kernels.padded import RowBuffers
from tangram.kernels.torch_kernels import NOTHING_FUSED
from tangram.kernels.transfer import advance, stage, upload
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.policy import Policy, StepLoad
from tangram.plan.schedule import Decoding, Schedule
from tangram.types import Int32

FUSED_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"keydiff": keydiff.score}
)
# (most tokens, step): the width of a pass is rounded up to a multiple of the step.
WIDTHS = ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (1 << 30, 64))
# The same where rows have drafts, so that their number changes from step to step.
DRAFT_WIDTHS = ((4, 4), (16, 8), (64, 16), (128, 32), (256, 64), (1 << 30, 128))
# Without a policy: a work queue that reads shared prefixes once where that saves enough.
UNMEASURED = "packing:thrifty"


class TritonKernels:
    """`PoolKernels` of float32, bfloat16, float16 and FP8 pools; `group` is G.

    `schedule` is that of every batch. Without one `policy` chooses; without that all batches have
    one default. `begin` uploads the kernels' inputs once; layers only launch. `card` None is the
    pool's own.
    """

    _decoder: GpuDecode
    _decode_address: Tensor
    _lengths: Tensor
    _shape: tuple[int, ...]
    _rows: PrefillRows
    _cells: gathered.PrefillOrder
    _runs: list[fused_causal.CausalRun]
    _tables: Tensor
    _begun: GpuDecode | RowBuffers | None
    _mask: Tensor | None = None

    def __init__(
        self,
        pool: Tensor,
        group: int,
        policy: Policy | None = None,
        schedule: Schedule | None = None,
        card: Card | None = None,
    ) -> None:
        self._card = card or Card.of(pool.device)
        self._stored, self._pool, self._dtype = pool, address(pool, self._card), pool.dtype
        self._latent = pool.shape[2] == 1
        self.fused_scores = NOTHING_FUSED if self._latent else FUSED_SCORES
        self.fused_gate = gate.score
        self._group, self._policy, self._width = group, policy, 0
        self._fixed = None if schedule is None else (schedule, DecodeOptions.of(schedule))
        self._schedules = dict[str, tuple[Schedule, DecodeOptions]]()
        device = pool.device
        self._cost = estimate_cost(pool, group, self._card) if policy is None else policy.cost
        self._programs = count_programs(pool, group, self._card)
        # By rows, options, queries of a row, and whether tasks serve several rows.
        self._decoders: dict[tuple[int, DecodeOptions, int, bool], GpuDecode] = {}
        # Drafts change the width in every step, and with it the loaded plan.
        self._plans = WeakKeyDictionary[Decoding, tuple[WorkPlan, DecodeOptions, str]]()
        self._buffers = PlanBuffers(device)
        self._addresses: dict[int, Tensor] = {}
        self._addressed: dict[int, DecodeRows] = {}  # whose they are
        self._first_tokens: dict[int, Tensor] = {}
        self._queries = 1
        self._decodes_alone = False  # whether the rows of the last pass were decode rows only
        self._padded: dict[Hashable, RowBuffers] = {}
        self._scales: Tensor | None = None
        self._gathers, self._fuses = (
            not self._latent and gathered.serves(pool, self._card),
            not self._latent and fused_causal.serves(pool, self._card),
        )
        self._copies, self._long_copies = list[Tensor](), list[Tensor]()
        rehearse_packing()

    def width(self, tokens: int, queries: int) -> int:
        """See `PoolKernels`: few widths, so that few graphs serve all batches."""
        widths = WIDTHS if queries == 1 else DRAFT_WIDTHS
        step = next(step for most, step in widths if tokens <= most)
        return -(-tokens // step) * step

    @property
    def captured(self) -> object | None:
        """See `PoolKernels`: the buffers of the loaded plan, or those of the row."""
        return self._begun if self._pool.is_cuda else None

    def load(self, batch: Decoding, width: int) -> str:
        """See `PoolKernels`. The plan replaces the last one of as many rows, if it fits.

        Each number of queries has its own kernels.
        """
        self._scale(*batch.rows.shape[1:])
        if batch not in self._plans:
            schedule, options = self._schedule(batch)
            plan = self._make_plan(schedule, batch)
            self._plans[batch] = plan, options, schedule.kind
        plan, options, kind = self._plans[batch]
        rows = _count_rows(batch, width)
        shares = bool((plan.row_end - plan.row_begin > 1).any())
        place = rows, options, batch.queries, shares
        known = self._decoders.get(place)
        if known is None or not known.takes(plan, batch.lengths):
            least = None if known is None else known.capacity
            if shares and least is None:
                least = self._sharing(plan, batch, options, rows)
            known = self._decoders[place] = self._executing(plan, batch, options, least)
        self._adopt_decoder(known, batch, rows)
        return kind

    def _make_plan(self, schedule: Schedule, batch: Decoding) -> WorkPlan:
        return schedule.plan(batch, self._card.processors, self._cost, self._programs)

    def _adopt_decoder(self, decoder: GpuDecode, batch: Decoding, rows: int) -> None:
        self._decoder, self._queries = decoder, batch.queries
        self._decode_address = self._pack_addresses(batch.rows, len(batch.lengths), rows)

    def rehearsals(self, batch: Decoding, width: int) -> Iterator[None]:
        """See `PoolKernels`."""
        self._scale(*batch.rows.shape[1:])
        schedule, options = self._schedule(batch)
        plan = self._make_plan(schedule, batch)
        apart = replace(options, merge="kernel")
        for one, parts in (
            (options, FEW_PARTS[0]),
            *((apart, parts) for parts in (*FEW_PARTS[1:], MANY_PARTS)),
        ):
            group = self._group * batch.queries
            needed = Capacity.of([plan], [pack(plan, group, one, batch.lengths)])
            executing = self._executing(plan, batch, one, needed.launching_all(one, parts))
            self._adopt_decoder(executing, batch, _count_rows(batch, width))
            yield

    def _sharing(
        self, plan: WorkPlan, batch: Decoding, options: DecodeOptions, rows: int
    ) -> Capacity:
        """Capacity for plans of as many rows that share other prefixes: few need a new graph.

        In them other rows may have parts that only a merge finishes, so there is space for all.
        """
        group = self._group * batch.queries
        options = options.for_drafts if batch.queries > 1 else options
        merging = replace(options, merge="kernel")
        needed = Capacity.of([plan], [pack(plan, group, merging, batch.lengths)])
        return needed.doubled.doubled.sharing(options, group, rows, self._card.processors)

    def _executing(
        self, plan: WorkPlan, batch: Decoding, options: DecodeOptions, least: Capacity | None
    ) -> GpuDecode:
        return GpuDecode(
            [plan],
            group=self._group,
            head_dim=self._pool.shape[-1],
            pool=self._pool,
            lengths=batch.lengths,
            options=options,
            scales=self._scales,
            least=least,
            slack=True,
            card=self._card,
            queries=batch.queries,
            buffers=self._buffers,
        )

    def _pack_addresses(self, rows: DecodeRows, nowhere: int, width: int) -> Tensor:
        """[L, width, H, 3]: table offset, column and length of each head.

        Rows beyond the batch have length 0.
        """
        if width in self._addresses and self._addressed[width] is rows:
            return self._addresses[width]
        self._addressed[width] = rows
        count, layers, heads = rows.shape
        address = rows.address
        if width > count:
            address = np.zeros((layers, width, heads, 3), np.int32)
            address[:, :count] = rows.address
            address[:, count:, :, 2] = nowhere
        kept = self._addresses.setdefault(
            width, torch.empty(address.shape, dtype=torch.int32, device=self._pool.device)
        )
        return kept.copy_(stage(address, self._pool.device), non_blocking=True)

    def _scale(self, layers: int, heads: int) -> None:
        if self._scales is None and self._pool.dtype.itemsize == 1:
            self._scales = torch.ones(layers, heads, 2, device=self._pool.device)

    def _schedule(self, batch: Decoding) -> tuple[Schedule, DecodeOptions]:
        if self._fixed is not None:
            return self._fixed
        text = UNMEASURED
        if self._policy is not None:
            # FlashInfer would plan every layer on the host at every step, too slow for an engine.
            text = self._policy.choose(StepLoad.of(batch), library=False)
        if text not in self._schedules:
            parsed = Schedule.parse(text)
            self._schedules[text] = parsed, DecodeOptions.of(parsed)
        return self._schedules[text]

    def begin(
        self, tables: Tensor, lengths: Int32, width: int, counts: Int32, prefill: PrefillRows
    ) -> None:
        """See `PoolKernels`."""
        self._scale(prefill.address.shape[0], prefill.address.shape[2])
        self._tables, self._width, self._rows = tables, width, prefill
        self._begun = self._decoder if width else None
        if width and self._queries > 1:
            self._place_tokens(counts)
        if len(prefill.spans) or not self._decodes_alone:
            self._load_rows(prefill)
        self._decodes_alone = not len(prefill.spans)
        # Graphs contain the address.
        if not hasattr(self, "_lengths"):
            self._lengths = torch.empty(
                lengths.size + 1, dtype=torch.int32, device=self._pool.device
            )
        new_lengths = stage(np.append(lengths.reshape(-1), np.int32(0)), self._pool.device)
        self._lengths.copy_(new_lengths, non_blocking=True)
        self._shape = lengths.shape

    def advance(self, slots: Tensor, growth: Tensor) -> None:
        """See `PoolKernels`."""
        advance(self._lengths[:-1].view(self._shape), slots, growth)

    def _load_rows(self, prefill: PrefillRows) -> None:
        self._runs = fused_causal.find_runs(prefill) if self._fuses else []
        apart = [run.rows for run in self._runs]
        self._cells = gathered.PrefillOrder.of(prefill, self._copy_bytes, self._gathers, apart)
        arrays = [
            prefill.address,
            prefill.spans,
            prefill.first,
            self._cells.order,
            self._cells.offsets,
            self._cells.sources,
        ]
        self._adopt(upload(arrays, self._pool.device))

    def _place_tokens(self, counts: Int32) -> None:
        """Upload where the tokens of each row begin; rows beyond the batch have none."""
        rows = self._decode_address.shape[1]
        # Graphs contain the address.
        if rows not in self._first_tokens:
            self._first_tokens[rows] = torch.empty(
                rows + 1, dtype=torch.int32, device=self._pool.device
            )
        first = np.full(rows + 1, counts.sum(), np.int32)
        first[0] = 0
        first[1 : len(counts) + 1] = np.cumsum(counts)
        staged = stage(first, self._pool.device)
        self._first_tokens[rows].copy_(staged, non_blocking=True)

    def begin_row(self, tables: Tensor, row: PrefillRows, shape: PaddedShape) -> bool:
        """See `PoolKernels`. A row that another kernel computes, or in parts, is not padded."""
        if self._latent:
            return False
        self._scale(row.address.shape[0], row.address.shape[2])
        cells = gathered.PrefillOrder.of(row, self._copy_bytes, self._gathers)
        copied, entries = (
            sum(int(part.total.max()) for part in cells.gathered),
            MOST_BYTES // self._copy_bytes,
        )
        if (self._fuses and fused_causal.find_runs(row)) or copied > entries:
            return False
        key = shape, row.whole.tobytes(), bool(cells.gathered)
        if key not in self._padded:
            self._padded[key] = RowBuffers.of(row, cells, shape, entries, self._pool.device)
        self._decodes_alone = False
        known = self._begun = self._padded[key]
        known.load(row, cells)
        self._tables, self._width, self._rows, self._cells, self._runs = (
            tables,
            0,
            known.rows,
            known.cells,
            [],
        )
        self._adopt(known.views)
        return True

    def _adopt(self, inputs: list[Tensor]) -> None:
        """`inputs` of the begun pass, on the device."""
        self._address, self._spans, self._first, *rest = inputs
        self._order, self._offsets, self._sources = rest

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
        tables, tokens = self._tables, self._width
        if tokens:
            address = self._decode_address
            first = None if self._queries == 1 else self._first_tokens[address.shape[1]]
            store.append(
                k[:tokens],
                v[:tokens],
                self._pool,
                tables,
                self._lengths,
                address,
                layer,
                self._scales,
                first,
                self._queries,
            )
            self._decoder.attend(
                layer,
                q[:tokens],
                tables,
                self._lengths,
                scaling=scaling,
                softcap=softcap,
                sinks=sinks,
                out=out[:tokens],
                first_tokens=first,
            )

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
        rows, address, spans = self._rows, self._address[layer], self._spans
        if rows.whole[layer, rows.asking].any():
            own = rows.asking
            store.store(
                k,
                v,
                self._pool,
                self._tables,
                address[own],
                spans[own],
                self._first[layer, own],
                layer=layer,
                longest=rows.longest,
                scales=self._scales,
            )
        if expansion is not None:
            self._attend_latents(layer, q, k, out, expansion, scaling)
            return
        plain = window is None and softcap is None and sinks is None
        gathers = plain and q.dtype in gathered.DTYPES  # an FP8 pool may serve float32 models
        for run in self._runs if plain else ():
            fused_causal.attend(q, k, v, out, run, scaling=scaling)
        for part in self._cells.gathered if gathers else ():
            self._attend_gathered(part, layer, q, k, v, out, scaling)
        if (paged := self._find_paged(plain, gathers)).stop > paged.start:
            prefill.prefill(
                q,
                k,
                v,
                self._pool,
                self._tables,
                address,
                spans,
                self._order[layer, paged],
                layer=layer,
                shortest=rows.shortest,
                longest=rows.longest,
                scaling=scaling,
                window=window,
                softcap=softcap,
                sinks=sinks,
                scales=self._scales,
                out=out,
                card=self._card,
            )

    def _find_paged(self, plain: bool, gathers: bool) -> slice:
        """The places of a layer's cells that follow pages: others are fused, or gathered."""
        own = self._cells.paged
        return slice(own.start if gathers else 0, own.stop if plain else self._order.shape[1])

    def _attend_latents(
        self, layer: int, q: Tensor, k: Tensor, out: Tensor, expansion: Expansion, scaling: float
    ) -> None:
        asking, where = self._rows.asking, (self._stored, self._tables)
        if asking.start == asking.stop:
            return
        spans, address = self._rows.spans[asking, :4], self._rows.address[layer, asking, 0]
        if expanded.serves(self._pool, q.dtype, expansion, self._card):
            rows = expanded.LatentRows(spans, address)
            expanded.attend(
                q, k[:, 0], *where, rows, expansion, out, scaling=scaling, card=self._card
            )
            return
        for (begin, end, first, last), place in zip(spans.tolist(), address.tolist(), strict=True):
            out[begin:end] = latents.prefill(
                q[begin:end],
                k[first:last, 0],
                *where,
                place,
                expand=expansion.expand,
                scaling=scaling,
            )

    def _attend_gathered(
        self,
        part: gathered.Part,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        scaling: float,
    ) -> None:
        gathered.attend(
            q,
            k,
            v,
            self._pool,
            self._tables,
            self._address[layer],
            self._spans,
            self._order[layer, part.cells],
            self._offsets[layer],
            self._sources[part.sources],
            self._gather_buffers(part, layer, q.dtype),
            part,
            out,
            layer=layer,
            scaling=scaling,
            scales=self._scales,
            card=self._card,
        )

    def _gather_buffers(self, part: gathered.Part, layer: int, dtype: torch.dtype) -> list[Tensor]:
        """Buffers for the keys and values of a part.

        Graphs contain the addresses of those of the usual size, so these stay. One long row takes
        larger ones, which no graph contains.
        """
        size = gathered.count_elements(part, layer, self._pool.shape[-1])
        usual = MOST_BYTES // (2 * dtype.itemsize)
        if size <= usual:
            self._copies = self._copies or self._make_copies(usual, dtype)
            return self._copies
        if not self._long_copies or len(self._long_copies[0]) < size:
            self._long_copies = []  # their memory may serve the larger ones
            self._long_copies = self._make_copies(-(-size // usual) * usual, dtype)
        return self._long_copies

    def _make_copies(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype, device=self._pool.device) for _ in range(2)]

    @property
    def _copy_bytes(self) -> int:
        """Of an entry that is gathered: 16 bits an element also where it is stored in FP8."""
        return self._pool.shape[2] * self._pool.shape[-1] * max(2, self._pool.dtype.itemsize)

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """See `PoolKernels`."""
        store.seal(
            ranking.scores,
            k,
            v,
            self._pool,
            self._tables,
            self._address[layer, rows],
            self._spans[rows],
            self._first[layer, rows],
            layer=layer,
            keeps_rest=bool((self._rows.kept > self._rows.first)[layer, rows].any()),
            sinks=ranking.sinks,
            window=ranking.window,
            scales=self._scales,
            mask=None if self._mask is None else self._mask[rows, layer],
        )

    def record(self, mask: Tensor) -> None:
        """See `PoolKernels`."""
        self._mask = mask

    def adopt_scales(self, scales: Tensor) -> None:
        """See `PoolKernels`."""
        if self._dtype is torch.float8_e4m3fn:
            self._scales = scales

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """See `PoolKernels`."""
        table, column, _ = self._address[layer, row].T
        keys = reference.first_keys(self._pool, self._tables, table, column, count)
        keys = keys.view(self._dtype)
        return keys if self._scales is None else keys.float() * self._scales[layer, :, :1, None]


def _count_rows(batch: Decoding, width: int) -> int:
    """The most rows of a pass of `width` tokens: those with several tokens are fewer."""
    return width if batch.queries == 1 else min(width, batch.most_rows)
