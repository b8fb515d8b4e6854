"""Compiled attention on the CPU.

Decode is append, tasks and merge in one call. Prefill is one call, too, where the processor has the
instructions.

Threads take tasks from an atomic counter in the plan's order (longest first), so that uneven heads
balance. Each task and each merge is computed alone and in fixed order, so timing never changes a
bit of the result.

Numba's threads and torch's must come from one OpenMP pool. Idle OpenMP threads spin for a while,
and two pools that spin on the same cores slow a layer from microseconds to milliseconds.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.kernels import reference
from tangram.kernels.cpu import prefill_loops
from tangram.kernels.cpu.decode_loops import DecodeTokens, LayerTasks, Pages, step
from tangram.kernels.cpu.products import TILE_ROWS
from tangram.kernels.interface import AttentionRule
from tangram.kernels.narrow import as_entries
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.records import Records
from tangram.plan.split import plan_plain
from tangram.types import Int32, Int64


def _share_torch_openmp() -> None:
    """Let Numba's OpenMP layer bind to the library that torch runs on.

    Numba loads this layer at its first parallel call.
    """
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with suppress(OSError):  # this torch runs on another library: nothing to share
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


_share_torch_openmp()

# The dtypes of pools that compiled code reads, and the integers that hold their bits for Numba.
COMPILED = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.int8: torch.int8,
}


@dataclass(frozen=True, eq=False)
class CpuPlan:
    """A work plan for the compiled kernel. Build it with `CpuPlan.build`.

    `address` [L, R, H] is that of `DecodeRows`.
    """

    plan: WorkPlan
    threads: int
    address: Records

    @classmethod
    def build(cls, plan: WorkPlan, address: Records, threads: int | None = None) -> CpuPlan:
        """`plan` for `threads` threads; None means as many as torch uses."""
        return cls(plan, _threads(threads), address)

    @cached_property
    def layer_tasks(self) -> LayerTasks:
        """What compiled code reads of all layers."""
        plan = self.plan
        records = plan.tasks, plan.entries, plan.segments
        return LayerTasks(*records, plan.partial_slots, plan.tile_tokens)

    @cached_property
    def bounds(self) -> list[tuple[int, int, int, int]]:
        """Where the tasks and the segments of each layer begin and end."""
        tasks, segments = self.plan.layer_indptr.tolist(), self.plan.merge_indptr.tolist()
        ends = zip(pairwise(tasks), pairwise(segments), strict=True)
        return [(*of_tasks, *of_segments) for of_tasks, of_segments in ends]


def _threads(wanted: int | None = None) -> int:
    """`wanted` threads, but no more than Numba may use; None means as many as torch uses."""
    limit = int(vars(numba.config)["NUMBA_NUM_THREADS"])
    return min(torch.get_num_threads() if wanted is None else wanted, limit)


def _let_use(threads: int) -> None:
    """Let Numba compute on `threads` threads from now on."""
    if numba.get_num_threads() != threads:
        numba.set_num_threads(threads)


def runs_compiled(pool: Tensor) -> bool:
    """Whether compiled code can decode over `pool`."""
    return pool.dtype in COMPILED and pool.device.type == "cpu"


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels (~30 s), or load them from Numba's cache (~0.5 s), before serving.

    They are those of pools of `dtype`, one of `COMPILED`. Prefill is that of queries in float32 for
    a pool in float32, and in bfloat16 for others. If other queries come, theirs is compiled then.
    Starting Numba's threads also sets the
    size of torch's OpenMP pool, so torch's own size is restored.
    """
    threads = torch.get_num_threads()
    zero = np.zeros((1, 1, 1), np.int64)
    rows = DecodeRows.of(zero, zero, zero, np.ones((1, 1, 1)), windows=(None,), page_tokens=16)
    entry, index = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int32)
    rule, out = AttentionRule(1.0), torch.empty(1, 1, 16)
    plan = CpuPlan.build(plan_plain(rows), rows.address)
    pool = torch.zeros(1, 1, 2, 16, 16, dtype=dtype)
    decoding = DecodePass(pool, index, index + 1, np.arange(2), plan)
    decoding.run(entry, entry, entry, out, 0, rule)
    likely = entry if dtype is torch.float32 else entry.bfloat16()
    asked = next((x for x in (likely, entry) if prefills_compiled(x, pool)), None)
    if asked is not None:
        address, spans = np.zeros((1, 1, 3), np.int32), np.array([[0, 1, 0, 1, 0]], np.int32)
        prefill(asked, asked, asked, torch.empty_like(asked), pool, index, address, spans, rule)
    torch.set_num_threads(threads)


