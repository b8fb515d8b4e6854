"""Prefill, append and sealing kernels against the torch specification; what is not read
holds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.compress.select import keep, protect
from tangram.kernels import reference
from tangram.kernels.interface import AttentionRule
from tangram.model.sealing import ChunkRanking
from tests.gpu.test_decode import assert_close
from tests.paged import SCALING, WINDOW, Batch, make_batch

HEADS, GROUP, DIM = 2, 3, 64


def requests(
    batch: Batch, layer: int, sizes: Sequence[int]
) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Each row's past lengths (in a window layer one position for all heads) and where its new
    tokens lie.
    """
    rng, ends = np.random.default_rng(len(sizes)), np.cumsum(sizes).tolist()
    past = []
    for kv in batch.kv:
        lengths = [kv[layer][head].shape[1] - 1 for head in range(HEADS)]
        past.append(
            np.array(
                [min(lengths)] * HEADS if layer else [int(rng.integers(0, n + 1)) for n in lengths]
            )
        )
    return past, list(zip([0, *ends[:-1]], ends, strict=True))


def fill_window(batch: Batch, past: Sequence[np.ndarray]) -> None:
    """Put in place what the window layer still sees from position `past` on; everything before is
    NaN.
    """
    rows, page = batch.rows, batch.rows.page_tokens
    for row, head in np.ndindex(len(past), HEADS):
        end = int(past[row][head])
        for entry in range(len(batch.kv[row][1][head][0])):
            place = (
                int(batch.tables[rows.table[row, 1, head] + entry // page]),
                rows.column[row, 1, head],
            )
            seen = max(0, end - WINDOW + 1) <= entry < end
            batch.pool[(*place, slice(None), entry % page)] = (
                batch.kv[row][1][head][:, entry] if seen else torch.nan
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("softcap", "use_sinks"), [(None, False), (None, True), (2.0, False)])
@pytest.mark.parametrize("split_entries", [1024, 32])
def test_prefill_of_several_requests_equals_each_alone(
    dtype: torch.dtype,
    layer: int,
    softcap: float | None,
    use_sinks: bool,
    split_entries: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Split or whole, in launches of all cells or of three."""
    from tangram.kernels.triton import prefill
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    monkeypatch.setattr(prefill, "MOST_CELLS", 3)
    batch = make_batch(3, HEADS, GROUP, DIM, longest=130, dtype=dtype, seed=5)
    sizes = [70, 1, 33]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(sizes), heads, DIM).to(dtype) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    past, spans = requests(batch, layer, sizes)
    rows, window = batch.rows, batch.rows.windows[layer]
    if window is not None:
        fill_window(batch, past)
    sinks = batch.sinks if use_sinks else None
    rule = AttentionRule(SCALING, window, softcap, sinks)
    address = np.stack([rows.table[:, layer], rows.column[:, layer], np.stack(past)], axis=-1)
    places = [
        (begin, end, begin, end, int(past[row].max())) for row, (begin, end) in enumerate(spans)
    ]
    where = LayerRows(
        layer,
        batch.tables.to(device),
        torch.from_numpy(address).to(device, torch.int32),
        torch.tensor(places, dtype=torch.int32, device=device),
        shortest=min(sizes),
        longest=max(sizes),
    )
    out = prefill.prefill(
        *(x.to(device) for x in (q, k, v)),
        StoredPool.of(batch.pool.to(device)),
        where,
        torch.randperm(len(sizes) * HEADS).int().to(device),
        replace(rule, sinks=None if sinks is None else sinks.to(device)),
        split_entries=split_entries,
    ).cpu()
    for row, (begin, end) in enumerate(spans):
        expected = reference.prefill(
            *(x[begin:end] for x in (q, k, v)),
            batch.pool,
            batch.tables,
            (rows.table[row, layer], rows.column[row, layer], past[row]),
            rule,
            past_tokens=int(past[row].max()),
        )
        assert_close(out[begin:end], expected)


@pytest.mark.parametrize("split_entries", [1024, 8])
def test_queries_of_a_second_pass_see_the_keys_before_them(
    split_entries: int, device: torch.device
) -> None:
    """More keys than queries, as when a chunk is repeated behind itself."""
    from tangram.kernels.triton import prefill
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    batch = make_batch(1, HEADS, GROUP, DIM, longest=100)
    q, k, v = (
        torch.randn(20, HEADS * GROUP, DIM),
        torch.randn(52, HEADS, DIM),
        torch.randn(52, HEADS, DIM),
    )
    past = np.array([30, 17])
    address = np.stack([batch.rows.table[:, 0], batch.rows.column[:, 0], past[None]], axis=-1)
    where = LayerRows(
        0,
        batch.tables.to(device),
        torch.from_numpy(address).to(device, torch.int32),
        torch.tensor([[0, 20, 0, 52, 30]], dtype=torch.int32, device=device),
        shortest=20,
        longest=20,
    )
    out = prefill.prefill(
        *(x.to(device) for x in (q, k, v)),
        StoredPool.of(batch.pool.nan_to_num(0.5).to(device)),
        where,
        torch.arange(HEADS, dtype=torch.int32, device=device),
        AttentionRule(SCALING),
        split_entries=split_entries,
    ).cpu()
    expected = reference.prefill(
        q,
        k,
        v,
        batch.pool.nan_to_num(0.5),
        batch.tables,
        (batch.rows.table[0, 0], batch.rows.column[0, 0], past),
        AttentionRule(SCALING),
        past_tokens=30,
    )
    assert_close(out, expected)


@pytest.mark.parametrize("split_entries", [1024, 16])
def test_a_row_is_computed_alike_whatever_is_beside_it(
    split_entries: int, device: torch.device
) -> None:
    from tangram.kernels.triton import prefill
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    batch, sizes = make_batch(2, HEADS, GROUP, DIM, longest=40), [9, 150]
    q, k, v = (
        torch.randn(sum(sizes), heads, DIM, device=device)
        for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    past, _ = requests(batch, 0, sizes)
    address = np.stack([batch.rows.table[:, 0], batch.rows.column[:, 0], np.stack(past)], axis=-1)
    where = torch.from_numpy(address).to(device, torch.int32)
    spans = torch.tensor([[0, 9, 0, 9, 40], [9, 159, 9, 159, 40]], dtype=torch.int32, device=device)
    pool, tables = batch.pool.to(device), batch.tables.to(device)
    orders = (
        torch.tensor([3, 1, 2, 0], dtype=torch.int32, device=device),
        torch.tensor([0, 1]).int().to(device),
    )
    both, alone = (
        prefill.prefill(
            q,
            k,
            v,
            StoredPool.of(pool),
            LayerRows(
                0, tables, where[: len(order) // HEADS], spans[: len(order) // HEADS], 9, longest
            ),
            order,
            AttentionRule(SCALING),
            split_entries=split_entries,
        )
        for order, longest in zip(orders, (150, 9), strict=True)
    )
    assert torch.equal(both[:9], alone[:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_stored_behind_their_pasts_where_all_of_them_is_kept(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Of rows of 45, 3 and 20 tokens, head 1 of the last keeps a part only, and the second has no
    keys.
    """
    from tangram.kernels.triton import store
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    generator = np.random.default_rng(0)
    k, v = torch.randn(2, 70, HEADS, DIM).to(dtype)
    spans = np.array([[2, 47, 2, 47, 0], [47, 50, 0, 0, 7], [50, 70, 50, 70, 11]])
    kept = np.array([[45, 45], [3, 3], [20, 16]])
    address = np.stack(
        [np.arange(6) * 9, generator.integers(0, 4, 6), [5, 0, 7, 7, 11, 3]], axis=-1
    ).reshape(3, 2, 3)
    tables = torch.randperm(54).int()
    expected = torch.full((54, 4, 2, 8, DIM), torch.nan, dtype=dtype)
    pool = expected.to(device)
    for row, head in ((0, 0), (0, 1), (2, 0)):
        begin, end = spans[row, 2:4]
        at = address[row, head : head + 1].T
        reference.store(*(x[begin:end, head][None] for x in (k, v)), expected, tables, *at)
    places, bounds, counts = (
        torch.from_numpy(x).to(device, torch.int32) for x in (address, spans, kept)
    )
    rows = LayerRows(0, tables.to(device), places, bounds, shortest=3, longest=45)
    store.store(k.to(device), v.to(device), StoredPool.of(pool), rows, counts)
    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)


SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, -3.5, math.inf, -math.inf, math.nan, 2.0])


