"""Decode and prefill kernels against other people's attention, and the compiled kernel against the
specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.errors import IntegrityError
from tangram.kernels import reference
from tangram.kernels.cpu import compiled_attention, decode_loops
from tangram.kernels.cpu.cpu_kernels import CpuKernels
from tangram.kernels.cpu.entry_products import widen
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import AttentionRule, KvPool
from tangram.kernels.narrow import NARROW, as_entries
from tangram.kernels.reference_kernels import ReferenceKernels
from tangram.plan.aot import plan_aot
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.split import plan_plain
from tangram.plan.workqueue import Grain, plan_workqueue
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tests.examples import examples
from tests.paged import SCALING, WINDOW, Batch, dense_attention, dense_decode, make_batch
from tests.plans import TaskList, assemble


def plans(rows: DecodeRows) -> list[WorkPlan]:
    """Whole heads; shares, some of them EMPTY (heads shorter than the tile); many shares of one
    tile.
    """
    return [
        plan_plain(rows),
        plan_aot(rows, 16, tile_tokens=256),
        plan_aot(rows, 40, tile_tokens=16),
    ]


def run_reference(batch: Batch, plan: WorkPlan, layer: int, **options: object) -> Tensor:
    table, column, index = batch.address(layer)
    pages = batch.pool, batch.tables, batch.lengths
    reference.append(batch.k, batch.v, *pages, table, column, index, batch.counts)
    return reference.decode(
        batch.q,
        batch.pool,
        batch.tables,
        batch.lengths,
        plan,
        layer,
        AttentionRule(SCALING, **options),  # type: ignore[arg-type]
        counts=batch.counts,
        value_dim=batch.v.shape[2],
    )


def run_compiled(
    batch: Batch, plan: WorkPlan, layer: int, threads: int = 1, **options: object
) -> Tensor:
    first, pages = np.append(0, np.cumsum(batch.counts)), (batch.pool, batch.tables, batch.lengths)
    known = compiled_attention.CpuPlan.build(plan, batch.rows.address, threads)
    rule = AttentionRule(SCALING, **options)  # type: ignore[arg-type]
    out = batch.q.new_empty((*batch.q.shape[:2], batch.v.shape[2]))
    rows = compiled_attention.DecodePass(*pages, first, known)
    rows.run(batch.q, batch.k, batch.v, out, layer, rule)
    return out


OPTIONS = [(None, False), (None, True), (2.0, False)]  # softcap, sinks
# R, H, G, D, P
SHAPES = [(3, 1, 1, 16, 16), (2, 2, 4, 80, 8), (4, 3, 3, 64, 16), (1, 3, 1, 64, 32)]
# D is whole vectors of 4, or no whole vectors.
SHAPES += [(2, 2, 3, 24, 16), (2, 1, 5, 18, 16)]


@pytest.mark.parametrize("run", [run_reference, run_compiled])
@pytest.mark.parametrize(("softcap", "use_sinks"), OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_dense_attention(
    run, shape: tuple[int, ...], softcap: float | None, use_sinks: bool
) -> None:  # type: ignore[no-untyped-def]
    r, h, g, d, page = shape
    batch = make_batch(r, h, g, d, page=page)
    sinks = batch.sinks if use_sinks else None
    for plan in plans(batch.rows):
        check_plan(plan, batch.rows, batch.lengths.numpy())
        for layer in (0, 1):
            out = run(batch.copy(), plan, layer, softcap=softcap, sinks=sinks)
            expected = dense_decode(batch, layer, softcap=softcap, sinks=sinks)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("run", [run_reference, run_compiled])
@pytest.mark.parametrize(("softcap", "use_sinks"), OPTIONS)
@pytest.mark.parametrize("longest", [9, 60, 300])
def test_a_draft_sees_the_entries_up_to_its_own(
    run, longest: int, softcap: float | None, use_sinks: bool
) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(4, 2, 3, 32, longest=longest, counts=(1, 5, 9, 2), seed=longest)
    sinks = batch.sinks if use_sinks else None
    for plan in plans(batch.rows):
        for layer in (0, 1):
            out = run(batch.copy(), plan, layer, softcap=softcap, sinks=sinks)
            expected = dense_decode(batch, layer, softcap=softcap, sinks=sinks)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_draft_gets_the_bits_that_its_token_gets_alone(
    seed: int, pool_dtype: torch.dtype
) -> None:
    """Speculation changes no bit of a full layer's attention where the plan splits nothing."""
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(2, 10))
    page, longest = int(rng.choice([4, 16])), int(rng.choice([20, 130, 400]))
    drafted = make_batch(1, 2, 3, 64, page=page, longest=longest, counts=(tokens,), seed=seed)
    drafted.pool = drafted.pool.to(pool_dtype)
    alone = drafted.copy()
    plan = plan_plain(drafted.rows)
    together = run_compiled(drafted, plan, 0)
    for token in range(tokens):
        own = slice(token, token + 1)
        one = replace(
            alone,
            lengths=alone.lengths - (tokens - 1 - token),
            q=alone.q[own],
            k=alone.k[own],
            v=alone.v[own],
            counts=np.ones(1, np.int32),
        )
        assert torch.equal(run_compiled(one, plan, 0), together[own])