class DecodePass:
    """The R rows of a decode pass over a pool that `runs_compiled`, layer by layer.

    `first_tokens` int64 [R + 1] says where the tokens of each row begin.
    """

    def __init__(
        self, pool: Tensor, tables: Tensor, lengths: Tensor, first_tokens: Int64, plan: CpuPlan
    ) -> None:
        bits = COMPILED[pool.dtype]
        blocks = _array(reference.blocks(pool).view(bits))
        self._pages, self._bits, self._dtype = (
            Pages(blocks, pool.shape[1], _array(tables)),
            bits,
            pool.dtype,
        )
        self._lengths, self._first, self._plan = _array(lengths), first_tokens, plan
        self._no_sinks: npt.NDArray[Any] | None = None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, rule: AttentionRule
    ) -> None:
        """`reference.append`, then `reference.decode`, for one layer: q [T, Q, D] → out [T, Q, V].

        k is [T, H, D], v [T, H, V]. Shared ones are not appended. All is computed in float32.
        """
        plan = self._plan
        _let_use(plan.threads)
        heads, width = k.shape[1], v.shape[2]
        by_head = q.shape[0], heads, q.shape[1] // heads
        direct = out.dtype is torch.float32 and out.is_contiguous()
        wide = out if direct else torch.empty(out.shape, dtype=torch.float32)
        rows = DecodeTokens(
            _array(q.float()).reshape(*by_head, q.shape[2]),
            self._first,
            wide.numpy().reshape(*by_head, width),
            self._lengths,
            self._sinks(rule.sinks, by_head[1:]),
            np.float32(rule.scaling),
            np.float32(rule.softcap or 0.0),
        )
        appended = (x[:, :0] if rule.shared else x for x in (k, v))  # of no head
        keys, values = (_array(as_entries(x, self._dtype).view(self._bits)) for x in appended)
        tasks, bounds = plan.layer_tasks, plan.bounds[layer]
        step(rows, keys, values, self._pages, tasks, bounds, plan.address[layer], plan.threads)
        if not direct:
            out.copy_(wide)

    def _sinks(self, sinks: Tensor | None, shape: tuple[int, int]) -> npt.NDArray[Any]:
        """Those [Q] of a layer by KV head; −∞, if it has none."""
        if sinks is not None:
            return _array(sinks.float()).reshape(shape)
        if self._no_sinks is None or self._no_sinks.shape != shape:
            self._no_sinks = np.full(shape, -np.inf, np.float32)
        return self._no_sinks


def prefills_compiled(q: Tensor, pool: Tensor) -> bool:
    """True if `prefill` of queries q [T, Q, D] over `pool` can run on this processor.

    It takes AVX2, in bfloat16 AVX512-BF16. Torch's kernel, which uses AMX, is faster
    where there is one, but there a query's bits depend on the queries and keys beside it.
    """
    has_products = (
        torch.cpu._is_avx2_supported()
        if q.dtype is torch.float32
        else q.dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    )
    return has_products and runs_compiled(pool) and q.shape[-1] % 2 == 0


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    pool: Tensor,
    tables: Tensor,
    address: Int32,
    spans: Int32,
    rule: AttentionRule,
) -> None:
    """`reference.prefill` of N rows that lie end to end in q [T, Q, D] → out [T, Q, D].

    k, v [T', H, D] have the dtype of q. `address` [N, H, 3] and `spans` [N, 5] are those of
    `PrefillRows`. The result of a row does not depend on other rows, or on the number of threads.
    Sums are float32. Call it only where `prefills_compiled`. Raises `IntegrityError` as
    `reference.prefill` does.
    """
    if rule.window is not None:
        for lengths, position in zip(address[..., 2].tolist(), spans[:, 4].tolist(), strict=True):
            reference.refuse_other_pasts(lengths, position)
    heads, bits = k.shape[1], COMPILED[q.dtype]
    group, asking = q.shape[1] // heads, slice(int(spans[0, 0]), int(spans[-1, 1]))
    places = spans.astype(np.int64)
    places[:, :2] -= asking.start
    queries = _by_head(q[asking], heads)
    answers = torch.empty_like(queries)
    asked = prefill_loops.Asked(
        _array(queries.view(bits)),
        _array(k.view(bits)),
        _array(v.view(bits)),
        _array(answers.view(bits)),
        places,
        address.astype(np.int64),
    )
    blocks = _array(reference.blocks(pool).view(COMPILED[pool.dtype]))
    no_sinks = np.full(q.shape[1], -np.inf, np.float32)
    scoring = prefill_loops.Scoring(
        rule.window or 0,
        np.float32(rule.scaling),
        np.float32(rule.softcap or 0.0),
        (no_sinks if rule.sinks is None else _array(rule.sinks.float())).reshape(heads, group),
    )
    threads = _threads()
    _let_use(threads)
    prefill_loops.attend(
        asked,
        Pages(blocks, pool.shape[1], _array(tables)),
        scoring,
        prefill_loops.split_rows(places, heads, group),
        prefill_loops.scratch(threads, pool.shape[3], asked.q, group),
        np.zeros(1, np.int64),
        threads,
    )
    answered = torch.unflatten(answers[:, :-TILE_ROWS], 1, (asking.stop - asking.start, group))
    out[asking] = answered.transpose(0, 1).flatten(1, 2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """x [T, Q, D] as [H, T * G + TILE_ROWS, D]: what is behind the rows of a head is not set."""
    tokens, group = len(x), x.shape[1] // heads
    rows = x.new_empty(heads, tokens * group + TILE_ROWS, x.shape[2])
    by_token = torch.unflatten(x, 1, (heads, group)).transpose(0, 1)
    torch.unflatten(rows[:, :-TILE_ROWS], 1, (tokens, group)).copy_(by_token)
    return rows


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.detach().contiguous().numpy()
