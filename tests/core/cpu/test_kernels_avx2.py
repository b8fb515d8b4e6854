"""The compiled kernels of a processor with AVX2 alone, as in most laptops, on one that has more.

Vectors of 8 are those of arm64, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
# What this process has found out about its processor holds for all of it, so another one asks.
RUN = """
import sys
import pytest
import torch

torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
from tangram.kernels.cpu.entry_products import LANES

assert LANES == 8, f"vectors have {LANES} lanes, AVX2 has 8"
sys.exit(pytest.main(sys.argv[1:]))
"""
PREFILL = "float32 and (test_compiled_prefill_is_softmax or test_compiled_prefill_gives)"
DECODE = "test_the_compiled_kernel_equals_the_specification"
EVERY_DTYPE = f"{DECODE} or test_every_code or test_decode_equals_dense"


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this processor lacks AVX2")
@pytest.mark.parametrize(
    ("checked", "passes"),
    [
        pytest.param(PREFILL, "2 passed", id="prefill"),
        pytest.param(f"{DECODE} and float32", "8 passed", id="decode"),
        pytest.param(EVERY_DTYPE, " passed", id="decode of every dtype", marks=pytest.mark.nightly),
    ],
)
def test_kernels_are_compiled_for_avx2(checked: str, passes: str) -> None:
    """Haswell was the first processor with AVX2: no code for it has an instruction beyond that."""
    checks = ["-v", "-p", "no:cacheprovider", "-k", checked, "tests/core/cpu/test_kernels.py"]
    found = subprocess.run(
        [sys.executable, "-c", RUN, *checks],
        cwd=ROOT,
        env=os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert passes in found.stdout, found.stdout
