"""Attention by the Triton kernels, for pools on the GPU.

In Triton's interpreter pools are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tangram.errors import IntegrityError
from tangram.kernels import latents, reference
from tangram.kernels.interface import (
    MOST_BYTES,
    AttentionRule,
    DecodedRows,
    Expansion,
    KvPool,
    PassAddresses,
    PassShape,
    PrefillRows,
    Ranking,
)
from tangram.kernels.transfer import upload_together
from tangram.kernels.triton import expanded, fused_causal, gate, gathered, keydiff, prefill, store
from tangram.kernels.triton.card import Card
from tangram.kernels.triton.card_cost import count_programs, estimate_cost
from tangram.kernels.triton.decode_buffers import DecodeBuffers, LoadedRows
from tangram.kernels.triton.packed import DecodeOptions, rehearse_packing
from tangram.kernels.triton.padded import LoadedPrefill, RowBuffers, RowShape, inputs_of
from tangram.kernels.triton.stored import StoredPool
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Decoding, Schedule, plan_shared
from tangram.plan.workqueue import Grain, count_most_tasks

OF_LATENTS: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"gate": gate.score})
SCORES = MappingProxyType({"keydiff": keydiff.score, **OF_LATENTS})
# (most tokens, step): the width of a pass is rounded up to a multiple of the step.
WIDTHS = ((2, 1), (4, 2), (8, 4), (64, 8), (256, 16), (1 << 30, 64))
# The same where rows have drafts, so that their number changes from step to step.
DRAFT_WIDTHS = ((4, 4), (16, 8), (64, 16), (128, 32), (256, 64), (1 << 30, 128))
# A work queue that reads shared prefixes once where that saves enough.
SERVED = Schedule("packing:thrifty", plan_shared, {"tile_tokens": 64, "finer": True})


class TritonKernels:
    """`PoolKernels` of float32, bfloat16, float16 and FP8 pools.

    Every batch is planned by `schedule`, and decoded with `options`. `card` None is the pool's own.
    """

    def __init__(
        self,
        pool: KvPool,
        schedule: Schedule = SERVED,
        card: Card | None = None,
        options: DecodeOptions | None = None,
    ) -> None:
        entries = pool.entries
        scales = pool.scales
        if scales is None and entries.dtype.itemsize == 1:
            scales = torch.ones(pool.layers, pool.heads, 2, device=entries.device)
        self.pool, self.stored = pool, StoredPool.of(entries, scales, card)
        self._card = self.stored.card
        self.fused_scores = OF_LATENTS if pool.latent else SCORES
        self._schedule = schedule
        self._cost = estimate_cost(entries, pool.group, self._card)
        self._programs = count_programs(entries, pool.group, self._card)
        self._decoding = DecodeBuffers(self.stored, pool.group, options or DecodeOptions())
        self._padded: dict[RowShape, RowBuffers] = {}
        self._gathers, self._fuses = (
            not pool.latent and gathered.serves(entries, self._card),
            not pool.latent and fused_causal.serves(entries, self._card),
        )
        self.copies = CopyBuffers(entries)
        self.newest: TritonLaunch | None = None
        rehearse_packing()

    def width(self, tokens: int, queries: int) -> int:
        """See `PoolKernels`: few widths, so that few graphs serve all batches."""
        widths = WIDTHS if queries == 1 else DRAFT_WIDTHS
        step = next(step for most, step in widths if tokens <= most)
        return -(-tokens // step) * step

    def plan(self, batch: Decoding) -> tuple[WorkPlan, str]:
        """See `PoolKernels`."""
        plan = self._schedule.plan(batch, self._card.processors, self._cost, self._programs)
        return plan, self._schedule.kind

    def launch(self, addresses: PassAddresses, tables: Tensor) -> TritonLaunch:
        """See `PoolKernels`. What graphs refer to stays at its place."""
        decode = addresses.decode
        rows = None if decode is None else self._decoding.load(decode, addresses.lengths)
        return self._launch(addresses, tables, rows)

    def rehearse(self, addresses: PassAddresses, tables: Tensor) -> Iterator[TritonLaunch]:
        """See `PoolKernels`."""
        if addresses.decode is not None:
            for rows in self._decoding.rehearse(addresses.decode, addresses.lengths):
                yield self._launch(addresses, tables, rows)

    def reserve(self, rows: DecodedRows) -> None:
        """See `PoolKernels`."""
        grain = Grain(self._card.processors * self._programs, finer=True)
        self._decoding.reserve(rows, count_most_tasks(rows.width * self.pool.heads, grain))

    def _launch(
        self, addresses: PassAddresses, tables: Tensor, rows: LoadedRows | None
    ) -> TritonLaunch:
        chunks: LoadedPrefill | None = None
        shape: PassShape | None = None if rows is None else rows.shape
        if len(addresses.prefill.spans):
            padded = shape = self._pad(addresses)
            known = addresses.prefill
            chunks = self._load_prefill(known) if padded is None else self._padded[padded].loaded
        self.newest = TritonLaunch(self, tables, addresses.width, rows, chunks, shape)
        return self.newest

    def _load_prefill(self, rows: PrefillRows) -> LoadedPrefill:
        runs = fused_causal.find_runs(rows) if self._fuses else []
        apart = [run.rows for run in runs]
        cells = gathered.PrefillOrder.of(rows, self.copies.entry_bytes, self._gathers, apart)
        return LoadedPrefill(
            rows, cells, runs, *upload_together(inputs_of(rows, cells), self.pool.entries.device)
        )

    def _pad(self, addresses: PassAddresses) -> RowShape | None:
        """The shape of a padded pass, in whose buffers its row now is.

        None for another pass, and for a row that another kernel computes, or in parts.
        """
        row, wanted = addresses.prefill, addresses.padding
        if wanted is None or self.pool.latent:
            return None
        cells = gathered.PrefillOrder.of(row, self.copies.entry_bytes, self._gathers)
        copied, entries = (
            sum(int(part.total.max()) for part in cells.gathered),
            MOST_BYTES // self.copies.entry_bytes,
        )
        if (self._fuses and fused_causal.find_runs(row)) or copied > entries:
            return None
        gathers, device = bool(cells.gathered), self.pool.entries.device
        shape = RowShape(wanted.tokens, wanted.past, wanted.kind, gathers)
        if shape not in self._padded:
            self._padded[shape] = RowBuffers.of(row, cells, shape, entries, device)
        self._padded[shape].load(row, cells)
        return shape


class CopyBuffers:
    """Buffers for the keys and values that prefill copies out of the pages of `entries`.

    Graphs contain the addresses of those of the usual size, so these stay. One long row takes
    larger buffers, which no graph contains.
    """

    def __init__(self, entries: Tensor) -> None:
        self._head_dim, self._device = entries.shape[-1], entries.device
        # 16 bits an element also where it is stored in FP8.
        self.entry_bytes = entries.shape[2] * self._head_dim * max(2, entries.dtype.itemsize)
        self._usual, self._long = list[Tensor](), list[Tensor]()

    def take(self, part: gathered.Part, layer: int, dtype: torch.dtype) -> list[Tensor]:
        """Two buffers for `part` of a layer."""
        size = gathered.count_elements(part, layer, self._head_dim)
        usual = MOST_BYTES // (2 * dtype.itemsize)
        if size <= usual:
            self._usual = self._usual or self._make(usual, dtype)
            return self._usual
        if not self._long or len(self._long[0]) < size:
            self._long = []  # their memory may serve larger buffers
            self._long = self._make(-(-size // usual) * usual, dtype)
        return self._long

    def _make(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype, device=self._device) for _ in range(2)]


@dataclass(frozen=True, eq=False)
class TritonLaunch:
    """`Launch` of `kernels`: decode `rows`, padded to `width` tokens, and prefill rows `chunks`."""

    kernels: TritonKernels
    tables: Tensor
    width: int
    rows: LoadedRows | None
    chunks: LoadedPrefill | None
    shape: PassShape | None

    def _check(self) -> None:
        if self.kernels.newest is not self:
            raise IntegrityError("a pass is computed whose buffers another pass has taken")

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule
    ) -> None:
        """See `Launch`."""
        rows, tokens = self.rows, self.width
        if rows is None:
            return
        self._check()
        if not rule.shared:
            store.append(
                *(k[:tokens], v[:tokens], self.kernels.stored, self.tables, rows.lengths),
                *(rows.address, layer, rows.first_tokens, rows.shape.queries),
            )
        rows.decoder.attend(
            *(layer, q[:tokens], self.tables, rows.lengths, rule),
            out=out[:tokens],
            first_tokens=rows.first_tokens,
        )

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
        chunks, kernels = self.chunks, self.kernels
        if chunks is None:
            return out
        self._check()
        rows, here = chunks.rows, chunks.of_layer(layer, self.tables)
        if not rule.shared and rows.whole[layer, rows.asking].any():
            asking = chunks.of_layer(layer, self.tables, rows.asking)
            store.store(k, v, kernels.stored, asking, chunks.first[layer, rows.asking])
        if expansion is not None:
            self._attend_latents(chunks, layer, q, k, out, expansion, rule)
            return out
        plain = rule.window is None and rule.softcap is None and rule.sinks is None
        gathers = plain and q.dtype in gathered.DTYPES  # an FP8 pool may serve float32 models
        for run in chunks.runs if plain else ():
            attended = fused_causal.attend(q, k, v, run, scaling=rule.scaling)
            if len(attended) == len(out) and attended.is_contiguous():
                return attended  # a copy takes 1 % of a pass (8,192 tokens, Qwen3-4B, H100)
            out[run.tokens] = attended
        for part in chunks.cells.gathered if gathers else ():
            cells = gathered.GatheredCells(
                part,
                chunks.order[layer, part.cells],
                chunks.offsets[layer],
                chunks.sources[part.sources],
                kernels.copies.take(part, layer, q.dtype),
            )
            gathered.attend(q, k, v, kernels.stored, here, cells, out, scaling=rule.scaling)
        paged = chunks.find_paged(plain, gathers)
        if paged.start < paged.stop:
            order = chunks.order[layer, paged]
            prefill.prefill(q, k, v, kernels.stored, here, order, rule, out=out)
        return out

    def _attend_latents(
        self,
        chunks: LoadedPrefill,
        layer: int,
        q: Tensor,
        k: Tensor,
        out: Tensor,
        expansion: Expansion,
        rule: AttentionRule,
    ) -> None:
        known, stored = chunks.rows, self.kernels.stored
        asking, where = known.asking, (self.kernels.pool.entries, self.tables)
        if not expanded.serves(stored, q.dtype, expansion):
            latents.prefill_rows(q, k[:, 0], out, *where, known, layer, expansion, rule)
        elif asking.start < asking.stop:
            places = known.address[layer, asking, 0]
            rows = expanded.LatentRows(known.spans[asking], places, self.tables)
            expanded.attend(q, k[:, 0], stored, rows, expansion, out, scaling=rule.scaling)

    def seal(self, layer: int, rows: slice, ranking: Ranking, k: Tensor, v: Tensor) -> None:
        """See `Launch`."""
        chunks, chosen = self._require_chunks(), self.kernels.pool.chosen
        store.seal(
            *(ranking, k, v, self.kernels.stored, chunks.of_layer(layer, self.tables, rows)),
            chunks.first[layer, rows],
            keeps_rest=bool((chunks.rows.kept > chunks.rows.first)[layer, rows].any()),
            mask=None if chosen is None else chosen[rows, layer],
        )

    def first_keys(self, layer: int, row: int, count: int) -> Tensor:
        """See `Launch`."""
        table, column, _ = self._require_chunks().address[layer, row].T
        stored, dtype = self.kernels.stored, self.kernels.pool.entries.dtype
        keys = reference.first_keys(stored.entries, self.tables, table, column, count).view(dtype)
        scales = stored.scales
        return keys if scales is None else keys.float() * scales[layer, :, :1, None]

    def _require_chunks(self) -> LoadedPrefill:
        if self.chunks is None:
            raise IntegrityError("a pass without prefill rows seals a chunk")
        self._check()
        return self.chunks