@given(data=st.data(), tokens=st.sampled_from([16, 48, 130]), start=st.sampled_from([0, 512]))
@settings(max_examples=25, deadline=None)
def test_sealing_keeps_what_the_specification_keeps(
    data: st.DataObject, tokens: int, start: int
) -> None:
    """Ties, NaN and infinities included: the same positions, in the same order, at the same places,
    nothing else.
    """
    from tangram.kernels.triton import store
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads, dim, page, sinks, window = 3, 16, 8, 4, 3
    scores = torch.randn(2, heads, tokens, generator=torch.Generator().manual_seed(tokens + start))
    if data.draw(st.booleans()):
        drawn = data.draw(st.lists(SCORES, min_size=heads * tokens, max_size=heads * tokens))
        scores[data.draw(st.integers(0, 1))] = torch.tensor(drawn).view(heads, tokens)
    kept = [
        data.draw(st.lists(st.integers(8, tokens), min_size=heads, max_size=heads))
        for _ in range(2)
    ]
    k, v = torch.randn(2, 2 * tokens, heads, dim)
    pages = 2 + -(-(tokens + 5) // page)
    tables = torch.randperm(2 * heads * pages).int()
    address = torch.tensor(
        [[head * pages, head % 2, 5 * head % 7] for head in range(2 * heads)], dtype=torch.int32
    )
    address = address.view(2, heads, 3)
    empty = torch.full((2 * heads * pages, 2, 2, page, dim), torch.nan)
    expected, pool = empty.clone(), empty.clone().to(device)
    starts = [start, 512]
    for chunk in range(2):
        best = keep(protect(scores[chunk], starts[chunk], sinks, window), kept[chunk])
        own = [x[chunk * tokens : (chunk + 1) * tokens] for x in (k, v)]
        stored = ([x[at, head] for head, at in enumerate(best)] for x in own)
        reference.store(*stored, expected, tables, *address[chunk].numpy().T)
    spans = torch.tensor([[0, 0, 0, 0, start] for start in starts], dtype=torch.int32)
    rows = LayerRows(0, *(x.to(device) for x in (tables, address, spans)), tokens, tokens)
    store.seal(
        ChunkRanking(scores.to(device), sinks, window),
        *(k.to(device), v.to(device), StoredPool.of(pool), rows),
        torch.tensor(kept, dtype=torch.int32, device=device),
    )
    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def fp8_copy(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fill_fp8_pool(batch: Batch, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Round the entries of layer 0 to E4M3 in `batch`; the FP8 pool, and the same in float32."""
    rows = batch.rows
    for row, head in np.ndindex(2, HEADS):
        scale = scales[0, head][:, None, None]
        batch.kv[row][0][head] = fp8_copy(batch.kv[row][0][head], scale).float() * scale
        batch.k[row, head], batch.v[row, head] = batch.kv[row][0][head][:, -1]
    wide = torch.zeros(batch.pool.shape)
    pool = torch.zeros(batch.pool.shape, dtype=torch.float8_e4m3fn)
    for row, head in np.ndindex(2, HEADS):
        for entry in range(batch.kv[row][0][head].shape[1]):
            place = (
                int(batch.tables[rows.table[row, 0, head] + entry // 16]),
                rows.column[row, 0, head],
                slice(None),
                entry % 16,
            )
            stored = fp8_copy(batch.kv[row][0][head][:, entry], scales[0, head][:, None])
            pool[place] = stored
            wide[place] = stored.float() * scales[0, head][:, None]
    return pool, wide


def test_an_fp8_pool_is_written_and_read_through_its_scales(device: torch.device) -> None:
    from tangram.kernels.triton import prefill, store
    from tangram.kernels.triton.decode_launch import GpuDecode
    from tangram.kernels.triton.stored import LayerRows, StoredPool
    from tangram.plan.aot import plan_aot

    batch = make_batch(2, HEADS, 4, DIM, longest=90, dtype=torch.float16, seed=2)
    # Powers of two, and entries that E4M3 holds exactly: Triton's interpreter loses the carry when
    # it rounds.
    scales = 2.0 ** -torch.arange(4.0, 4.0 + 2 * HEADS * 2).view(2, HEADS, 2)
    rows, (pool, wide) = batch.rows, fill_fp8_pool(batch, scales)
    plan = plan_aot(rows, 8, tile_tokens=16)
    on_device = pool.clone().to(device)
    address = torch.from_numpy(
        np.stack([rows.table, rows.column, rows.length_index], axis=-1).swapaxes(0, 1).copy()
    )
    q, tables, lengths = (x.to(device) for x in (batch.q, batch.tables, batch.lengths))
    store.append(
        *(x.to(device) for x in (batch.k, batch.v)),
        StoredPool.of(on_device, scales.to(device)),
        tables,
        lengths,
        address.to(device, torch.int32),
        0,
    )
    stored = on_device.cpu().view(torch.uint8)
    assert torch.equal(stored, pool.view(torch.uint8))  # as before
    decoder = GpuDecode(plan, StoredPool.of(on_device, scales.to(device)), 4)
    out = decoder.attend(0, q, tables, lengths, AttentionRule(SCALING)).cpu()
    rule = AttentionRule(SCALING)
    expected = reference.decode(batch.q, wide, batch.tables, batch.lengths, plan, 0, rule)
    assert_close(out, expected)
    new = [torch.randn(10, heads, DIM).half() for heads in (HEADS * 4, HEADS, HEADS)]
    past = batch.lengths.numpy()[rows.length_index[:1, 0]]
    at = torch.from_numpy(np.stack([rows.table[:1, 0], rows.column[:1, 0], past], axis=-1)).to(
        device, torch.int32
    )
    spans = torch.tensor([[0, 10, 0, 10, past.max()]], dtype=torch.int32, device=device)
    out = prefill.prefill(
        *(x.to(device) for x in new),
        StoredPool.of(on_device, scales.to(device)),
        LayerRows(0, tables, at, spans, 10, 10),
        torch.arange(HEADS).int().to(device),
        AttentionRule(SCALING),
    ).cpu()
    expected = reference.prefill(
        *(x.float() for x in new),
        wide,
        batch.tables,
        (rows.table[0, 0], rows.column[0, 0], past[0]),
        AttentionRule(SCALING),
        past_tokens=int(past.max()),
    )
    assert_close(out, expected)
