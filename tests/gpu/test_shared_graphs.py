"""Steps whose rows share prefixes replay the graphs that were captured before serving."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind
from tangram.engine.passes.batcher import Batcher, _share_prefixes
from tangram.engine.passes.meters import Meters
from tangram.errors import IntegrityError
from tangram.kernels.interface import AttentionRule, DecodedRows, KvPool
from tangram.kernels.stopwatch import Stopwatch
from tangram.plan.forest import Forest, build_forest
from tangram.plan.schedule import Decoding
from tangram.types import Geometry
from tangram_lab.kernel_benchmarks.case import BatchGeometry, own_case
from tests.gpu.cards import CARDS
from tests.gpu.test_engine import pytestmark as pytestmark

CHUNK, GEOMETRY, MOST_ROWS = 512, BatchGeometry.of_heads("32/8", 16), 48


def decoding(lengths: list[int], prefixes: Forest) -> Decoding:
    """Rows of `lengths` entries whose first chunks are shared as in `prefixes`."""
    case = own_case("rows", lengths, GEOMETRY, seed=0)
    kept = np.full(case.shape, CHUNK)
    return Decoding(case.rows, case.lengths, GEOMETRY.group, kept, lambda: prefixes)


def agents(rows: list[int], tails: list[int]) -> Decoding:
    """Agents by number: all share 16 chunks, a fourth of them 4 more, a sixteenth 2 more."""
    units = np.array([[9] * 16 + [row % 4] * 4 + [row % 16] * 2 for row in rows])
    count = np.full(len(rows), 22)
    return decoding([22 * CHUNK + tail for tail in tails], build_forest(units, count, count))


@settings(max_examples=30, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 999), min_size=2, max_size=MOST_ROWS, unique=True),
    data=st.data(),
)
def test_agents_that_come_and_go_need_no_new_buffers(
    numbers: list[int], data: st.DataObject
) -> None:
    """A graph refers to its buffers; those are made for each width when steps are rehearsed."""
    from tangram.kernels.triton.triton_kernels import TritonKernels

    pool = torch.empty(1, 8, 2, 16, GEOMETRY.head_dim, dtype=torch.bfloat16)
    heads = GEOMETRY.kv_heads
    kernels = TritonKernels(KvPool(pool, GEOMETRY.group, 1, heads), card=CARDS[90])

    def load(batch: Decoding) -> object:
        counts = np.ones(len(batch.rows.budget), np.int32)
        decoded = DecodedRows.of(batch, kernels.plan(batch)[0], counts, width)
        lengths = np.pad(batch.lengths, (0, MOST_ROWS - len(batch.lengths)))  # of all slots
        return kernels._decoding.load(decoded, lengths).decoder

    width = kernels.width(len(numbers), 1)
    alike = partial(_share_prefixes, np.full(width, 40))
    rehearsed = load(decoding([40 * CHUNK] * width, alike()))
    tails = data.draw(st.lists(st.integers(1, 600), min_size=len(numbers), max_size=len(numbers)))
    batch = agents(numbers, tails)
    assert load(batch) is rehearsed
    apart = decoding(
        [5000] * len(numbers),
        build_forest(np.zeros((len(numbers), 0), np.int64), *np.zeros((2, len(numbers)), np.int64)),
    )
    assert load(apart) is not rehearsed, "rows that share nothing launch fewer kernels"


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300) | st.integers(1, 60_000), min_size=1, max_size=MOST_ROWS),
    heads=st.sampled_from(["32/8", "8/8", "64/4", "28/4"]),
)
def test_rows_of_any_lengths_fit_what_is_reserved(lengths: list[int], heads: str) -> None:
    from tangram.kernels.triton.triton_kernels import TritonKernels

    geometry = BatchGeometry.of_heads(heads, 16)
    pool = torch.empty(1, 1, 2, 16, geometry.head_dim, dtype=torch.bfloat16)
    kernels = TritonKernels(KvPool(pool, geometry.group, 1, geometry.kv_heads), card=CARDS[90])
    width = kernels.width(len(lengths), 1)

    def decode(lengths: list[int]) -> DecodedRows:
        case, count = own_case("rows", lengths, geometry, seed=0), len(lengths)
        nothing = build_forest(np.zeros((count, 0), np.int64), *np.zeros((2, count), np.int64))
        kept = np.full(case.shape, CHUNK)
        batch = Decoding(case.rows, case.lengths, geometry.group, kept, lambda: nothing)
        ones = np.ones(count, np.int32)
        return DecodedRows.of(batch, kernels.plan(batch)[0], ones, width)

    kernels.reserve(decode([1] * width))
    flat = np.zeros(MOST_ROWS, np.int32)
    reserved = kernels._decoding.load(decode([1] * width), flat).decoder
    assert kernels._decoding.load(decode(lengths), flat).decoder is reserved


@pytest.mark.parametrize("width", [16, 64, 128])
def test_what_is_captured_before_serving_fits_what_is_served(width: int) -> None:
    """Passes are captured over empty sequences, and planned as for long ones."""
    from tangram.kernels.triton.triton_kernels import TritonKernels

    geometry = Geometry(2, 8, 32, 128, 1000, 32_768, (None,) * 2)
    sizes = {"chunk_tokens": 512, "page_tokens": 16, "heads_per_page": 8, "max_tokens": 32_768}
    layout = Layout.lay_out_uncompressed(geometry, **sizes)
    retention, nothing = Retention(1.0, layout, "whole"), np.zeros(0, np.int64)
    cache = CacheManager([retention], total_pages=8, max_sequences=128, prefix_caching=False)
    pool = torch.empty(1, 8, 2, 16, 128, dtype=torch.bfloat16)
    kernels = TritonKernels(KvPool(pool, 4, 2, 8), card=CARDS[90])
    batcher = Batcher([retention], kernels, cache, Meters(Stopwatch(pool.device)))
    tables = torch.from_numpy(cache.tables).view(-1)
    rehearsed = kernels.launch(batcher.rehearsal(width).addresses, tables)
    # No two rows begin with the same page.
    cache.tables[:] = np.arange(cache.tables.size).reshape(cache.tables.shape)
    starts = np.random.default_rng(1).integers(300, 6000, width).tolist()
    for slot, start in enumerate(starts):
        held = layout.lengths(*divmod(start, layout.chunk_tokens)) + 1
        cache.lengths[slot, : len(layout.groups)] = held
    rows = [
        Row("", slot, retention, RowKind.DECODE, start, np.zeros(1, np.int64), nothing, True)
        for slot, start in enumerate(starts)
    ]
    served = kernels.launch(batcher.build(rows, 1).addresses, tables)
    assert rehearsed.rows is not None and served.rows is not None
    assert served.rows.decoder is rehearsed.rows.decoder
    key, known = served.shape, rehearsed.shape
    assert key is not None and key == known and key.room == known.room, "another graph"
    with pytest.raises(IntegrityError, match="another pass has taken"):
        rehearsed.decode(0, *torch.zeros(4, width, 8, 128), AttentionRule(1.0))
