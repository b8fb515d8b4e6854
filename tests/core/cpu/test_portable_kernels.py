"""Compiled decode on other processors: as right without intrinsics, and without AVX-512."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = "tests/core/cpu/test_kernels.py::test_the_compiled_kernel_equals_the_specification"
# Each length and head dim once, and each dtype of a pool.
FEW = (
    "0-torch.float32",
    "4-torch.float32",
    "5-torch.bfloat16",
    "0-torch.float8_e4m3fn",
    "0-torch.int8",
)
ON_ARM = """
import platform, sys
import numba, pytest, torch  # they may ask for themselves
platform.machine = lambda: "arm64"
from tangram.kernels import cpu_tasks
code = pytest.main(["-vv", *sys.argv[1:]])
assert cpu_tasks.next_task.__module__ == "tangram.kernels.cpu_portable"
assert "tangram.kernels.cpu_intrinsics" not in sys.modules
sys.exit(code)
"""

WITHOUT_AVX512 = """
import sys
import pytest, torch
torch.cpu._is_avx512_supported = lambda: False
from tangram.kernels import cpu_entries
code = pytest.main(["-vv", *sys.argv[1:]])
assert cpu_entries.LANES == 8
sys.exit(code)
"""


def check_tests(code: str, tests: list[str], **variables: str) -> None:
    """All `tests` pass in a new Python that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code, *tests],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("environment", "tests"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, [f"{TESTS}[{case}]" for case in FEW]),
        pytest.param({"NUMBA_DISABLE_JIT": "1"}, [TESTS], marks=pytest.mark.nightly),
        pytest.param({}, [TESTS], marks=pytest.mark.nightly),
    ],
    ids=["a few as Python", "as Python", "compiled"],
)
def test_the_portable_form_passes_the_tests_of_the_kernel(
    environment: dict[str, str], tests: list[str], tmp_path: Path
) -> None:
    """A cache of its own: compiled code does not know which of the two it was made of."""
    check_tests(ON_ARM, tests, NUMBA_CACHE_DIR=str(tmp_path), **environment)


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86 alone")
def test_shorter_vectors_pass_the_tests_of_the_kernel(tmp_path: Path) -> None:
    check_tests(WITHOUT_AVX512, [TESTS], NUMBA_CACHE_DIR=str(tmp_path))