@pytest.mark.parametrize("run", [run_reference, run_compiled])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 5, 2)])
def test_the_values_of_latents_are_the_first_elements_of_their_keys(
    run, counts: tuple[int, ...]
) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(3, 1, 6, 72, counts=counts, seed=len(counts), value_dim=64)
    for plan in plans(batch.rows):
        for layer in (0, 1):
            out = run(batch.copy(), plan, layer)
            expected = dense_decode(batch, layer, softcap=None, sinks=None)
            assert out.shape[2] == 64
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("run", [run_reference, run_compiled])
@settings(max_examples=examples(60), deadline=None)
@given(
    counts=st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=3),
    longest=st.sampled_from([5, 17, 60, 200]),
    shrinkage=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    page=st.sampled_from([4, 16]),
    workers=st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_a_plan_serves_rows_whose_drafts_were_refused(
    run, counts: list[int], longest: int, shrinkage: list[int], page: int, workers: int, seed: int
) -> None:  # type: ignore[no-untyped-def]
    """A plan with fixed ranges, made when the rows were longer. What follows a row is NaN."""
    batch = make_batch(len(counts), 2, 2, 16, page=page, longest=longest, counts=counts, seed=seed)
    nowhere = batch.tables.new_full((40,), len(batch.pool) - 1)  # where no row has a page
    batch.tables = torch.cat([batch.tables, nowhere])
    drafted = batch.lengths.numpy().copy()
    for row, refused in enumerate(shrinkage[: len(counts)]):
        drafted[batch.rows.length_index[row]] += refused
    plan = plan_workqueue(batch.rows, drafted, Grain(workers, tile_tokens=16, min_tokens=16))
    for layer in (0, 1):
        expected = dense_decode(batch, layer, softcap=None, sinks=None)
        torch.testing.assert_close(run(batch.copy(), plan, layer), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, *NARROW.values()], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_the_compiled_kernel_equals_the_specification(seed: int, pool_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    h, g, d = (int(rng.choice(options)) for options in ([1, 2, 3], [1, 3, 4], [16, 64, 80]))
    longest = int(rng.choice([2, 40, 600]))
    batch = make_batch(
        int(rng.integers(1, 5)),
        h,
        g,
        d,
        page=int(rng.choice([4, 16, 64])),
        longest=longest,
        seed=seed,
    )
    batch.pool = as_entries(batch.pool, pool_dtype)
    for plan in plans(batch.rows):
        for layer in (0, 1):
            ours, theirs = batch.copy(), batch.copy()
            options = {"softcap": 3.0, "sinks": batch.sinks}
            out, expected = (
                run_compiled(ours, plan, layer, **options),
                run_reference(theirs, plan, layer, **options),
            )
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(*(one.pool.float().nan_to_num(7.0) for one in (ours, theirs)))


def test_a_plan_made_before_growth_serves_longer_rows() -> None:
    short = make_batch(2, 2, 2, 16, longest=40, seed=1)
    grown = make_batch(2, 2, 2, 16, longest=600, seed=2)
    plan = plan_aot(replace(grown.rows, budget=short.rows.budget), 8, tile_tokens=64)
    expected = dense_decode(grown, 0, softcap=None, sinks=None)
    torch.testing.assert_close(run_compiled(grown.copy(), plan, 0), expected, rtol=1e-4, atol=2e-5)


def test_one_task_may_serve_rows_that_share_a_prefix() -> None:
    """Rows 0 and 1 share their first 32 entries: reading them once gives what reading them twice
    gives.
    """
    batch = make_batch(2, 1, 3, 16, longest=200, seed=3)
    rows, tables = batch.rows, batch.tables
    batch.lengths[rows.length_index[:, 0, 0]] = torch.tensor([64, 100], dtype=torch.int32)
    batch.pool.nan_to_num_(0.5)
    rows.column[1, 0, 0] = rows.column[0, 0, 0]
    at = rows.table[:, 0, 0]
    tables[at[1] : at[1] + 2] = tables[at[0] : at[0] + 2]
    one = np.ones(3, np.int64)
    shared = assemble(
        TaskList(
            layer=one * 0,
            table=at[[0, 0, 1]],
            length_index=rows.length_index[[0, 0, 1], 0, 0],
            column=rows.column[[0, 0, 1], 0, 0],
            head=one * 0,
            kind=np.array([0, 1, 1]),
            a=np.array([0, 32, 32]),
            b=np.array([32, 0, 0]),
            row_count=np.array([2, 1, 1]),
            rows=np.array([0, 1, 0, 1]),
        ),
        layers=1,
        kv_heads=1,
        tile_tokens=16,
    )
    whole = run_compiled(batch.copy(), plan_plain(rows), 0)
    for run in (run_reference, run_compiled):
        torch.testing.assert_close(run(batch.copy(), shared, 0), whole, rtol=1e-4, atol=1e-5)


def test_two_threads_give_the_same_bits_every_time() -> None:
    batch = make_batch(4, 3, 3, 64, longest=4000, seed=4)
    plan = plan_aot(batch.rows, 8, tile_tokens=64)
    alone = run_compiled(batch.copy(), plan, 0, threads=1)
    for _ in range(5):
        assert torch.equal(run_compiled(batch.copy(), plan, 0, threads=2), alone)


@pytest.mark.parametrize(
    ("dtype", "run", "serving"),
    [(torch.bfloat16, run_compiled, CpuKernels), (torch.float16, run_reference, ReferenceKernels)],
)
def test_half_precision_pools_are_served_too(
    dtype: torch.dtype, run: Callable[..., Tensor], serving: type[ReferenceKernels]
) -> None:
    batch = make_batch(2, 2, 3, 64, dtype=dtype)
    out = run(batch.copy(), plan_aot(batch.rows, 8), 0)
    assert out.dtype == dtype and type(pool_kernels(KvPool(batch.pool, 3, 2, 2))) is serving
    torch.testing.assert_close(
        out, dense_decode(batch, 0, softcap=None, sinks=None), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize(
    ("bits", "dtype", "codes"),
    [
        (torch.uint8, torch.float8_e4m3fn, 1 << 8),
        (torch.int8, torch.int8, 255),
        (torch.uint16, torch.bfloat16, 1 << 16),
    ],
    ids=["E4M3", "int8", "bfloat16"],
)
@pytest.mark.parametrize("width", [18, 24, 64])  # no, short, or whole vectors
def test_every_code_of_a_narrow_pool_is_read_as_torch_reads_it(
    bits: torch.dtype, dtype: torch.dtype, codes: int, width: int
) -> None:
    """Subnormal numbers and NaN too; of integers all but −128, which is NaN."""
    count, first = codes + -codes % width, -127 if dtype is torch.int8 else 0
    code = torch.arange(count, dtype=torch.int32) % codes + first
    entries = code.to(bits).view(-1, width)
    expected = entries.view(dtype).float().numpy()
    wide = np.empty(entries.shape, np.float32)
    pool = torch.stack([torch.zeros_like(entries), entries])[None]
    widen_all(pool.numpy(), wide)
    np.testing.assert_array_equal(wide, expected)
    sums = np.zeros((len(entries), 1, width), np.float32)
    add_each(pool.numpy(), sums)
    np.testing.assert_array_equal(sums[:, 0], expected)


@numba.njit
def widen_all(pool, wide):  # type: ignore[no-untyped-def]
    """Write all values of the one block of `pool`."""
    widen(pool, 0, 1, 0, len(wide), wide)


@numba.njit
def add_each(pool, sums):  # type: ignore[no-untyped-def]
    """sums[t] += value t of the one block of `pool`."""
    for t in range(len(sums)):
        decode_loops.add_values(np.ones((1, 1), np.float32), 0, pool, 0, t, t + 1, sums[t])


def run_compiled_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: Tensor,
    pasts: tuple[np.ndarray, np.ndarray, np.ndarray],
    rule: AttentionRule,
    *,
    past_tokens: int,
) -> Tensor:
    """`reference.prefill` by the compiled kernel."""
    out, spans = torch.full_like(q, torch.nan), [[0, len(q), 0, len(k), past_tokens]]
    places = np.stack(pasts, axis=-1)[None].astype(np.int32)
    compiled_attention.prefill(q, k, v, out, pool, tables, places, np.array(spans, np.int32), rule)
    return out


def compiles(dtype: torch.dtype) -> bool:
    one = torch.zeros(1, 1, 2, 1, 2, dtype=dtype)
    return compiled_attention.prefills_compiled(one[0, 0], one)


PREFILLS = [reference.prefill, *([run_compiled_prefill] if compiles(torch.float32) else [])]


def prefill(
    run, batch: Batch, layer: int, n: int, past: list[int], **options: object
) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Row 0's next n tokens after `past` entries of each head: ours, and dense
    attention's answer.
    """
    torch.manual_seed(n)
    (_, heads, d), group = batch.k.shape, batch.q.shape[1] // batch.k.shape[1]
    q, k, v = torch.randn(n, heads * group, d), torch.randn(n, heads, d), torch.randn(n, heads, d)
    q, k, v = (x.to(batch.pool.dtype) for x in (q, k, v))
    table, column = batch.rows.table[0, layer], batch.rows.column[0, layer]
    out = run(
        q,
        k,
        v,
        batch.pool,
        batch.tables,
        (table, column, np.array(past)),
        AttentionRule(SCALING, batch.rows.windows[layer], **options),  # type: ignore[arg-type]
        past_tokens=max(past),
    )
    dense = torch.empty_like(out).unflatten(1, (heads, group))
    for head in range(heads):
        keys, values = (
            torch.cat([batch.kv[0][layer][head][i, : past[head]], x[:, head]])
            for i, x in ((0, k), (1, v))
        )
        distance = torch.arange(n)[:, None] + past[head] - torch.arange(past[head] + n)
        visible = (distance >= 0) & (distance < WINDOW if layer else True)
        mask = torch.where(visible, 0.0, -torch.inf)
        softcap, sinks = options.get("softcap"), options.get("sinks")
        sink = None if sinks is None else sinks.view(heads, group)[head]  # type: ignore[attr-defined]
        queries = q.unflatten(1, (heads, group))[:, head]
        dense[:, head] = dense_attention(queries, keys, values, mask, softcap=softcap, sinks=sink)  # type: ignore[arg-type]
    return out, dense.flatten(1, 2)


@pytest.mark.parametrize("run", PREFILLS)
@pytest.mark.parametrize(("softcap", "use_sinks"), OPTIONS)
@pytest.mark.parametrize("n", [1, 33, 120])
def test_prefill_over_a_ragged_past_equals_dense_attention(
    run, n: int, softcap: float | None, use_sinks: bool
) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(1, 3, 3, 64, longest=200, seed=5)
    past = [max(0, kv.shape[1] - 1) for kv in batch.kv[0][0]]
    for lengths in (past, [min(past)] * 3, [0, 0, past[2]], [0, 0, 0]):
        out, dense = prefill(
            run, batch, 0, n, lengths, softcap=softcap, sinks=batch.sinks if use_sinks else None
        )
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("run", PREFILLS)
@pytest.mark.parametrize(("softcap", "use_sinks"), OPTIONS)
@pytest.mark.parametrize(
    ("n", "past"), [(1, 130), (20, 130), (120, 130), (120, 20), (10, 20), (70, 0)]
)
def test_prefill_with_a_window_reads_only_what_it_sees(
    run, n: int, past: int, softcap: float | None, use_sinks: bool
) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(1, 2, 2, 16, longest=1, seed=6)
    first_seen = max(0, past - WINDOW + 1) // 16 * 16
    offset = torch.arange(-(-past // 16) * 2, dtype=torch.int32).view(2, -1)
    batch.pool = torch.full((offset.numel() + 1, 4, 2, 16, 16), torch.nan)
    batch.tables = torch.where(
        torch.arange(offset.shape[1]) >= first_seen // 16, offset, offset.numel()
    ).flatten()
    batch.rows.table[0, 1] = [0, offset.shape[1]]
    for head in (0, 1):
        batch.kv[0][1][head] = torch.randn(2, past, 16)
        for entry in range(first_seen, past):
            page = batch.tables[head * offset.shape[1] + entry // 16]
            batch.pool[page, batch.rows.column[0, 1, head], :, entry % 16] = batch.kv[0][1][head][
                :, entry
            ]
    out, dense = prefill(
        run, batch, 1, n, [past, past], softcap=softcap, sinks=batch.sinks if use_sinks else None
    )
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("run", PREFILLS)
def test_prefill_refuses_a_window_layer_whose_entries_are_not_positions(run) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(1, 2, 2, 16, longest=100, seed=7)
    with pytest.raises(IntegrityError, match="past_lengths"):
        prefill(run, batch, 1, 3, [10, 11])


@pytest.mark.parametrize("run", PREFILLS)
def test_prefill_does_not_depend_on_where_pages_lie(run) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(1, 3, 3, 64, longest=200, seed=8)
    past = [max(0, kv.shape[1] - 1) for kv in batch.kv[0][0]]
    first, _ = prefill(run, batch, 0, 64, past)
    move = torch.randperm(len(batch.pool))
    moved = replace(
        batch, pool=torch.empty_like(batch.pool), tables=move[batch.tables.long()].int()
    )
    moved.pool[move] = batch.pool
    assert torch.equal(prefill(run, moved, 0, 64, past)[0], first)


@dataclass
class Chunks:
    """Prefill rows [queries, keys, past tokens] over pages that hold NaN where nothing may read."""

    rows: list[tuple[int, int, int]]
    group: int
    window: int | None
    q: Tensor
    k: Tensor
    v: Tensor
    pool: Tensor
    tables: Tensor
    address: np.ndarray

    @classmethod
    def make(
        cls,
        seed: int,
        rows: list[tuple[int, int, int]],
        sizes: tuple[int, int, int, int],
        window: int | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> Chunks:
        """Sizes are heads, G, D and P; heads of a full layer keep different shares of a past."""
        rng, _ = np.random.default_rng(seed), torch.manual_seed(seed)
        (heads, group, dim, page), (dtype, pool_dtype) = sizes, dtypes
        queries, keys = (sum(row[i] for row in rows) for i in (0, 1))
        q = torch.randn(queries, heads * group, dim).to(dtype)
        k, v = torch.randn(2, keys, heads, dim).to(dtype)
        address = np.zeros((len(rows), heads, 3), np.int32)
        address[..., 1] = rng.integers(0, 2, (len(rows), heads))
        for row, (_, _, past) in enumerate(rows):
            kept = rng.integers(past // 3, past + 1, heads)
            address[row, :, 2] = past if window is not None else kept
        pages = -(-address[..., 2] // page)
        address[..., 0] = (np.cumsum(pages) - pages.ravel()).reshape(pages.shape)
        tables = torch.from_numpy(rng.permutation(int(pages.sum()) + 1).astype(np.int32))
        pool = torch.full((len(tables), 2, 2, page, dim), torch.nan)
        for (table, column, length), count in zip(
            address.reshape(-1, 3).tolist(), pages.ravel().tolist(), strict=True
        ):
            entries = torch.randn(2, count * page, dim)
            entries[:, length:] = torch.nan
            pool[tables[table : table + count].long(), column] = entries.view(
                2, count, page, dim
            ).transpose(0, 1)
        pool = as_entries(pool, pool_dtype)
        return cls(rows, group, window, q, k, v, pool, tables, address)

    def attend(self, only: int | None = None, **options: object) -> list[Tensor]:
        """The results of all rows, or of row `only` alone."""
        spans, first, own = [], 0, 0
        for queries, keys, past in self.rows:
            spans.append([first, first + queries, own, own + keys, past])
            first, own = first + queries, own + keys
        rows = slice(None) if only is None else slice(only, only + 1)
        out, places = torch.full_like(self.q, torch.nan), np.array(spans, np.int32)[rows]
        compiled_attention.prefill(
            self.q,
            self.k,
            self.v,
            out,
            self.pool,
            self.tables,
            self.address[rows],
            places,
            AttentionRule(SCALING, self.window, **options),  # type: ignore[arg-type]
        )
        return [out[begin:end] for begin, end in places[:, :2].tolist()]

    def expect(self, softcap: float | None, sinks: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Softmax in float64, and the same of the values' sizes, of each row [n, Q, D]."""
        found, own = [], 0
        queries = self.q.double().split([row[0] for row in self.rows])
        for (n, keys, _), asked, places in zip(self.rows, queries, self.address, strict=True):
            heads, own = [], own + keys
            for head, (table, column, length) in enumerate(places.tolist()):
                held = reference.gather(self.pool, self.tables, table, column, 0, length)
                k, v = (
                    torch.cat([x.to(self.q.dtype), new[own - keys : own, head]]).double()
                    for x, new in zip(held, (self.k, self.v), strict=True)
                )
                newest = length + keys - n + torch.arange(n)[:, None]
                seen = (entry := torch.arange(length + keys)) <= newest
                if self.window is not None:
                    seen &= entry > newest - self.window
                for query in range(head * self.group, (head + 1) * self.group):
                    scores = asked[:, query] @ k.T * SCALING
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    scores = torch.where(seen, scores, -torch.inf)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[query].expand(n, 1)], 1)
                    weights = torch.softmax(scores, 1)[:, : length + keys]
                    heads.append(torch.stack([weights @ x for x in (v, v.abs())]))
            found.append(tuple(torch.stack(heads, 2)))
        return found


