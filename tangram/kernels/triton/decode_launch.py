"""Decode plans on the GPU: static buffers, one upload per plan, and launches for captured graphs.

A plan is packed into one int32 buffer and copied at once. Grids, tile sizes, buffer addresses and
the merging kernel depend on the capacity alone. So a graph captured under one plan replays under
any other that fits. All launches go to one stream, largest tiles first. Each lets the next one
start before it ends (programmatic dependent launch). It waits for the one before it only where it
needs its results, or at once if it is the first.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor

from tangram.errors import ConfigError
from tangram.kernels.interface import AttentionRule
from tangram.kernels.triton.decode import decode_tasks
from tangram.kernels.triton.merge import merge_segments
from tangram.kernels.triton.packed import (
    FIXED,
    Capacity,
    DecodeOptions,
    PackedPlan,
    count_words,
    pack,
)
from tangram.kernels.triton.stored import StoredPool
from tangram.kernels.triton.tiling import LEAST_ENTRIES, Operands, Tile, fit_tile
from tangram.plan.form import WorkPlan
from tangram.types import Int32

FEW_PARTS, MANY_PARTS = (4, 8), 64  # parts that a merge takes at a time: a kernel each


class PlanBuffers:
    """Device memory that the decoders of one pool share, because one plan is loaded at a time.

    Decoders that need more get larger memory. Earlier ones keep theirs, which graphs refer to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}
        self.loaded: tuple[GpuDecode, WorkPlan] | None = None  # who has filled the plan's memory

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """[size] of what is shared as `name`: zeros when it is new."""
        held = self._held.get(name)
        if held is None or len(held) < size:
            held = self._held[name] = torch.zeros(size, dtype=dtype, device=self._device)
        return held[:size]


