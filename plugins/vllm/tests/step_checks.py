"""What `test_step.py` checks, in processes of their own, which may import Tangram's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines import CHUNK, make_gate, tiny_profile
from tangram.compress.profile import Profile
from tangram.compress.scorers import ChunkView, takes_gate
from tangram.compress.select import keep, protect
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import AttentionRule, KernelChoice, KvPool
from tangram_vllm.keeping import Keeping, NewTokens, find_note_form
from tangram_vllm.slab import Slab, full_geometry
from tangram_vllm.slab_step import LayerRule, SlabStep, StepBuilder

LAYERS, HEADS, GROUP, DIM, HIDDEN = 3, 2, 2, 32, 128
SCALING = DIM**-0.5
Drawn = tuple[Tensor, Tensor, Tensor, Tensor]  # queries, keys, values, hidden states


def make_slab(profile: Profile) -> Slab:
    notes = find_note_form(profile, torch.float32.itemsize)
    return Slab.lay_out(full_geometry(LAYERS, HEADS, 4, DIM), profile, CHUNK, 512, notes)


def make_steps(
    slab: Slab,
    keeping: Keeping,
    blocks: int,
    kernels: KernelChoice = pool_kernels,
    *,
    shares: bool = True,
) -> StepBuilder:
    layout = slab.layout
    shape = layout.heads_per_page, 2, layout.page_tokens, DIM
    pool = KvPool(torch.zeros(blocks * slab.pages, *shape), GROUP, LAYERS, HEADS)
    return StepBuilder(
        slab, pool, kernels(pool), keeping, most_rows=4, most_queries=3, shares=shares
    )


def cells_of(slab: Slab, first: int, tokens: int) -> Tensor:
    """A row of vLLM's block table whose blocks are numbered from `first` on."""
    cells = -(-tokens // CHUNK) * slab.columns
    return torch.arange(first, first + cells, dtype=torch.int32)


def turn(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Some rotation of halves."""
    angles = positions.float()[:, None] * 1e4 ** -torch.linspace(0, 0.9, DIM // 2).repeat(2)
    return angles.cos(), angles.sin()


def run(step: SlabStep, parts: list[Drawn]) -> list[Tensor]:
    """Outputs [L] of the rows of a step, whose tokens are [L, T, …] each."""
    q, k, v, hidden = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    out, known = torch.empty_like(q), LayerRule(AttentionRule(SCALING), turn)
    for layer in range(LAYERS):
        step.attend(
            layer, NewTokens(q[layer], k[layer], v[layer], hidden[layer]), out[layer], known
        )
    return list(out.split([part[0].shape[1] for part in parts], dim=1))


def attend_naively(slab: Slab, keeping: Keeping, drawn: Drawn) -> Tensor:
    """Each query's attention to what stays of whole chunks before its own, and to its chunk."""
    q, k, v, hidden = drawn
    out = torch.empty_like(q)
    for layer in range(LAYERS):
        queries, keys, values = (x[layer].transpose(0, 1) for x in (q, k, v))
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
                whole = (x[:, inside] for x in (queries, keys, values))
                chunk = ChunkView(*whole, start, layer, SCALING, turn, hidden[layer, inside])
                scores = protect(keeping.scorer.score(chunk), start, 2, 2)
                for head, places in enumerate(keep(scores, slab.layout.head_kept_tokens[layer])):
                    stays[head] += (places + start).tolist()
    return out


def draw(tokens: int, seed: int) -> Drawn:
    torch.manual_seed(seed)
    q = torch.randn(LAYERS, tokens, HEADS * GROUP, DIM)
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM)
    return q, k, v, torch.randn(LAYERS, tokens, HIDDEN)


def draw_size(rng: np.random.Generator, left: int) -> int:
    """New tokens of a row with so many `left` of its chunk: often drafts that end it."""
    size = int(rng.choice([1, 1, 2, 3, 40, 90]))
    if rng.integers(2) and size >= left > 3:
        return left - 3
    return left if rng.integers(2) and left <= 3 else size


def check_cuts(
    seed: int, folder: Path, scorers: Iterable[str], kernels: KernelChoice = pool_kernels
) -> None:
    """With each scorer: two rows in steps of random sizes, some of which are drafts."""
    gate = make_gate(folder / "gate.safetensors")
    for scorer in scorers:
        own = gate if takes_gate(scorer) else None
        profile = tiny_profile(scorer, gate=own)
        check_cuts_of(Keeping.of(profile, own), make_slab(profile), seed, kernels)


def check_cuts_of(keeping: Keeping, slab: Slab, seed: int, kernels: KernelChoice) -> None:
    rng, tokens = np.random.default_rng(seed), (200, 150)
    steps = make_steps(slab, keeping, 60, kernels)
    drawn = [draw(count, seed + at) for at, count in enumerate(tokens)]
    cells = torch.zeros(2, 4 * slab.columns, dtype=torch.int32)
    for row, first in enumerate((1, 30)):
        own = cells_of(slab, first, tokens[row])
        cells[row, : len(own)] = own
    expected = [attend_naively(slab, keeping, each) for each in drawn]
    begin = [0, 0]
    while any(at < count for at, count in zip(begin, tokens, strict=True)):
        sizes = [draw_size(rng, CHUNK - at % CHUNK) for at in begin]
        end = [min(at + size, count) for at, size, count in zip(begin, sizes, tokens, strict=True)]
        rows = [row for row in range(2) if end[row] > begin[row]]
        spans = [slice(begin[row], end[row]) for row in rows]
        step = steps.build(cells[rows], [one.start for one in spans], [one.stop for one in spans])
        parts = [
            tuple(x[:, span] for x in drawn[row]) for row, span in zip(rows, spans, strict=True)
        ]
        for row, span, found in zip(rows, spans, run(step, parts), strict=True):
            same = torch.allclose(found, expected[row][:, span], rtol=1e-4, atol=1e-5)
            assert same, f"{keeping.scorer.name}, row {row}, tokens {span}"
            refused = int(rng.integers(0, 2)) if 1 < end[row] - begin[row] <= 3 else 0
            begin[row] = end[row] - refused


def check_sharing() -> None:
    """Rows that begin with the same sealed chunks read these once."""
    profile = tiny_profile()
    slab = make_slab(profile)
    steps = make_steps(slab, Keeping.of(profile, None), 60)
    cells = torch.stack([cells_of(slab, first, 500) for first in (1, 30)])
    apart = steps.build(cells, [400, 420], [401, 421]).launch.addresses.decode
    shared = 3 * slab.columns
    cells[1, :shared] = cells[0, :shared]
    together = steps.build(cells, [400, 420], [401, 421]).launch.addresses.decode
    assert not apart.plan.shares_rows
    assert together.plan.shares_rows


def check_plans() -> None:
    """A plan is kept while its rows grow; a shorter row in the same blocks has another."""
    profile = tiny_profile()
    slab = make_slab(profile)
    steps = make_steps(slab, Keeping.of(profile, None), 60)
    cells = cells_of(slab, 1, 500)[None]
    ends = [410, 430, 405, 470]
    plans = [steps.build(cells, [end - 1], [end]).launch.addresses.decode.plan for end in ends]
    assert plans[0] is plans[1]
    assert plans[1] is not plans[2]
    assert plans[2] is not plans[3]  # it has another chunk


def check_reserved(kernels: KernelChoice = pool_kernels) -> None:
    """Steps of any lengths have the same buffers; chunks are sealed behind them."""
    profile = tiny_profile()
    keeping, slab = Keeping.of(profile, None), make_slab(profile)
    steps = make_steps(slab, keeping, 120, kernels, shares=False)
    nothing = torch.zeros(4, 8 * slab.columns, dtype=torch.int32)
    graph = steps.build(nothing, [0] * 4, [1] * 4, padded=4, reserves=True).launch
    lengths = 70, 200, 3
    drawn = [draw(count, at) for at, count in enumerate(lengths)]
    expected = [attend_naively(slab, keeping, each) for each in drawn]
    cells = torch.zeros(4, 8 * slab.columns, dtype=torch.int32)
    for row, count in enumerate(lengths):
        own = cells_of(slab, 1 + 30 * row, count)
        cells[row, : len(own)] = own
    begin = [40, 120, 1]
    filled = [tuple(x[:, :end] for x in one) for one, end in zip(drawn, begin, strict=True)]
    run(steps.build(cells[:3], [0] * 3, begin), filled)
    while rows := [row for row, count in enumerate(lengths) if begin[row] < count]:
        at = [begin[row] for row in rows]
        step = steps.build(cells[rows], at, [place + 1 for place in at], padded=4)
        assert step.launch.shape == graph.shape
        if graph.shape is not None:
            assert step.launch.rows.decoder is graph.rows.decoder
        parts = [
            tuple(x[:, place : place + 1] for x in drawn[row])
            for row, place in zip(rows, at, strict=True)
        ]
        for row, place, found in zip(rows, at, run(step, parts), strict=True):
            assert torch.allclose(found[:, 0], expected[row][:, place], rtol=1e-4, atol=1e-5)
            begin[row] = place + 1
