"""The cells of the law's table (docs/architecture.md) that name a GPU, of the embedded model.

`python -m bench.law` measures the same and says how much is equal; this says what has to be.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.law import CHARACTERS, Measured, compare, make_prompts, measure_form
from tangram.model.load import LoadedModel, load_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="says what a GPU computes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]
TOKENS = 32
# By dtype, how far entries may be apart, as a part of the largest: some roundings of the dtype in
# each of 30 layers.
APART = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    """torch counts what it compiles in a process. Past its limit layers run without, and round
    otherwise from then on.
    """
    torch._dynamo.reset()


def load(dtype: str) -> LoadedModel:
    return load_model("smollm2", dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("form", "eager"),
    [
        ("float32", False),
        ("float16", False),
        ("bfloat16", False),
        ("bfloat16/fp8", False),
        ("bfloat16", True),
    ],
)
def test_the_same_requests_again_give_the_same_bits(form: str, eager: bool) -> None:
    """One after the other and all at once; in another engine, too."""
    loaded = load(form.partition("/")[0])
    prompts = make_prompts(loaded, CHARACTERS)
    engines = [Measured(loaded, form, enforce_eager=eager) for _ in range(2)]
    for at_once in (False, True):
        first, *others = (
            engine.find(prompts, TOKENS, at_once=at_once) for engine in engines for _ in range(2)
        )
        for again in others:
            row = compare(again, first)
            assert row["answers"] == row["prompts"]
            assert row["same_bits"] == row["chunks"] == len(first.entries) > 0


def check(way: str, row: dict[str, Any], dtype: str) -> None:
    """What the table says of `way`, with prompts that are answered alone in steps of few chunks."""
    assert row["chunks"] > 0
    if way == "alone, without graphs":
        # Compiled layers sum in another order: in 16 bits that decides which entries stay.
        assert dtype != "float32" or row["answers"] == row["prompts"]
        return
    if way == "together, steps of 8,192 tokens":
        assert row["apart"] <= APART[dtype]
    else:
        assert row["same_bits"] == row["chunks"]
    assert dtype != "float32" or row["answers"] == row["prompts"]


@pytest.mark.parametrize("dtype", APART)
def test_chunks_have_the_same_bits_whatever_else_runs(dtype: str) -> None:
    """All ways of `bench.law` against each prompt alone. In large steps, and without graphs,
    chunks are equal but for rounding.
    """
    loaded = load(dtype)
    prompts = make_prompts(loaded, CHARACTERS)
    for way, row in measure_form(lambda: load(dtype), dtype, prompts, TOKENS):
        check(way, row, dtype)