class GpuDecode:
    """Executes decode plans of one pool: `load` a plan, then `attend` layer by layer.

    This works eagerly or in a graph. The first `plan` is loaded at the flat host `lengths`. The
    buffers have the `capacity`; None is what this plan needs. `group` is G. A row has up to
    `queries` tokens. `buffers` None are the decoder's own. Raises `ConfigError` if a plan does not
    fit.
    """

    def __init__(
        self,
        plan: WorkPlan,
        pool: StoredPool,
        group: int,
        *,
        lengths: Int32 | None = None,
        options: DecodeOptions | None = None,
        capacity: Capacity | None = None,
        queries: int = 1,
        buffers: PlanBuffers | None = None,
    ) -> None:
        self._options = (options or DecodeOptions()).of_rows(queries)
        self._group, self._queries = group, queries
        self._pool, self._scales, self._card = pool.entries, pool.scales, pool.card
        self._latent, self._head_dim = self._pool.shape[2] == 1, self._pool.shape[-1]
        self._kv_heads, self._tile_tokens = plan.kv_heads, plan.tile_tokens
        size = capacity or Capacity.for_plan(plan, group * queries, self._options, lengths)
        self.capacity = size
        shared = self._buffers = buffers or PlanBuffers(self._pool.device)
        self._device_plan = shared.take("plan", sum(size.sizes.values()), torch.int32)
        self._plan = self._views(self._device_plan)
        rows = max(1, size.slots) * group * queries
        # A part is a mean of values: float16 holds it if it holds these, and rounds it no more than
        # the output.
        part = torch.float16 if self._pool.dtype == torch.float16 else torch.float32
        size_out = rows * self._head_dim
        self._part_out = shared.take("part_out", size_out, part).view(rows, self._head_dim)
        self._part_lse = shared.take("part_lse", rows, torch.float32)
        # Large tiles start first: they take longest, and small tasks fit beside them.
        self._kinds = [kind for kind, count in reversed(list(enumerate(size.tasks))) if count]
        self._merges = size.segments > 0
        self._tiles = dict[torch.dtype, list[Tile]]()
        self._packed = WeakKeyDictionary[WorkPlan, tuple[PackedPlan, Tensor]]()
        self._chained = self._card.chains and self._options.chained
        self.load(plan, lengths)

    def _views(self, whole: Tensor) -> dict[str, Tensor]:
        sizes = self.capacity.sizes
        return dict(zip(sizes, torch.split(whole, list(sizes.values())), strict=True))

    def load(self, plan: WorkPlan, lengths: Int32 | None = None) -> None:
        """Upload `plan`. Later work on the current stream executes it, graph replays included.

        `lengths`, int32 [slots · groups] on the host, sort tasks by length; they may grow
        afterwards. A plan that was loaded before stays sorted as it was, and is only uploaded.
        Raises `ConfigError` if the plan does not fit the buffers.
        """
        if plan.tile_tokens != self._tile_tokens or plan.kv_heads != self._kv_heads:
            raise ConfigError(
                f"the plan has tile_tokens {plan.tile_tokens} and {plan.kv_heads} KV heads, the "
                f"buffers were made for {self._tile_tokens} and {self._kv_heads}"
            )
        if (misfit := self._load(plan, lengths)) is not None:
            raise ConfigError(misfit)

    def takes(self, plan: WorkPlan, lengths: Int32 | None = None) -> bool:
        """`load` the plan if it fits; returns whether it did. `lengths` are as there."""
        return plan.tile_tokens == self._tile_tokens and self._load(plan, lengths) is None

    def _load(self, plan: WorkPlan, lengths: Int32 | None) -> str | None:
        if plan not in self._packed:
            group, finishes = self._group * self._queries, np.asarray(self.capacity.finishes)
            # Megabytes: written directly to memory that the device reads.
            words = count_words(plan, self._options)
            whole = torch.empty(
                words, dtype=torch.int32, device="cpu", pin_memory=self._pool.is_cuda
            )
            packed = pack(plan, group, self._options, lengths, finishes, whole.numpy())
            misfit = self.capacity.misfit(plan, packed)
            if misfit is not None:
                return misfit
            self._packed[plan] = packed, whole
        if self._buffers.loaded != (self, plan):
            self._upload(*self._packed[plan])
            self._buffers.loaded = self, plan
        return None

    def _upload(self, packed: PackedPlan, whole: Tensor) -> None:
        """Copy the arrays of `packed`, which lie end to end in `whole`, to their places."""
        sizes = packed.sizes
        # Sizes of bounds are fixed, so bounds and tasks lie end to end on both sides.
        first = sum(sizes.pop(name) for name in (*FIXED, "tasks"))
        self._device_plan[:first].copy_(whole[:first], non_blocking=True)
        for name, size in sizes.items():
            if size:
                self._plan[name][:size].copy_(whole[first : first + size], non_blocking=True)
            first += size

    def attend(
        self,
        layer: int,
        q: Tensor,
        tables: Tensor,
        lengths: Tensor,
        rule: AttentionRule,
        *,
        out: Tensor | None = None,
        first_tokens: Tensor | None = None,
    ) -> Tensor:
        """One layer of the loaded plan: q [T, Q, D] → [T, Q, V], contiguous.

        The contract of `reference.decode`. The width of `out` is V; None means D. `first_tokens`
        int32 [R + 1] on the device: where the tokens of each row begin; needed with several
        queries.
        """
        first = self._part_lse if first_tokens is None else first_tokens
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for number, kind in enumerate(self._kinds):
            self._launch(kind, number == 0, layer, q, out, tables, lengths, first, rule)
        if self._merges:
            self._launch_merge(layer, out, first, rule.sinks)
        return out

    def _launch(
        self,
        kind: int,
        leads: bool,
        layer: int,
        q: Tensor,
        out: Tensor,
        tables: Tensor,
        lengths: Tensor,
        first: Tensor,
        rule: AttentionRule,
    ) -> None:
        options, pool, plan = self._options, self._pool, self._plan
        tile, grid = self._fit(kind, q, out)
        decode_tasks[grid](
            *(q, pool, tables, lengths, plan["tasks"], plan["task_indptr"], plan["entries"], first),
            self._scales if self._scales is not None else self._part_lse,
            rule.sinks if rule.sinks is not None else q,
            *(out, self._part_out, self._part_lse, layer, int(leads)),
            *(rule.scaling, rule.softcap or 1.0, *q.stride()[:2], tables.numel()),
            KIND=kind,
            KINDS=len(options.kinds),
            **self._sizes,
            **self._widths(out.shape[-1]),
            HP=pool.shape[1],
            P=pool.shape[3],
            TILE=self._tile_tokens,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.entries,
            SOFTCAP=rule.softcap is not None,
            SINKS=rule.sinks is not None,
            SCALED=self._scales is not None,
            SHORT=kind == 0,
            FINISH=self.capacity.finishes[kind],
            CHAINED=self._chained,
            TURNED=tile.turned,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **self._launch_options,
        )

    def _fit(self, kind: int, q: Tensor, out: Tensor) -> tuple[Tile, tuple[int, int]]:
        """The tile of a kind of tasks; the grid of `decode_tasks`."""
        tile = self._tiles_for(q, out)[kind]
        tasks = min(self.capacity.tasks[kind], self._options.programs)
        parts = triton.cdiv(self._options.kinds[kind].queries, tile.queries)
        return tile, (parts, tasks) if self._latent else (tasks, parts)

    def _tiles_for(self, q: Tensor, out: Tensor) -> list[Tile]:
        """The tile of each kind of task on this card, computed once."""
        if q.dtype not in self._tiles:
            widths = self._widths(out.shape[-1])
            operands = Operands(
                widths["BLOCK_D"] + widths["BLOCK_R"],
                q.element_size(),
                hops=1 if self._latent else 2,
                vectors=self._pool.shape[2],
            )
            kinds = [
                tile.for_latents(self._card, self._pool.itemsize) if self._latent else tile
                for tile in self._options.kinds
            ]
            self._tiles[q.dtype] = [fit_tile(tile, operands, self._card) for tile in kinds]
        return self._tiles[q.dtype]

    def _launch_merge(self, layer: int, out: Tensor, first: Tensor, sinks: Tensor | None) -> None:
        """Few parts: one program a segment.

        Many: one program a query head, with all of its parts.
        """
        group, parts = (
            self._group,
            next((few for few in FEW_PARTS if self.capacity.segment_parts <= few), MANY_PARTS),
        )
        total = group * self._queries
        # All heads' parts of latents fit into no register file.
        block_group = triton.next_power_of_2(group) if parts <= 4 and not self._latent else 1
        grid = (
            min(self.capacity.segments, self._options.programs),
            triton.cdiv(total, block_group),
        )
        merge_segments[grid](
            *(self._part_out, self._part_lse, self._plan["merge_indptr"], self._plan["segments"]),
            sinks if sinks is not None else out,
            *(out, first, layer),
            **self._sizes,
            BLOCK_G=block_group,
            V=out.shape[-1],
            BLOCK_D=triton.next_power_of_2(out.shape[-1]),
            BLOCK_PARTS=parts,
            SINKS=sinks is not None,
            CHAINED=self._chained,
            num_warps=8 if self._latent else 1 if parts <= 8 else 4,
            **self._launch_options,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return {"H": self._kv_heads, "G": self._group, "NQ": self._queries}

    def _widths(self, value_dim: int) -> dict[str, int]:
        """D, V and their blocks, each at least what matrix instructions take of a part.

        FP8 entries have two parts (`decode._cut`). The block of rotary elements is 0 without
        latents.
        """
        least = LEAST_ENTRIES * (2 if self._pool.dtype.itemsize == 1 else 1)
        rotary = triton.next_power_of_2(self._head_dim - value_dim) if self._latent else 0
        return {
            "D": self._head_dim,
            "V": value_dim,
            "BLOCK_D": max(least, triton.next_power_of_2(value_dim)),
            "BLOCK_R": max(least, rotary) if self._latent else 0,
        }

    @property
    def _launch_options(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._chained else {}
