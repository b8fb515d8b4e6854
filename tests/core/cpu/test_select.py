"""Which positions stay: against plain Python, and against kvpress's own allocation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tangram.compress.select import dynamic_fractions, keep, protect
from tangram.config import Scope
from tangram.errors import IntegrityError

# Few distinct values, so that most cases have ties.
SCORE = st.sampled_from([math.nan, -math.inf, -1.5, -0.0, 0.0, 0.25, 1.0, math.inf])


@st.composite
def score_tables(draw: st.DrawFn, max_layers: int = 1) -> Tensor:
    layers, heads, tokens = (
        draw(st.integers(1, max_layers)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 12)),
    )
    total = layers * heads * tokens
    values = draw(st.lists(SCORE, min_size=total, max_size=total))
    return torch.tensor(values, dtype=torch.float32).reshape(layers, heads, tokens)


def order(scores: list[float]) -> list[int]:
    """Indices, best first: high scores, then low indices, NaN last."""
    return sorted(
        range(len(scores)),
        key=lambda i: (math.isnan(scores[i]), 0 if math.isnan(scores[i]) else -scores[i], i),
    )


@given(scores=score_tables(), data=st.data())
def test_keep_takes_the_best_and_the_lower_of_equals(scores: Tensor, data: st.DataObject) -> None:
    table = scores[0]
    heads, tokens = table.shape
    counts = data.draw(st.lists(st.integers(0, tokens), min_size=heads, max_size=heads))
    kept = keep(table, counts)
    assert [row.tolist() for row in kept] == [
        sorted(order(row)[:count]) for row, count in zip(table.tolist(), counts, strict=True)
    ]
    assert all(row.dtype == torch.int64 for row in kept)


@given(
    scores=score_tables(max_layers=3),
    retention=st.floats(0.05, 1.0),
    scope=st.sampled_from(["layer", "model"]),
    sinks=st.integers(0, 5),
    window=st.integers(0, 14),
    start=st.sampled_from([0, 12]),
)
def test_dynamic_fractions_are_those_of_a_global_sort(
    scores: Tensor, retention: float, scope: Scope, sinks: int, window: int, start: int
) -> None:
    layers, heads, tokens = scores.shape
    kept = torch.zeros(layers, heads)
    pools = [[layer] for layer in range(layers)] if scope == "layer" else [list(range(layers))]
    for pool in pools:
        entries = [
            (layer, head, token)
            for token in range(tokens)
            for layer in pool
            for head in range(heads)
        ]
        safe = {
            entry
            for entry in entries
            if (start == 0 and entry[2] < sinks) or entry[2] >= tokens - window
        }
        best = order([math.inf if entry in safe else scores[entry].item() for entry in entries])
        for index in best[: max(round(retention * len(entries)), len(safe))]:
            kept[entries[index][:2]] += 1
    fractions = dynamic_fractions(scores, retention, scope, sinks, window, start)
    torch.testing.assert_close(fractions, kept.double() / tokens)


@pytest.fixture(scope="module")
def oracle() -> dict[str, Tensor]:
    return load_file(Path(__file__).parents[2] / "fixtures" / "kvpress" / "scores.safetensors")


def first_chunk(oracle: dict[str, Tensor], press: str) -> Tensor:
    return torch.stack([oracle[f"plain/{layer}/0/scores/{press}"] for layer in (0, 1)])


def test_layer_scope_allocates_as_ada_kv(oracle: dict[str, Tensor]) -> None:
    fractions = dynamic_fractions(first_chunk(oracle, "keydiff"), 0.25, "layer", 0, 0, 0)
    assert (fractions * 96).round().long().tolist() == oracle["allocation/layer"].tolist()


def test_model_scope_allocates_as_kvzip(oracle: dict[str, Tensor]) -> None:
    fractions = dynamic_fractions(first_chunk(oracle, "kvzip"), 0.25, "model", 4, 0, 0)
    assert (fractions * 96).round().long().tolist() == oracle["allocation/model"].tolist()


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_equal_scores_favour_no_head(scope: Scope) -> None:
    fractions = dynamic_fractions(torch.zeros(3, 4, 32), 0.25, scope, 0, 0, 0)
    assert fractions.tolist() == [[0.25] * 4] * 3


def test_scope_decides_who_competes() -> None:
    scores = torch.stack([torch.zeros(2, 8), torch.ones(2, 8)])
    assert dynamic_fractions(scores, 0.5, "layer", 0, 0, 0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert dynamic_fractions(scores, 0.5, "model", 0, 0, 0).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_protected_tokens_count_towards_the_total() -> None:
    scores = torch.stack([torch.zeros(1, 10), torch.ones(1, 10)])
    assert dynamic_fractions(scores, 0.5, "model", 1, 2, 0).tolist() == [[0.3], [0.7]]
    assert dynamic_fractions(scores, 0.5, "model", 1, 2, 10).tolist() == [[0.2], [0.8]]
    assert dynamic_fractions(scores, 0.1, "model", 1, 2, 0).tolist() == [[0.3], [0.3]]


def test_protect_forces_the_start_of_the_sequence_and_the_end_of_the_chunk() -> None:
    scores = torch.tensor([[math.nan, 1.0, 2.0, 3.0, math.nan]])
    inf = math.inf
    assert protect(scores, 0, 2, 1).tolist() == [[inf, inf, 2.0, 3.0, inf]]
    assert protect(scores[:, 1:4], 5, 2, 1).tolist() == [[1.0, 2.0, inf]]
    assert protect(scores[:, 1:4], 5, 2, 0).tolist() == [[1.0, 2.0, 3.0]]
    assert protect(scores[:, 1:4], 5, 2, 9).tolist() == [[inf, inf, inf]]
    assert scores.isnan().sum() == 2, "protect must not change its input"


def test_protected_tokens_are_always_kept() -> None:
    scores = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    for row in keep(protect(scores, 0, sinks=4, window=8), [12, 16, 40]):
        assert set(row.tolist()) >= {0, 1, 2, 3, *range(56, 64)}


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [1, 5], [-1, 1]])
def test_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(IntegrityError, match=r"2 .*0 to 4"):
        keep(torch.zeros(2, 4), counts)
