"""Attention over gathered entries is the specification's: heads of any lengths from pages, then the chunk itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.kernels import reference
from tangram.kernels.step import PrefillRows
from tangram.types import Int32

HEADS, GROUP, DIM, PAGE = 3, 2, 64, 8
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Requests:
    """Rows of `keys` new tokens, `queries` of which ask, behind `past` [rows, H] entries; page tables without order."""

    def __init__(
        self, keys: Sequence[int], past: Sequence[Sequence[int]], dtype: torch.dtype, queries: Sequence[int] = ()
    ) -> None:  # fmt: skip
        torch.manual_seed(sum(keys))
        asking = list(queries or keys)
        batch = torch.randn(max(sum(keys), sum(asking)) + 7, (GROUP + 2) * HEADS, DIM).to(dtype)
        self.q, self.k, self.v = batch[3:-4].split([HEADS * GROUP, HEADS, HEADS], dim=1)  # as a flattened batch lies
        self.past = np.array(past)
        pages = -(-self.past // PAGE) + 1
        first = np.cumsum(pages).reshape(pages.shape) - pages
        self.pool = torch.randn(int(pages.sum()), 2, 2, PAGE, DIM).to(dtype)
        self.tables = torch.randperm(int(pages.sum())).int()
        self.address = np.stack([first, np.indices(pages.shape)[1] % 2, self.past], -1).astype(np.int32)
        ends, asked = np.cumsum(keys), np.cumsum(asking)
        position = self.past.max(1)
        self.spans = np.stack([asked - asking, asked, ends - keys, ends, position], 1).astype(np.int32)

    def rows(self, waves: Sequence[slice]) -> PrefillRows:
        kept = np.broadcast_to((self.spans[:, 3] - self.spans[:, 2])[None, :, None], (1, len(self.spans), HEADS))
        return PrefillRows(self.address[None], self.spans, np.ascontiguousarray(kept, np.int32), tuple(waves))

    def expected(self, row: int) -> Tensor:
        begin, end, first, last, _ = self.spans[row]
        table, column, past = self.address[row].T
        return reference.prefill(
            self.q[begin:end], self.k[first:last], self.v[first:last], self.pool, self.tables, table, column, past,
            scaling=DIM**-0.5, past_tokens=int(past.max()),
        )  # fmt: skip


def attended(asked: Requests, waves: Sequence[slice], device: torch.device) -> Tensor:
    """What the gathered parts of all waves leave of an output full of NaN."""
    from tangram.kernels import gathered

    cells = gathered.PrefillOrder.of(asked.rows(waves), 2 * DIM * 2, gathers=True)
    q, k, v, pool, tables = (x.to(device) for x in (asked.q, asked.k, asked.v, asked.pool, asked.tables))
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=device)

    def there(array: Int32) -> Tensor:
        return torch.from_numpy(array).to(device)

    for wave, parts in zip(waves, cells.gathered, strict=True):
        for part in parts:
            copies = [
                torch.full((gathered.room(part, 0, DIM),), torch.nan, dtype=q.dtype, device=device) for _ in range(2)
            ]
            gathered.attend(
                q, k, v, pool, tables, there(asked.address[wave]), there(asked.spans[wave]),
                there(cells.order[0, part.cells]), there(cells.offsets[0, wave.start * HEADS : wave.stop * HEADS]),
                copies, part, out, layer=0, scaling=DIM**-0.5,
            )  # fmt: skip
    return out.cpu()


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.kernels import gathered

    monkeypatch.setattr(gathered, "LEAST_TOKENS", 30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_see_their_pasts_and_themselves(dtype: torch.dtype, device: torch.device) -> None:
    asked = Requests([40, 64, 100, 31], [[0, 0, 0], [128, 3, 64], [60, 200, 0], [7, 7, 150]], dtype)
    out = attended(asked, [slice(0, 3), slice(3, 4)], device)
    for row, (begin, end, *_) in enumerate(asked.spans):
        torch.testing.assert_close(out[begin:end], asked.expected(row), rtol=LIMIT[dtype], atol=LIMIT[dtype])


def test_queries_of_a_second_pass_see_the_keys_before_them(device: torch.device) -> None:
    asked = Requests([90], [[30, 17, 64]], torch.float16, queries=[20])
    torch.testing.assert_close(attended(asked, [slice(0, 1)], device)[:20], asked.expected(0), rtol=2e-3, atol=2e-3)


def test_a_row_is_computed_alike_whatever_is_beside_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if not all of a wave fits at a time."""
    from tangram.kernels import gathered

    asked = Requests([40, 64, 50], [[90, 5, 33], [128, 3, 64], [10, 0, 200]], torch.float16)
    together = attended(asked, [slice(0, 3)], device)
    assert torch.equal(attended(asked, [slice(0, 1), slice(1, 2), slice(2, 3)], device), together)
    monkeypatch.setattr(gathered, "MOST_BYTES", 1)
    assert torch.equal(attended(asked, [slice(0, 3)], device), together)


def test_every_cell_is_computed_once_and_short_rows_follow_pages() -> None:
    from tangram.kernels import gathered

    asked = Requests([40, 5, 64, 29, 33], [[9, 80, 200]] * 5, torch.float16)
    waves = [slice(0, 2), slice(2, 5)]
    cells = gathered.PrefillOrder.of(asked.rows(waves), 256, gathers=True)
    nothing = gathered.PrefillOrder.of(asked.rows(waves), 256, gathers=False)
    assert [sum(map(len, nothing.gathered))] == [0]
    for wave, (own, others) in zip(waves, zip(cells.gathered, cells.paged, strict=True), strict=True):
        rows = [
            sorted({int(cell) // HEADS for part in parts for cell in cells.order[0, part.cells]})
            for parts in (own, others)
        ]
        assert rows == ([[0], [1]] if wave.start == 0 else [[0, 2], [1]])
        places = np.concatenate([np.arange(part.cells.start, part.cells.stop) for part in (*own, *others)])
        assert sorted(places) == list(range(wave.start * HEADS, wave.stop * HEADS))
        assert sorted(cells.order[0, places]) == list(range((wave.stop - wave.start) * HEADS))
        for part in own:
            segments = cells.offsets[0, wave.start * HEADS + cells.order[0, part.cells]]
            lengths = asked.past[0][cells.order[0, part.cells] % HEADS]
            assert (segments % gathered.TILE == 0).all() and len(set(segments.tolist())) == len(segments)
            assert (np.diff(lengths) <= 0).all() or len(set(asked.spans[wave, 3] - asked.spans[wave, 2])) > 1
            assert part.total[0] > segments.max() and part.longest[0] == 64 * -(-(200 + part.queries) // 64)
