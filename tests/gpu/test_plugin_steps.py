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


@pytest.mark.parametrize("scorer", interpreter_few(("keydiff", "tova", "snapkv"), "snapkv"))
def test_steps_may_end_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scorer: str
) -> None:
    for folder in (PLUGIN, PLUGIN / "tests"):
        monkeypatch.syspath_prepend(str(folder))
    with torch.device("cpu" if INTERPRETED else "cuda"):
        import_module("step_checks").check_cuts(0, tmp_path, [scorer], TritonKernels)
