"""What `test_step.py` checks, in processes of their own, which may import Tangram's kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engines import CHUNK, tiny_profile
from tangram.compress.scorers import ChunkView, make_scorer
from tangram.compress.select import keep, protect
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import AttentionRule, KvPool
from tangram.types import Int32
from tangram_vllm.slab import Slab, full_geometry
from tangram_vllm.slab_step import Keeping, SlabStep, StepBuilder

LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 32
SCALING = DIM**-0.5


def make_slab() -> Slab:
    return Slab.lay_out(full_geometry(LAYERS, HEADS, 4, DIM), tiny_profile(), CHUNK, 512)


def make_steps(slab: Slab, blocks: int) -> StepBuilder:
    layout = slab.layout
    shape = layout.heads_per_page, 2, layout.page_tokens, DIM
    pool = KvPool(torch.zeros(blocks * slab.pages, *shape), GROUP, LAYERS, HEADS)
    keeping = Keeping(make_scorer("keydiff"), 2, 2)
    return StepBuilder(slab, pool, pool_kernels(pool), keeping, most_rows=4, most_queries=3)


def cells_of(slab: Slab, first: int, tokens: int) -> Int32:
    """A row of vLLM's block table whose blocks are numbered from `first` on."""
    cells = -(-tokens // CHUNK) * slab.columns
    return np.arange(first, first + cells, dtype=np.int32)


def run(step: SlabStep, parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Outputs [L] of the rows of a step, whose q, k, v are [L, T, …, D] each."""
    q, k, v = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    out = torch.empty_like(q)
    for layer in range(LAYERS):
        step.attend(layer, q[layer], k[layer], v[layer], out[layer], AttentionRule(SCALING))
    return list(out.split([part[0].shape[1] for part in parts], dim=1))


def attend_naively(slab: Slab, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query's attention to what stays of whole chunks before its own, and to its chunk."""
    scorer, out = make_scorer("keydiff"), torch.empty_like(q)
    for layer in range(LAYERS):
        keys, values = k[layer].transpose(0, 1), v[layer].transpose(0, 1)
        stays: list[list[int]] = [[] for _ in range(HEADS)]
        for start in range(0, q.shape[1], CHUNK):
            end = min(start + CHUNK, q.shape[1])
            for at in range(start, end):
                for head in range(HEADS):
                    seen = [*stays[head], *range(start, at + 1)]
                    own = slice(head * GROUP, (head + 1) * GROUP)
                    weights = (q[layer, at, own] @ keys[head, seen].T * SCALING).softmax(-1)
                    out[layer, at, own] = weights @ values[head, seen]
            if end == start + CHUNK:
                inside = slice(start, end)
                chunk = ChunkView(q, keys[:, inside], values[:, inside], start, layer, SCALING)
                scores = protect(scorer.score(chunk), start, 2, 2)
                for head, places in enumerate(keep(scores, slab.layout.head_kept_tokens[layer])):
                    stays[head] += (places + start).tolist()
    return out


def draw(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q = torch.randn(LAYERS, tokens, HEADS * GROUP, DIM)
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM)
    return q, k, v


def check_cuts(seed: int) -> None:
    """Two rows in steps of random sizes, some of which end chunks, some of which are drafts."""
    slab, rng, tokens = make_slab(), np.random.default_rng(seed), (200, 150)
    steps, drawn = make_steps(slab, 40), [draw(count, seed + at) for at, count in enumerate(tokens)]
    cells = np.zeros((2, 4 * slab.columns), np.int32)
    for row, first in enumerate((1, 20)):
        own = cells_of(slab, first, tokens[row])
        cells[row, : len(own)] = own
    expected = [attend_naively(slab, *each) for each in drawn]
    begin = [0, 0]
    while any(at < count for at, count in zip(begin, tokens, strict=True)):
        sizes = [int(rng.choice([1, 1, 2, 3, 40, 90])) for _ in tokens]
        end = [min(at + size, count) for at, size, count in zip(begin, sizes, tokens, strict=True)]
        rows = [row for row in range(2) if end[row] > begin[row]]
        spans = [slice(begin[row], end[row]) for row in rows]
        step = steps.build(cells[rows], [one.start for one in spans], [one.stop for one in spans])
        parts = [
            tuple(x[:, span] for x in drawn[row]) for row, span in zip(rows, spans, strict=True)
        ]
        for row, span, found in zip(rows, spans, run(step, parts), strict=True):
            torch.testing.assert_close(found, expected[row][:, span], rtol=1e-4, atol=1e-5)
            refused = int(rng.integers(0, 2)) if 1 < end[row] - begin[row] <= 3 else 0
            begin[row] = end[row] - refused


def check_sharing() -> None:
    """Rows that begin with the same sealed chunks read these once."""
    slab = make_slab()
    steps = make_steps(slab, 60)
    cells = np.stack([cells_of(slab, first, 500) for first in (1, 30)])
    apart = steps.build(cells, [400, 420], [401, 421]).launch.addresses.decode
    shared = 3 * slab.columns
    cells[1, :shared] = cells[0, :shared]
    together = steps.build(cells, [400, 420], [401, 421]).launch.addresses.decode
    assert not apart.plan.shares_rows
    assert together.plan.shares_rows


def check_plans() -> None:
    """A plan is kept while its rows grow; a shorter row in the same blocks has another."""
    slab = make_slab()
    steps, cells = make_steps(slab, 60), cells_of(slab, 1, 500)[None]
    ends = [410, 430, 405, 470]
    plans = [steps.build(cells, [end - 1], [end]).launch.addresses.decode.plan for end in ends]
    assert plans[0] is plans[1]
    assert plans[1] is not plans[2]
    assert plans[2] is not plans[3]  # it has another chunk
