"""Decode attention on the CPU: append, run the layer's tasks and merge, in one compiled call (float32 pools).

Threads take tasks from an atomic counter, in the plan's order (longest first), so that uneven heads balance themselves;
each task and each merge is computed alone and in fixed order, so timing never changes a bit of the result.

Numba's threads and torch's must come from one OpenMP pool: idle OpenMP threads spin for a while, and two pools that spin
on the same cores slow a layer from microseconds to milliseconds.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from tangram.kernels import reference
from tangram.kernels.cpu_tasks import append_rows, attend, fetch_add, finish, merge, resolve_one, useful_threads
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.types import Int64


def _share_torch_openmp() -> None:
    """Let Numba's OpenMP layer, which is loaded at its first parallel call, bind to the library that torch runs on."""
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


_share_torch_openmp()


@dataclass(frozen=True, eq=False)
class CpuPlan:
    """A work plan packed for the compiled kernel, once per plan. Build it with `CpuPlan.build`.

    `tasks` [N, 9]: table, length_index, column, head, kind, a, b, row_begin, row_end. `entries` [M, 3]: row, direct, slot.
    `segments` [S, 4]: row, head, part_begin, part_end. `address` [L, R, H, 3]: table, column, length_index.
    """

    plan: WorkPlan
    threads: int
    tasks: Int64
    entries: Int64
    segments: Int64
    address: Int64

    @classmethod
    def build(cls, plan: WorkPlan, rows: DecodeRows, threads: int | None = None) -> CpuPlan:
        """Pack `plan` for `threads` threads; None means as many as torch uses."""
        limit = int(numba.config.NUMBA_NUM_THREADS)
        task_fields = (
            plan.table, plan.length_index, plan.column, plan.head, plan.kind, plan.a, plan.b, plan.row_begin, plan.row_end,
        )  # fmt: skip
        segments = (plan.merge_row, plan.merge_head, plan.part_indptr[:-1], plan.part_indptr[1:])
        address = np.stack([rows.table, rows.column, rows.length_index], axis=-1).swapaxes(0, 1)
        return cls(
            plan,
            min(threads or torch.get_num_threads(), limit),
            np.stack(task_fields, axis=1).astype(np.int64),
            np.stack([plan.rows, plan.direct, plan.slot], axis=1).astype(np.int64),
            np.stack(segments, axis=1).astype(np.int64),
            np.ascontiguousarray(address, np.int64),
        )


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: Tensor,
    lengths: Tensor,
    plan: CpuPlan,
    layer: int,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.append` of k, v [R, H, D] and then `reference.decode` of q [R, Q, D] → [R, Q, D], for one layer.

    Computed in float32 by compiled code; pools of other dtypes go to the reference.
    """
    if pool.dtype is not torch.float32 or pool.device.type != "cpu":
        reference.append(k, v, pool, tables, lengths, *np.moveaxis(plan.address[layer], -1, 0))
        return reference.decode(
            q, pool, tables, lengths, plan.plan, layer, scaling=scaling, softcap=softcap, sinks=sinks
        )
    if numba.get_num_threads() != plan.threads:
        numba.set_num_threads(plan.threads)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sink = np.full(q.shape[1], -np.inf, np.float32) if sinks is None else _array(sinks)
    indptr, merges = plan.plan.layer_indptr, plan.plan.merge_indptr
    _step(
        _array(q), _array(k), _array(v), _array(pool), _array(tables), _array(lengths), plan.address[layer],
        plan.tasks, plan.entries, plan.segments, plan.plan.part_slot, indptr[layer], indptr[layer + 1], merges[layer],
        merges[layer + 1], plan.plan.partial_slots, plan.plan.tile_tokens, np.float32(scaling),
        np.float32(softcap or 0.0), sink, out.numpy(), plan.threads,
    )  # fmt: skip
    return out


def _array(tensor: Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return tensor.detach().contiguous().numpy()


@njit(cache=True, parallel=True)
def _step(  # type: ignore[no-untyped-def]
    q, k, v, pool, tables, lengths, address, tasks, entries, segments, part_slot, task_begin, task_end, segment_begin,
    segment_end, slots, tile, scaling, softcap, sinks, out, workers,
):  # fmt: skip
    """One layer: append k, v, run tasks [task_begin, task_end), merge segments [segment_begin, segment_end)."""
    rows, query_heads, head_dim = q.shape
    heads, heads_per_page = k.shape[1], pool.shape[1]
    group = query_heads // heads
    blocks = pool.reshape((pool.shape[0] * heads_per_page, 2, pool.shape[3], head_dim))
    queries, outs = q.reshape((rows, heads, group, head_dim)), out.reshape((rows, heads, group, head_dim))
    sink = sinks.reshape((heads, group))
    append_rows(k, v, blocks, heads_per_page, tables, lengths, address)
    partial_out, partial_lse = np.empty((slots, group, head_dim), np.float32), np.empty((slots, group), np.float32)
    counter = np.full(1, task_begin, np.int64)
    useful = useful_threads(tasks, task_begin, task_end, lengths, tile, head_dim, workers)
    for _ in prange(useful):
        _work(
            queries, blocks, heads_per_page, tables, lengths, tasks, entries, task_end, tile, scaling, softcap,
            sink, partial_out, partial_lse, outs, counter,
        )  # fmt: skip
    for segment in range(segment_begin, segment_end):
        row, head, begin, end = segments[segment]
        merge(part_slot[begin:end], partial_out, partial_lse, sink[head], outs[row, head])


@njit(cache=True)
def _work(  # type: ignore[no-untyped-def]
    queries, blocks, heads_per_page, tables, lengths, tasks, entries, task_end, tile, scaling, softcap,
    sinks, partial_out, partial_lse, outs, counter,
):  # fmt: skip
    """One thread's share: take the next task until none is left."""
    group, head_dim = queries.shape[2], queries.shape[3]
    while True:
        task = fetch_add(counter, 1)
        if task >= task_end:
            break
        table, length_index, column, head, kind, a, b, row_begin, row_end = tasks[task]
        begin, end = resolve_one(kind, a, b, lengths[length_index], tile)
        count = row_end - row_begin
        query = np.empty((count * group, head_dim), np.float32)
        for i in range(count):
            query[i * group : (i + 1) * group] = queries[entries[row_begin + i, 0], head] * scaling
        out, lse = np.empty_like(query), np.empty(count * group, np.float32)
        attend(query, blocks, heads_per_page, tables, table, column, begin, end, softcap, out, lse)
        for i in range(count):
            row, direct, slot = entries[row_begin + i]
            part, part_lse = out[i * group : (i + 1) * group], lse[i * group : (i + 1) * group]
            if direct:
                finish(part, part_lse, sinks[head], outs[row, head])
            else:
                partial_out[slot], partial_lse[slot] = part, part_lse