LENGTHS = st.tuples(st.integers(1, 300), st.integers(0, 20), st.integers(0, 700))
SIZES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 2, 3, 5]), st.sampled_from([16, 64, 80]), st.just(16)
)
DTYPES = [  # of queries and of the pool
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.int8),
    pytest.param((torch.float32, torch.int8), marks=pytest.mark.nightly),
    pytest.param((torch.float32, torch.float8_e4m3fn), marks=pytest.mark.nightly),
    pytest.param((torch.float32, torch.bfloat16), marks=pytest.mark.nightly),
    pytest.param((torch.bfloat16, torch.float32), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_compiled_prefill_is_softmax_and_a_row_is_the_same_alone(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """A weight in bfloat16 is off by 2⁻⁸ of its size, and so is the result when it is rounded."""
    if not compiles(dtypes[0]):
        pytest.skip("this processor lacks the instructions")
    bound = 1e-5 if dtypes[0] is torch.float32 else 1.01 * 2.0**-7

    @settings(max_examples=examples(40), derandomize=True)
    @given(
        seed=st.integers(0, 999),
        lengths=st.lists(LENGTHS, min_size=1, max_size=3),
        sizes=SIZES,
        window=st.sampled_from([None, None, 1, 50, 600]),
        softcap=st.sampled_from([None, None, 3.0]),
        use_sinks=st.booleans(),
    )
    def check(
        seed: int,
        lengths: list[tuple[int, int, int]],
        sizes: tuple[int, int, int, int],
        window: int | None,
        softcap: float | None,
        use_sinks: bool,
    ) -> None:
        rows = [(n, n + lead, past) for n, lead, past in lengths]
        chunks = Chunks.make(seed, rows, sizes, window, dtypes)
        sinks = torch.randn(sizes[0] * sizes[1]) if use_sinks else None
        together = chunks.attend(softcap=softcap, sinks=sinks)
        for number, (expected, size) in enumerate(chunks.expect(softcap, sinks)):
            assert ((together[number].double() - expected).abs() <= bound * size + 1e-6).all()
            assert torch.equal(
                together[number], *chunks.attend(number, softcap=softcap, sinks=sinks)
            )

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_prefill_gives_the_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    if not compiles(dtype):
        pytest.skip("this processor lacks the instructions")
    rows = [(512, 512, 700), (512, 512, 1212), (30, 30, 0)]
    chunks = Chunks.make(1, rows, (3, 3, 64, 16), None, (dtype, dtype))
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(torch.cat(chunks.attend()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_an_entry_that_is_no_number_shows_in_what_sees_it() -> None:
    """A sequence whose cache holds such entries is found by its answers (`cache/purge.py`)."""
    if not compiles(torch.float32):
        pytest.skip("this processor lacks the instructions")
    chunks = Chunks.make(2, [(40, 40, 0), (5, 5, 60)], (2, 2, 16, 16), None, (torch.float32,) * 2)
    chunks.k[20], chunks.v[20] = torch.nan, torch.nan
    first, second = chunks.attend()
    assert first[20:].isnan().all() and second.isfinite().all()


@pytest.mark.parametrize("counts", [[7, 7, 7], [0, 5, 40]])
def test_stored_entries_are_read_back_and_nothing_else_is_touched(counts: list[int]) -> None:
    batch = make_batch(1, 3, 1, 16, longest=200, seed=9)
    before = batch.pool.clone()
    table, column, _ = (x[0] for x in batch.address(0))
    first = np.array([0, 3, 18])
    lengths = batch.lengths[batch.rows.length_index[0, 0]].numpy()
    stored = [max(0, min(c, int(n) - f)) for c, n, f in zip(counts, lengths, first, strict=True)]
    k, v = ([torch.randn(c, 16) for c in stored] for _ in range(2))
    equal = len(set(stored)) == 1
    keys, values = (torch.stack(x) if equal else x for x in (k, v))
    reference.store(keys, values, batch.pool, batch.tables, table, column, first)
    for head, count in enumerate(stored):
        span = int(table[head]), int(column[head]), int(first[head]), int(first[head]) + count
        read = reference.gather(batch.pool, batch.tables, *span)
        assert torch.equal(read[0], k[head]) and torch.equal(read[1], v[head])
    changed = (batch.pool.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1).any(2).sum()
    assert sum(stored) > 0 and changed == sum(stored)
