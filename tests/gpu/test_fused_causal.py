"""A prompt's first chunks, where nothing is dropped, through torch's own attention: which, and what
comes of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.passes.passes import Passes
from tangram.kernels.interface import PrefillRows
from tangram.kernels.triton import fused_causal
from tangram.plan.records import PAST, SPAN
from tests.gpu.test_engine import CASES, CHUNK, PROMPTS, both, in_step, options_of
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.small_engines import tiny_model


def rows_of(*rows: tuple[int, int, int, int]) -> PrefillRows:
    """Rows (sequence, position, tokens, kept), end to end, of a model with one layer
    and two heads.
    """
    sequence, position, tokens, kept = np.array(rows).T
    ends = np.cumsum(tokens)
    spans = np.stack([ends - tokens, ends, ends - tokens, ends, position], 1).astype(np.int32)
    address = np.stack(
        [
            np.stack([sequence * 100, sequence * 100 + 50], 1),
            *2 * [np.repeat(position[:, None], 2, 1)],
        ],
        2,
    )
    counts = np.repeat(kept[None, :, None], 2, 2).astype(np.int32)
    heads = address.astype(np.int32).view(PAST)[None, ..., 0]
    return PrefillRows(heads, spans.view(SPAN)[:, 0], counts, counts, slice(0, len(rows)))


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_causal, "LEAST_TOKENS", 32)


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([(0, 0, 16, 16), (0, 16, 16, 16), (0, 32, 16, 16)], [(0, 3)]),
        ([(0, 0, 16, 16), (0, 16, 16, 16), (0, 32, 9, 9)], [(0, 2)]),  # a tail
        ([(0, 0, 16, 16), (0, 16, 16, 16), (1, 0, 16, 16), (1, 16, 16, 16)], [(0, 2), (2, 4)]),
        ([(0, 0, 16, 16), (1, 16, 16, 16)], []),  # two sequences
        ([(0, 16, 16, 16), (0, 32, 16, 16)], []),  # they have a past
        ([(0, 0, 16, 8), (0, 16, 16, 8)], []),  # something is dropped
        ([(0, 0, 16, 16), (1, 0, 40, 40), (0, 16, 16, 16)], [(1, 2)]),  # they do not lie together
        ([(0, 0, 16, 16)], []),  # too short
    ],
)
def test_runs_begin_at_the_first_token_and_drop_nothing(
    rows: list[Any], expected: list[tuple[int, int]]
) -> None:
    assert [
        (run.rows.start, run.rows.stop) for run in fused_causal.find_runs(rows_of(*rows))
    ] == expected


def test_rows_that_do_not_ask_and_second_passes_are_no_runs() -> None:
    rows = rows_of((0, 0, 40, 40), (1, 0, 40, 40))
    assert fused_causal.find_runs(rows.repeat_row(1, 5)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begin, end", [(10, 50), (0, 60)], ids=["some", "all"])
def test_a_run_attends_causally(
    begin: int, end: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(60, 8, 64, device=device).to(dtype).split([4, 2, 2], dim=1)
    run = fused_causal.CausalRun(slice(0, 2), slice(begin, end))
    found = fused_causal.attend(q, k, v, run, scaling=0.1)
    keys, values = (x[begin:end].float().repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * 0.1
    scores = scores.masked_fill(
        ~torch.ones(end - begin, end - begin, dtype=torch.bool, device=device).tril(), float("-inf")
    )
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("case", ["llama", "llama, uncompressed", "gemma 3"])
def test_engines_answer_the_same_with_it(
    case: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, attend = list[int](), fused_causal.attend

    def count_calls(*arguments: Any, **options: Any) -> Tensor:
        taken.append(arguments[3].tokens.stop - arguments[3].tokens.start)
        return attend(*arguments, **options)

    monkeypatch.setattr(fused_causal, "serves", lambda pool, card: True)
    monkeypatch.setattr(fused_causal, "attend", count_calls)
    # On a GPU so few chunks would be passes of their own, which graphs replay (test_rows_apart.py).
    monkeypatch.setattr(Passes, "takes_apart", lambda passes, rows: not rows)
    loaded = tiny_model(CASES[case][0], load_tokenizer("smollm2"), device)
    engines = both(loaded, options_of(case, loaded, tmp_path))
    taken.clear()  # a GPU's engine has rehearsed
    in_step(engines, PROMPTS[2:])
    assert set(taken) == ({2 * CHUNK} if case == "llama, uncompressed" else set())
