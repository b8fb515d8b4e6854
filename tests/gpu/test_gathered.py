"""Attention over gathered entries is the specification's: heads of any lengths from pages, then the
chunk itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.kernels import reference
from tangram.kernels.interface import AttentionRule, KvPool, PaddedShape, PassAddresses, PrefillRows
from tangram.plan.records import PAST, SPAN
from tangram.types import Int32

HEADS, GROUP, DIM, PAGE = 3, 2, 64, 8
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


class AskingRows:
    """Rows of `keys` new tokens, `queries` of which ask, behind `past` [rows, H] entries; page
    tables without order.

    Rows of one `sequence` stand on one table, each on as much of it as its past has.
    """

    def __init__(
        self,
        keys: Sequence[int],
        past: Sequence[Sequence[int]],
        dtype: torch.dtype,
        queries: Sequence[int] = (),
        sequence: Sequence[int] = (),
    ) -> None:
        torch.manual_seed(sum(keys))
        asking, sequences = list(queries or keys), np.array(sequence or range(len(keys)))
        batch = torch.randn(max(sum(keys), sum(asking)) + 7, (GROUP + 2) * HEADS, DIM).to(dtype)
        # As a flattened batch lies
        self.q, self.k, self.v = batch[3:-4].split([HEADS * GROUP, HEADS, HEADS], dim=1)
        self.past = np.array(past)
        pages = np.array(
            [-(-self.past[sequences == one].max(0) // PAGE) + 1 for one in np.unique(sequences)]
        )
        first = (np.cumsum(pages).reshape(pages.shape) - pages)[sequences]
        self.pool = torch.randn(int(pages.sum()), 2, 2, PAGE, DIM).to(dtype)
        self.tables = torch.randperm(int(pages.sum())).int()
        self.address = np.stack([first, np.indices(first.shape)[1] % 2, self.past], -1).astype(
            np.int32
        )
        ends, asked = np.cumsum(keys), np.cumsum(asking)
        position = self.past.max(1)
        self.spans = np.stack([asked - asking, asked, ends - keys, ends, position], 1).astype(
            np.int32
        )

    def rows(self, asking: slice) -> PrefillRows:
        kept = np.broadcast_to(
            (self.spans[:, 3] - self.spans[:, 2])[None, :, None], (1, len(self.spans), HEADS)
        )
        kept = np.ascontiguousarray(kept, np.int32)
        address, spans = self.address.view(PAST)[None, ..., 0], self.spans.view(SPAN)[:, 0]
        return PrefillRows(address, spans, kept, kept, asking)

    def expect(self, row: int) -> Tensor:
        begin, end, first, last, _ = self.spans[row]
        table, column, past = self.address[row].T
        return reference.prefill(
            self.q[begin:end],
            self.k[first:last],
            self.v[first:last],
            self.pool,
            self.tables,
            (table, column, past),
            AttentionRule(DIM**-0.5),
            past_tokens=int(past.max()),
        )


def attend_rows(
    asked: AskingRows,
    device: torch.device,
    asking: slice | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """What the gathered parts leave of an output full of NaN."""
    from tangram.kernels.triton import gathered
    from tangram.kernels.triton.stored import LayerRows, StoredPool

    rows = asked.rows(asking or slice(0, len(asked.spans)))
    cells = gathered.PrefillOrder.of(rows, 2 * DIM * 2, gathers=True)
    q, k, v, pool, tables = (
        x.to(device) for x in (asked.q, asked.k, asked.v, asked.pool, asked.tables)
    )
    stored = StoredPool.of(pool, scales)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=device)

    def there(array: Int32) -> Tensor:
        return torch.from_numpy(array).to(device)

    for part in cells.gathered:
        copies = [
            torch.full(
                (gathered.count_elements(part, 0, DIM),), torch.nan, dtype=q.dtype, device=device
            )
            for _ in range(2)
        ]
        on_device = gathered.GatheredCells(
            part,
            there(cells.order[0, part.cells]),
            there(cells.offsets[0]),
            there(cells.sources[part.sources]),
            copies,
        )
        where = LayerRows(0, tables, there(asked.address), there(asked.spans), 0, 0)
        gathered.attend(q, k, v, stored, where, on_device, out, scaling=DIM**-0.5)
    return out.cpu()


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.kernels.triton import gathered

    monkeypatch.setattr(gathered, "LEAST_TOKENS", 30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_see_their_pasts_and_themselves(dtype: torch.dtype, device: torch.device) -> None:
    asked = AskingRows(
        [40, 64, 100, 31], [[0, 0, 0], [128, 3, 64], [60, 200, 0], [7, 7, 150]], dtype
    )
    out = attend_rows(asked, device)
    for row, (begin, end, *_) in enumerate(asked.spans):
        torch.testing.assert_close(
            out[begin:end], asked.expect(row), rtol=LIMIT[dtype], atol=LIMIT[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_pasts_are_seen_through_their_scales(dtype: torch.dtype, device: torch.device) -> None:
    asked = AskingRows([40, 64, 31], [[128, 3, 64], [60, 200, 0], [7, 7, 150]], dtype)
    scales = 2.0 ** torch.arange(-3.0, 3.0).view(1, HEADS, 2)
    stored = (asked.pool.float() / 4).to(torch.float8_e4m3fn)
    asked.pool = stored.to(dtype)
    for row, head in np.ndindex(asked.past.shape):
        table, _, past = asked.address[row, head]
        pages = asked.tables[table : table + -(-past // PAGE)].long()
        asked.pool[pages] *= scales[0, head].to(dtype)[:, None, None]
    expected = [asked.expect(row) for row in range(3)]
    asked.pool = stored
    out = attend_rows(asked, device, scales=scales.to(device))
    for (begin, end, *_), row in zip(asked.spans, expected, strict=True):
        torch.testing.assert_close(out[begin:end], row, rtol=LIMIT[dtype], atol=LIMIT[dtype])


def test_rows_of_one_sequence_see_as_much_of_its_past_as_is_theirs(device: torch.device) -> None:
    past = [[10, 70, 0], [5, 5, 5], [42, 128, 16], [9, 6, 5], [74, 130, 32]]
    asked = AskingRows([64, 40, 64, 33, 64], past, torch.float16, sequence=[0, 1, 0, 1, 0])
    out = attend_rows(asked, device)
    for row, (begin, end, *_) in enumerate(asked.spans):
        torch.testing.assert_close(out[begin:end], asked.expect(row), rtol=2e-3, atol=2e-3)


def test_queries_of_a_second_pass_see_the_keys_before_them(device: torch.device) -> None:
    asked = AskingRows([90, 50], [[30, 17, 64], [1, 1, 1]], torch.float16, queries=[20, 0])
    out = attend_rows(asked, device, asking=slice(0, 1))
    torch.testing.assert_close(out[:20], asked.expect(0), rtol=2e-3, atol=2e-3)
    assert out[20:].isnan().all()


def test_a_row_is_computed_alike_whatever_is_beside_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if not all rows fit at a time."""
    from tangram.kernels.triton import gathered

    past = [[90, 5, 33], [128, 3, 64], [10, 0, 200], [100, 69, 40]]
    asked = AskingRows([40, 64, 50, 30], past, torch.float16, sequence=[0, 1, 2, 0])
    together = attend_rows(asked, device)
    for row, (begin, end, *_) in enumerate(asked.spans):
        assert torch.equal(
            attend_rows(asked, device, asking=slice(row, row + 1))[begin:end], together[begin:end]
        )
    monkeypatch.setattr(gathered, "MOST_BYTES", 1)
    assert torch.equal(attend_rows(asked, device), together)


