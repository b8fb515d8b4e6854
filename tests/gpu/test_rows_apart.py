"""Few prefill rows are passes of their own, in buffers that graphs replay, and compute what they
always do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tangram.engine.loop import Engine
from tangram.engine.passes.graphs import PassGraphs
from tangram.kernels.interface import PassAddresses
from tangram.kernels.triton.padded import RowShape
from tangram.kernels.triton.triton_kernels import TritonKernels
from tangram.model.load import LoadedModel
from tests.gpu.test_engine import CASES, CHUNK, PROMPTS, both, in_step, models, options_of
from tests.gpu.test_engine import pytestmark as pytestmark
from tests.interpreter import interpreter_few

__all__ = ["models"]


def apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Makes the engine take rows apart where nothing can be captured, too; which of them had space,
    as they come.
    """
    passes, had_space = engine._runner.passes, list[bool]()
    passes.graphs = PassGraphs(passes.forward, engine.device)
    pad = TritonKernels._pad

    def count_padded(kernels: TritonKernels, addresses: PassAddresses) -> RowShape | None:
        shape = pad(kernels, addresses)
        if addresses.padding is not None:
            had_space.append(shape is not None)
        return shape

    monkeypatch.setattr(TritonKernels, "_pad", count_padded)
    return had_space


@pytest.mark.parametrize(
    ("case", "gathers"),
    interpreter_few(
        [
            (case, gathers)
            for case in (
                "llama",
                "llama, uncompressed",
                "gpt-oss, windows and sinks",
                "gemma 2, softcap",
            )
            for gathers in (False, True)
        ],
        ("gpt-oss, windows and sinks", False),
    ),
)
def test_rows_that_are_taken_apart_leave_what_torch_leaves(
    case: str,
    gathers: bool,
    models: dict[int, LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks with and without a past, tails, and a chunk that an answer fills while
    others decode.
    """
    from tangram.kernels.triton import gathered

    if gathers:
        if torch.cuda.is_available():
            pytest.skip("tiny models are in float32, which is not gathered")
        monkeypatch.setattr(gathered, "LEAST_TOKENS", CHUNK)
        monkeypatch.setattr(gathered, "serves", lambda pool, card: True)
    loaded = models[id(CASES[case][0])]
    engines = both(loaded, options_of(case, loaded, tmp_path))
    had_space = apart(engines[1], monkeypatch)
    in_step(engines, PROMPTS)
    assert len(had_space) >= 6 and all(had_space)
    assert engines[0].stats().sealed_chunks == 4


def test_scorers_that_are_not_fused_are_computed_with_the_others(
    models: dict[int, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their chunks; tails are taken apart."""
    case = "llama, another scorer"
    loaded = models[id(CASES[case][0])]
    engines = both(loaded, options_of(case, loaded, tmp_path))
    had_space = apart(engines[1], monkeypatch)
    in_step(engines, PROMPTS)
    assert len(had_space) < 3


def test_a_row_for_which_there_is_no_space_is_computed_all_the_same(
    models: dict[int, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More entries than are copied at a time."""
    from tangram.kernels.triton import gathered, triton_kernels

    if torch.cuda.is_available():
        pytest.skip("tiny models are in float32, which is not gathered")
    monkeypatch.setattr(gathered, "LEAST_TOKENS", CHUNK)
    monkeypatch.setattr(gathered, "serves", lambda pool, card: True)
    monkeypatch.setattr(triton_kernels, "MOST_BYTES", 1 << 14)
    loaded = models[id(CASES["llama"][0])]
    engines = both(loaded, options_of("llama", loaded, tmp_path))
    had_space = apart(engines[1], monkeypatch)
    in_step(engines, PROMPTS)
    assert not all(had_space)
