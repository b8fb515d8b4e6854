"""The steps of the plugin for vLLM by the kernels of a GPU, beside plain sums.

vLLM is not needed.
"""

from __future__ import annotations

# isort: off
import tests.interpreter  # noqa: F401, before Triton is imported

# isort: on
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tangram.kernels.triton.triton_kernels import TritonKernels
from tests.interpreter import INTERPRETED, interpreter_few

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"


def check(monkeypatch: pytest.MonkeyPatch, name: str, *known: object) -> None:
    for folder in (PLUGIN, PLUGIN / "tests"):
        monkeypatch.syspath_prepend(str(folder))
    with torch.device("cpu" if INTERPRETED else "cuda"):
        getattr(import_module("step_checks"), name)(*known, TritonKernels)


@pytest.mark.parametrize("scorer", interpreter_few(("keydiff", "tova", "snapkv"), "snapkv"))
def test_steps_may_end_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scorer: str
) -> None:
    check(monkeypatch, "check_cuts", 0, tmp_path, [scorer])


def test_steps_of_any_lengths_have_the_same_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "check_reserved")