@pytest.mark.parametrize("most_entries", [1 << 20, 600, 1])
def test_every_cell_is_computed_once_and_every_past_copied_once(
    most_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 and 3 are short and follow pages; 0 and 4 are of one sequence."""
    from tangram.kernels.triton import gathered

    monkeypatch.setattr(gathered, "MOST_BYTES", most_entries * 256)
    past = [[9, 80, 200], [9, 80, 200], [1, 2, 3], [4, 4, 4], [50, 80, 210]]
    asked = AskingRows([40, 5, 64, 29, 33], past, torch.float16, sequence=[0, 1, 2, 3, 0])
    rows = asked.rows(slice(0, 5))
    cells = gathered.PrefillOrder.of(rows, 256, gathers=True)
    runs = [cells.order[0, part.cells] for part in cells.gathered]
    assert {tuple(sorted({int(cell) // HEADS for cell in run})) for run in runs} == (
        {(0, 2, 4)} if most_entries > 600 else {(0, 4), (2,)}
    )
    assert sorted(cells.order[0, cells.paged] // HEADS) == [1] * HEADS + [3] * HEADS
    assert sorted(cells.order[0]) == list(range(5 * HEADS))
    assert sorted(cells.sources) == sorted(
        [*range(2 * HEADS, 3 * HEADS), *range(4 * HEADS, 5 * HEADS)]
    )
    reads = np.array(past) + (asked.spans[:, 3] - asked.spans[:, 2])[:, None]
    for part, run in zip(cells.gathered, runs, strict=True):
        assert (np.diff(reads.ravel()[run]) <= 0).all(), "who reads most comes first"
        taken = [
            (cells.offsets[0, cell, 0], past[cell // HEADS][cell % HEADS])
            for cell in cells.sources[part.sources]
        ]
        taken += [
            (
                cells.offsets[0, cell, 1],
                asked.spans[cell // HEADS, 3] - asked.spans[cell // HEADS, 2],
            )
            for cell in run
        ]
        taken.sort()
        ends = [begin + length for begin, length in taken]
        assert all(end <= begin for end, (begin, _) in zip(ends, taken[1:], strict=False)), (
            "segments overlap"
        )
        assert ends[-1] <= part.total[0] and all(begin % gathered.TILE == 0 for begin, _ in taken)
    assert (cells.offsets[0, :HEADS, 0] == cells.offsets[0, 4 * HEADS :, 0]).all(), (
        "one copy for both rows"
    )
    nothing = gathered.PrefillOrder.of(rows, 256, gathers=False)
    assert nothing.gathered == [] and sorted(nothing.order[0, nothing.paged]) == list(
        range(5 * HEADS)
    )


def test_buffers_that_graphs_contain_stay_when_a_longer_row_needs_more(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded row's graph replays with the addresses of its capture."""
    from tangram.kernels.triton import gathered, triton_kernels

    for module in (gathered, triton_kernels):
        monkeypatch.setattr(module, "MOST_BYTES", 600 * 2 * DIM * 2)
    monkeypatch.setattr(gathered, "serves", lambda pool, card: True)
    sizes = list[tuple[int, int]]()

    def note(*arguments: Any, **options: Any) -> None:
        copies = next(
            each for each in arguments if isinstance(each, gathered.GatheredCells)
        ).buffers
        sizes.append((len(copies[0]), copies[0].data_ptr()))

    monkeypatch.setattr(gathered, "attend", note)
    short, long, longer = (
        AskingRows([40], [past], torch.bfloat16)
        for past in ([90, 5, 33], [900, 200, 7], [5000, 7, 7])
    )
    kernels = triton_kernels.TritonKernels(KvPool(short.pool.to(device), GROUP, 1, HEADS))
    tables = short.tables.to(device)
    for asked, padded in ((short, True), (long, False), (longer, False), (short, True)):
        whole = asked.rows(slice(0, 1))
        rows = replace(whole, kept=whole.kept - 1, first=whole.first - 1)  # nothing is stored
        shape, lengths = PaddedShape(64, 128, "tail"), np.zeros((1, 1), np.int32)
        launch = kernels.launch(PassAddresses(lengths, None, rows, shape), tables)
        assert (launch.shape and launch.shape.tokens) == (64 if padded else None)
        q, k, v = (part.to(device) for part in (asked.q, asked.k, asked.v))
        launch.prefill(0, q, k, v, torch.empty_like(q), AttentionRule(1.0), None)
    first, large, larger, again = sizes
    assert first == again
    assert first[0] < large[0] < larger[0]
