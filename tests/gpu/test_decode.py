"""Decode on the GPU: every planner, tile, dtype and head dim against other people's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.errors import ConfigError
from tangram.kernels.interface import AttentionRule
from tangram.plan.aot import plan_aot
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.split import plan_plain
from tangram.plan.workqueue import Grain, plan_workqueue
from tangram_lab.baselines.uniform import plan_uniform_splits
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tests.interpreter import interpreter_few
from tests.paged import SCALING, Batch, dense_decode, make_batch
from tests.plans import TaskList, assemble

TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MERGES = ("tails", "kernel")
PLANNERS: dict[str, Callable[[Batch], WorkPlan]] = {
    "plain": lambda batch: plan_plain(batch.rows),
    "aot": lambda batch: plan_aot(batch.rows, 16, tile_tokens=64),
    "aot, empty shares": lambda batch: plan_aot(batch.rows, 40, tile_tokens=256),
    "work queue": lambda batch: plan_workqueue(
        batch.rows, batch.lengths.numpy(), Grain(8, tile_tokens=64, min_tokens=64)
    ),
    "uniform": lambda batch: plan_uniform_splits(batch.rows, batch.lengths.numpy(), 64),
}


def run(
    batch: Batch, plan: WorkPlan, layer: int, device: torch.device, **options: object
) -> Tensor:
    """Append the new entries, then attend, as a decode step does."""
    from tangram.kernels.triton import store
    from tangram.kernels.triton.decode_launch import GpuDecode
    from tangram.kernels.triton.packed import Capacity, DecodeOptions
    from tangram.kernels.triton.stored import StoredPool

    pool, q, k, v, tables, lengths = (
        x.to(device)
        for x in (batch.pool.clone(), batch.q, batch.k, batch.v, batch.tables, batch.lengths)
    )
    rows = batch.rows
    address = torch.from_numpy(
        np.stack([rows.table, rows.column, rows.length_index], axis=-1).swapaxes(0, 1).copy()
    )
    queries = int(batch.counts.max())
    first = torch.from_numpy(np.append(0, np.cumsum(batch.counts)).astype(np.int32)).to(device)
    place = address.to(device, torch.int32)
    scales = None
    if pool.dtype.itemsize == 1:
        scales = torch.ones(*rows.table.shape[1:], 2, device=device)
    stored = StoredPool.of(pool, scales)
    store.append(k, v, stored, tables, lengths, place, layer, first, queries)
    settings = {
        name: options.pop(name) for name in ("options", "plans", "planned_at") if name in options
    }
    planned_at: Any = settings.get("planned_at", batch.lengths.numpy())
    chosen: Any = settings.get("options", DecodeOptions())
    plans: Any = settings.get("plans", [plan])
    group = q.shape[1] // k.shape[1]
    asked = group * queries, chosen.of_rows(queries), planned_at
    needed = (Capacity.for_plan(each, *asked) for each in plans)
    decoder = GpuDecode(
        plans[0],
        stored,
        group,
        lengths=planned_at,
        options=chosen,
        capacity=reduce(Capacity.join, needed),
        queries=queries,
    )
    decoder.load(plan, planned_at)
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=device)
    rule = AttentionRule(SCALING, **options)  # type: ignore[arg-type]
    return decoder.attend(layer, q, tables, lengths, rule, out=out, first_tokens=first).cpu()


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.isfinite().all(), "something was not written, or read where there is nothing to read"
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(("softcap", "use_sinks"), [(None, False), (None, True), (2.0, False)])
def test_decode_equals_dense_attention(
    planner: str, softcap: float | None, use_sinks: bool, device: torch.device
) -> None:
    batch = make_batch(3, 2, 4, 64, longest=200)
    plan, sinks = PLANNERS[planner](batch), batch.sinks if use_sinks else None
    for layer in (0, 1):
        out = run(
            batch,
            plan,
            layer,
            device,
            softcap=softcap,
            sinks=None if sinks is None else sinks.to(device),
        )
        assert_close(out, dense_decode(batch, layer, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize(
    ("planner", "counts"),
    interpreter_few(
        [(name, counts) for name in PLANNERS for counts in ((1, 5, 9), (3, 2, 1), (2, 2, 2))],
        ("aot", (1, 5, 9)),
        ("work queue", (3, 2, 1)),
    ),
)
def test_a_draft_sees_the_entries_up_to_its_own(
    planner: str, counts: tuple[int, ...], device: torch.device
) -> None:
    batch = make_batch(3, 2, 3, 64, longest=200, counts=counts)
    plan = PLANNERS[planner](batch)
    for layer in (0, 1):
        out = run(batch, plan, layer, device, sinks=batch.sinks.to(device))
        assert_close(out, dense_decode(batch, layer, softcap=None, sinks=batch.sinks))


@pytest.mark.parametrize(
    ("planner", "group", "counts", "merge", "dtype"),
    interpreter_few(
        [
            (name, group, counts, merge, dtype)
            for name in PLANNERS
            for group in (6, 20, 128)
            for counts in ((1, 1, 1), (2, 2, 2), (1, 5, 9))
            if group * max(counts) <= 128
            for merge in MERGES
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        ("aot", 6, (1, 5, 9), "kernel", torch.float16),
        ("work queue", 128, (1, 1, 1), "tails", torch.bfloat16),
        ("work queue", 6, (1, 1, 1), "kernel", torch.bfloat16),
        ("work queue", 20, (1, 1, 1), "tails", torch.float16),
        ("plain", 20, (2, 2, 2), "tails", torch.float32),
    ),
)
def test_the_values_of_latents_are_the_first_elements_of_their_keys(
    planner: str,
    group: int,
    counts: tuple[int, ...],
    merge: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """128 query heads are more than one program has space for; in 16 bits few are columns."""
    batch = make_batch(3, 1, group, 72, longest=200, counts=counts, value_dim=64, dtype=dtype)
    plan = PLANNERS[planner](batch)
    for layer in (0, 1):
        out = run(batch, plan, layer, device, options=options(merge))
        assert_close(out, dense_decode(batch, layer, softcap=None, sinks=None))


@pytest.mark.parametrize("merge", ["tails", "kernel"])
@pytest.mark.parametrize(("counts", "refused"), [((4, 1, 3), 8), ((1, 1, 1), 40)])
def test_a_plan_serves_rows_whose_drafts_were_refused(
    counts: tuple[int, ...], refused: int, merge: str, device: torch.device
) -> None:
    batch = make_batch(3, 2, 2, 64, longest=150, counts=counts, seed=5)
    nowhere = batch.tables.new_full((refused,), len(batch.pool) - 1)  # where no row has a page
    batch.tables = torch.cat([batch.tables, nowhere])
    drafted = batch.lengths.numpy() + refused
    plan = plan_workqueue(batch.rows, drafted, Grain(8, tile_tokens=16, min_tokens=16))
    out = run(batch, plan, 0, device, planned_at=drafted, options=options(merge))
    assert_close(out, dense_decode(batch, 0, softcap=None, sinks=None))


@pytest.mark.parametrize(
    ("head_dim", "group", "page", "dtype"),
    interpreter_few(
        [
            (*shape, dtype)
            for shape in ((64, 3, 16), (80, 1, 8), (96, 8, 32), (128, 4, 64), (256, 2, 16))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        (64, 3, 16, torch.bfloat16),
        (80, 1, 8, torch.float32),
        (96, 8, 32, torch.float16),
        (128, 4, 64, torch.bfloat16),
        (256, 2, 16, torch.float16),
    ),
)
def test_head_dims_groups_pages_and_dtypes(
    head_dim: int, group: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    batch = make_batch(2, 2, group, head_dim, page=page, longest=150, dtype=dtype)
    for merge in MERGES:
        out = run(batch, PLANNERS["aot"](batch), 0, device, options=options(merge))
        assert_close(out, dense_decode(batch, 0, softcap=None, sinks=None))


def narrow(batch: Batch) -> Batch:
    """The same with entries that E4M3 holds, in an FP8 pool."""

    def round_entries(x: Tensor) -> Tensor:
        return x.float().to(torch.float8_e4m3fn).to(x.dtype)

    kv = [[[round_entries(x) for x in heads] for heads in layers] for layers in batch.kv]
    k, v, pool = round_entries(batch.k), round_entries(batch.v), batch.pool.float()
    return replace(batch, kv=kv, k=k, v=v, pool=pool.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("head_dim", "group", "counts", "value_dim", "dtype"),
    interpreter_few(
        [
            (*shape, dtype)
            for shape in (
                (64, 3, (1, 1, 1), None),
                (16, 4, (1, 1, 1), None),
                (80, 1, (1, 1, 1), None),
                (128, 4, (3, 1, 5), None),
                (256, 2, (1, 1, 1), None),
                (72, 20, (2, 2, 2), 64),
                (576, 16, (1, 1, 1), 512),
            )
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ],
        (64, 3, (1, 1, 1), None, torch.bfloat16),
        (16, 4, (1, 1, 1), None, torch.float16),
        (80, 1, (1, 1, 1), None, torch.float32),
        (128, 4, (3, 1, 5), None, torch.bfloat16),
        (72, 20, (2, 2, 2), 64, torch.float16),
    ),
)
def test_fp8_entries_answer_as_the_same_entries_do(
    head_dim: int,
    group: int,
    counts: tuple[int, ...],
    value_dim: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads = 1 if value_dim else 2
    batch = narrow(
        make_batch(
            3, heads, group, head_dim, longest=150, dtype=dtype, counts=counts, value_dim=value_dim
        )
    )
    out = run(batch, PLANNERS["work queue"](batch), 0, device, options=options("tails"))
    assert_close(out, dense_decode(batch, 0, softcap=None, sinks=None))


def test_queries_beyond_float16_lose_their_size_alone(device: torch.device) -> None:
    """With FP8 entries, queries in bfloat16 are multiplied in float16, which ends at 65,504.

    One that is no number stays none.
    """
    batch = narrow(make_batch(2, 2, 4, 64, longest=60, dtype=torch.bfloat16))
    batch.q.mul_(1e6)
    out = run(batch, PLANNERS["plain"](batch), 0, device)
    assert out.isfinite().all()
    batch.q[0, 0, 0] = torch.nan
    out = run(batch, PLANNERS["plain"](batch), 0, device)
    assert out[0, 0].isnan().all() and out[1].isfinite().all()


def options(merge: str, **changes: object) -> Any:
    from tangram.kernels.triton.packed import DecodeOptions

    return DecodeOptions(merge=merge, one_tile_tasks=0, **changes)  # type: ignore[arg-type]


def shared_batch(rows: int, group: int, prefix: int) -> tuple[Batch, WorkPlan]:
    """Rows whose first `prefix` entries are one and the same, read by one task a head, and a tail
    of each row's own.
    """
    batch = make_batch(rows, 2, group, 64, longest=120, seed=3)
    page, table = batch.rows.page_tokens, batch.rows.table
    lengths = batch.lengths.clone()
    lengths[:] = torch.from_numpy(
        np.random.default_rng(0).integers(prefix + 1, prefix + 60, len(lengths)).astype(np.int32)
    )
    pages = int(lengths.max()) // page + 1
    rows_table = np.arange(table.size).reshape(table.shape) * pages
    tables = np.random.default_rng(1).permutation(table.size * pages).astype(np.int32)
    pool = torch.randn(len(tables), *batch.pool.shape[1:])
    for row in range(1, rows):
        for layer, head in np.ndindex(table.shape[1:]):
            first, own = rows_table[0, layer, head], rows_table[row, layer, head]
            tables[own : own + prefix // page] = tables[first : first + prefix // page]
    column = np.broadcast_to(batch.rows.column[:1], table.shape).copy()
    old = batch.rows
    layout = DecodeRows.of(
        rows_table, column, old.length_index, old.budget, (None, None), old.page_tokens
    )
    kv = [
        [[_read(pool, tables, layout, lengths, (r, la, h)) for h in range(2)] for la in range(2)]
        for r in range(rows)
    ]
    shared = replace(
        batch, rows=layout, pool=pool, tables=torch.from_numpy(tables), lengths=lengths, kv=kv
    )
    return shared, _pack_plan(layout, prefix)


def _read(
    pool: Tensor, tables: np.ndarray, rows: DecodeRows, lengths: Tensor, cell: tuple[int, int, int]
) -> Tensor:
    """[2, length, D]: a copy of one head's entries."""
    table, column, length = (
        rows.table[cell],
        rows.column[cell],
        int(lengths[rows.length_index[cell]]),
    )
    places = tables[table : table + -(-length // pool.shape[3])].astype(np.int64)
    return pool[places, column].transpose(0, 1).flatten(1, 2)[:, :length].clone()


def _pack_plan(rows: DecodeRows, prefix: int) -> WorkPlan:
    count, layers, heads = rows.table.shape
    cells = [(layer, head) for layer in range(layers) for head in range(heads)]
    fields: list[tuple[int, ...]] = [
        (
            la,
            rows.table[0, la, h],
            rows.length_index[0, la, h],
            rows.column[0, la, h],
            h,
            0,
            0,
            prefix,
            count,
        )
        for la, h in cells
    ]
    members = [list(range(count))] * len(cells)
    for row in range(count):
        fields += [
            (
                la,
                rows.table[row, la, h],
                rows.length_index[row, la, h],
                rows.column[row, la, h],
                h,
                1,
                prefix,
                0,
                1,
            )
            for la, h in cells
        ]
        members += [[row]] * len(cells)
    columns = np.asarray(fields, np.int64).T
    return assemble(TaskList(*columns, np.concatenate(members)), layers, heads, 64)


@pytest.mark.parametrize(
    ("rows", "group", "merge", "fp8"),
    interpreter_few(
        [
            (*shape, merge, fp8)
            for shape in ((3, 4), (8, 4), (16, 4), (30, 4), (5, 3))
            for merge in MERGES
            for fp8 in (False, True)
        ],
        *((*shape, "tails", False) for shape in ((3, 4), (8, 4), (16, 4), (5, 3))),
        (8, 4, "kernel", True),
        (30, 4, "kernel", False),
        (30, 4, "tails", True),
    ),
)
def test_one_task_serves_rows_that_share_a_prefix(
    rows: int, group: int, merge: str, fp8: bool, device: torch.device
) -> None:
    """12, 32, 64, 120 and 15 queries: every tile size."""
    batch, plan = shared_batch(rows, group, prefix=64)
    batch = narrow(batch) if fp8 else batch
    check_plan(plan, batch.rows, batch.lengths.numpy(), batch.tables.numpy())
    last = [batch.kv[r][0][h][:, -1] for r in range(rows) for h in range(2)]
    kv = torch.stack(last).view(rows, 2, 2, 64)
    batch = replace(batch, k=kv[:, :, 0], v=kv[:, :, 1])
    out = run(batch, plan, 0, device, options=options(merge))
    assert_close(out, dense_decode(batch, 0, softcap=None, sinks=None))


def test_a_short_tail_finishes_its_row() -> None:
    """Each row's tail runs with the smallest tile, after the shared prefix: nothing is left for the
    merge kernel.
    """
    from tangram.kernels.triton.packed import pack

    batch, plan = shared_batch(8, 4, prefix=64)
    packed = pack(plan, 4, options("tails"), batch.lengths.numpy())
    assert packed.finishes.sum() == len(plan.segments) == 8 * 2 * 2
    assert not packed.arrays["segments"].size
    apart = pack(plan, 4, options("kernel"), batch.lengths.numpy())
    assert not apart.finishes.any()
    assert len(apart.arrays["segments"]) == len(plan.segments)


def test_buffers_with_slack_take_plans_that_differ_a_little(device: torch.device) -> None:
    from tangram.kernels.triton.decode_launch import GpuDecode
    from tangram.kernels.triton.packed import Capacity, DecodeOptions
    from tangram.kernels.triton.stored import StoredPool

    batch = make_batch(3, 2, 4, 64, longest=2000)
    pool = StoredPool.of(batch.pool.to(device))
    small, like_it, large = (
        plan_aot(batch.rows, workers, tile_tokens=16) for workers in (14, 15, 90)
    )
    needed = [Capacity.for_plan(plan, 4, DecodeOptions(), None) for plan in (small, large)]
    decoder = GpuDecode(small, pool, 4, capacity=needed[0].with_slack(None))
    assert decoder.takes(like_it)
    assert not decoder.takes(large)
    with pytest.raises(ConfigError, match="in tasks, the buffers hold"):
        decoder.load(large)
    larger = GpuDecode(large, pool, 4, capacity=needed[1].with_slack(decoder.capacity))
    assert larger.takes(small) and larger.takes(like_it) and larger.takes(large)


@pytest.mark.parametrize("merge", MERGES)
def test_equal_plans_give_equal_bits_and_counters_return_to_zero(
    merge: str, device: torch.device
) -> None:
    from tangram.kernels.triton.decode_launch import GpuDecode
    from tangram.kernels.triton.stored import StoredPool

    batch = make_batch(3, 2, 4, 64, longest=200)
    plan = PLANNERS["aot"](batch)
    pool, q, tables, lengths = (
        x.to(device) for x in (batch.pool.nan_to_num(0.5), batch.q, batch.tables, batch.lengths)
    )
    decoder = GpuDecode(plan, StoredPool.of(pool), 4, options=options(merge))
    first, again = (decoder.attend(0, q, tables, lengths, AttentionRule(SCALING)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("rows", "longest", "workers"),
    [(2, 100, 12), pytest.param(3, 200, 24, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("merge", MERGES)
def test_decoders_that_share_buffers_answer_as_alone(
    merge: str, rows: int, longest: int, workers: int, device: torch.device
) -> None:
    """Each has its plan loaded again before it attends, as an engine does between widths."""
    from tangram.kernels.triton.decode_launch import GpuDecode, PlanBuffers
    from tangram.kernels.triton.stored import StoredPool

    batch = make_batch(rows, 2, 4, 64, longest=longest)
    pool, q, tables, lengths = (
        x.to(device) for x in (batch.pool.nan_to_num(0.5), batch.q, batch.tables, batch.lengths)
    )
    plans = [plan_aot(batch.rows, most, tile_tokens=16) for most in (workers, 3)]
    shared = PlanBuffers(device)
    settings: Any = {"group": 4, "pool": StoredPool.of(pool), "options": options(merge)}
    settings["lengths"] = batch.lengths.numpy()
    alone, sharing = (
        [GpuDecode(plan, **settings, buffers=buffers) for plan in plans]
        for buffers in (None, shared)
    )

    def attend(decoder: GpuDecode, plan: WorkPlan) -> Tensor:
        decoder.load(plan, batch.lengths.numpy())
        return decoder.attend(0, q, tables, lengths, AttentionRule(SCALING))

    expected = [attend(*each) for each in zip(alone, plans, strict=True)]
    for number in (0, 1, 0, 1):
        assert torch.equal(attend(sharing[number], plans[number]), expected[number])


def test_a_plan_that_lies_in_shared_buffers_is_not_uploaded_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tangram.kernels.triton.decode_launch import GpuDecode, PlanBuffers
    from tangram.kernels.triton.stored import StoredPool

    batch, uploads = make_batch(2, 2, 4, 64, longest=100), list[object]()
    plans = [plan_aot(batch.rows, most, tile_tokens=16) for most in (12, 3)]
    shared = PlanBuffers(device)
    pool = StoredPool.of(batch.pool.to(device))
    decoders = [GpuDecode(plans[0], pool, 4, buffers=shared) for _ in range(2)]
    upload = GpuDecode._upload

    def count(decoder: GpuDecode, *arrays: Any) -> None:
        uploads.append(decoder)
        upload(decoder, *arrays)

    monkeypatch.setattr(GpuDecode, "_upload", count)
    for number in (1, 1, 0, 0, 1):
        assert decoders[number].takes(plans[0])
    assert uploads == [decoders[0], decoders[1]]
    assert decoders[1].takes(plans[1]) and decoders[1].takes(plans[0])
    assert uploads[2:] == [decoders[1], decoders[1]]


def test_shared_buffers_are_one_memory_until_one_needs_more(device: torch.device) -> None:
    from tangram.kernels.triton.decode_launch import PlanBuffers

    buffers = PlanBuffers(device)
    large = buffers.take("plan", 100, torch.int32)
    assert not large.any()
    assert buffers.take("plan", 60, torch.int32).data_ptr() == large.data_ptr()
    larger = buffers.take("plan", 101, torch.int32)
    larger.fill_(1)
    assert not large.any(), "graphs refer to it"


def test_a_first_plan_leaves_space_for_twice_as_many_tasks(device: torch.device) -> None:
    from tangram.kernels.triton.decode_launch import GpuDecode
    from tangram.kernels.triton.packed import Capacity, DecodeOptions
    from tangram.kernels.triton.stored import StoredPool

    batch = make_batch(3, 2, 4, 64, longest=2000)
    first, next_one = (plan_aot(batch.rows, workers, tile_tokens=16) for workers in (14, 26))
    tight = Capacity.for_plan(first, 4, DecodeOptions(), None)
    pool, roomy = StoredPool.of(batch.pool.to(device)), tight.with_slack(None)
    assert not GpuDecode(first, pool, 4).takes(next_one)
    assert GpuDecode(first, pool, 4, capacity=roomy).takes(next_one)
    sizes = [roomy.sizes, tight.with_slack(tight).sizes]
    grows = {"tasks", "entries", "segments"}
    assert all(size == (1 + (name in grows)) * sizes[1][name] for name, size in sizes[0].items())


def test_a_plan_made_before_growth_serves_longer_rows(device: torch.device) -> None:
    short = make_batch(2, 2, 2, 64, longest=40, seed=1)
    grown = make_batch(2, 2, 2, 64, longest=400, seed=2)
    plan = plan_aot(replace(grown.rows, budget=short.rows.budget), 8, tile_tokens=64)
    assert_close(run(grown, plan, 0, device), dense_decode(grown, 0, softcap=None, sinks=None))


def test_short_tasks_take_whatever_their_rows_grow_to(device: torch.device) -> None:
    """Sorted by length as short, their rows have since grown over several tiles."""
    batch = make_batch(2, 2, 2, 64, longest=300, seed=2)
    plan = plan_plain(replace(batch.rows, windows=(None, None)))
    for then in (np.ones_like(batch.lengths.numpy()), batch.lengths.numpy()):
        out = run(batch, plan, 0, device, options=options("kernel"), planned_at=then)
        assert_close(out, dense_decode(batch, 0, softcap=None, sinks=None))


def test_buffers_take_any_plan_that_fits_and_refuse_others(device: torch.device) -> None:
    batch = make_batch(3, 2, 4, 64, longest=200)
    large, small = (
        PLANNERS["work queue"](batch),
        plan_workqueue(batch.rows, batch.lengths.numpy(), Grain(1, tile_tokens=64)),
    )
    out = run(batch, small, 0, device, plans=[large, small])
    assert_close(out, dense_decode(batch, 0, softcap=None, sinks=None))
    with pytest.raises(ConfigError, match="the buffers hold"):
        run(batch, large, 0, device, plans=[small])
    with pytest.raises(ConfigError, match="tile_tokens 16"):
        run(batch, plan_plain(batch.rows), 0, device, plans=[large])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("merge", MERGES)
def test_a_captured_graph_replays_under_changing_plans(merge: str, device: torch.device) -> None:
    from tangram.kernels.triton.decode_launch import GpuDecode
    from tangram.kernels.triton.packed import Capacity
    from tangram.kernels.triton.stored import StoredPool

    batch = make_batch(6, 2, 4, 128, longest=3000, dtype=torch.bfloat16)
    made = [
        plan_plain(batch.rows),
        plan_aot(batch.rows, 132, tile_tokens=16),
        plan_aot(batch.rows, 7, tile_tokens=16),
    ]
    pool = StoredPool.of(batch.pool.to(device))
    q, tables, lengths = (x.to(device) for x in (batch.q, batch.tables, batch.lengths))
    from tangram.kernels.triton import store

    rows = batch.rows
    address = torch.from_numpy(
        np.stack([rows.table, rows.column, rows.length_index], axis=-1).swapaxes(0, 1).copy()
    )
    store.append(
        batch.k.to(device),
        batch.v.to(device),
        pool,
        tables,
        lengths,
        address.to(device, torch.int32),
        0,
    )
    needed = (Capacity.for_plan(plan, 4, options(merge), None) for plan in made)
    capacity = reduce(Capacity.join, needed)
    decoder = GpuDecode(made[0], pool, 4, options=options(merge), capacity=capacity)
    decoder.attend(0, q, tables, lengths, AttentionRule(SCALING))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder.attend(0, q, tables, lengths, AttentionRule(SCALING))
    expected = dense_decode(batch, 0, softcap=None, sinks=None)
    for plan in [*made, *made]:
        decoder.load(plan)
        results = []
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            results.append(out.cpu())
        assert_close(results[0], expected)
        assert torch.equal(*results)
