"""Compiled code that is kept gives the same bits in each process, and without a place to keep it a
process says what was not kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Each of them prints what the first compiled function gives: entries [1, 2).
PLAIN = """
from tangram.plan.loops import find_largest, resolve
print(resolve(0, 1, 2, 3, 4))
"""
FULL_DISK = (
    """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""
    + PLAIN
)
TWO_FUNCTIONS = (
    FULL_DISK
    + """
import numpy as np
find_largest(np.zeros(3))
"""
)

# A function of fast-math, called by another: reordered sums of 128 weights.
CALLING = """
import numpy as np
from tangram.kernels.cpu.decode_loops import STRETCH, online_softmax
from tangram.numba_cache import compile_kept

@compile_kept()
def call(scores, count, top, total, out):
    online_softmax(scores, count, top, total, out)

scores = np.random.default_rng(0).standard_normal((64, STRETCH), np.float32)
top, total = np.full(64, -np.inf, np.float32), np.zeros(64, np.float32)
call(scores, STRETCH, top, total, np.zeros((64, 8), np.float32))
print(total.tobytes().hex())
"""
# One decode step from a pool of each dtype.
DECODING = """
import numpy as np
import torch
from tangram.kernels.cpu import compiled_attention
from tangram.kernels.interface import AttentionRule
from tangram.kernels.narrow import as_entries
from tangram.plan.split import plan_plain
from tests.paged import SCALING, make_batch

for dtype in (torch.float32, torch.float8_e4m3fn):
    one = make_batch(3, 2, 3, 64, longest=400, seed=1)
    where = as_entries(one.pool, dtype), one.tables, one.lengths, np.arange(len(one.q) + 1)
    plan = compiled_attention.CpuPlan.build(plan_plain(one.rows), one.rows.address, 1)
    rule = AttentionRule(SCALING)
    out = torch.empty_like(one.q)
    compiled_attention.DecodePass(*where, plan).run(one.q, one.k, one.v, out, 0, rule)
    print(out.numpy().tobytes().hex())
"""


def ran(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A new Python in the repository, which must end well."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )
    assert done.returncode == 0, done.stderr
    return done


def said(code: str, **variables: str) -> str:
    """What a new Python warns of; it must print what the first compiled function gives."""
    done = ran("-c", code, **variables)
    assert done.stdout == "(1, 2)\n"
    return done.stderr


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(CALLING, id="a call"),
        pytest.param(DECODING, id="decode", marks=pytest.mark.nightly),
    ],
)
def test_the_process_that_compiles_computes_the_bits_of_those_that_load(
    code: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"  # Numba keeps no code of functions that have no file
    script.write_text(code)
    first, second = (ran(str(script), NUMBA_CACHE_DIR=str(tmp_path)).stdout for _ in range(2))
    assert first and first == second


def test_code_is_kept_where_it_can_be(tmp_path: Path) -> None:
    assert said(PLAIN, NUMBA_CACHE_DIR=str(tmp_path)) == ""
    (kept,) = tmp_path.rglob("*resolve*.nbc")
    written_ns = kept.stat().st_mtime_ns
    assert said(PLAIN, NUMBA_CACHE_DIR=str(tmp_path)) == ""
    assert kept.stat().st_mtime_ns == written_ns


def test_no_folder_to_write_to_costs_the_cache_only(tmp_path: Path) -> None:
    below_a_file = tmp_path / "file" / "cache"
    below_a_file.parent.write_text("no folder")
    # Otherwise Numba goes on to the package's own folder, which root can always write to.
    only = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    warning = said(PLAIN, NUMBA_CACHE_DIR=str(below_a_file), **only)
    assert warning.count("could not be kept") == 1 and "NUMBA_CACHE_DIR" in warning


def test_a_full_disk_costs_the_cache_only(tmp_path: Path) -> None:
    warning = said(TWO_FUNCTIONS, NUMBA_CACHE_DIR=str(tmp_path))
    assert (
        warning.count("could not be kept") == 1
        and "File too large" in warning
        and str(tmp_path) in warning
    )


@pytest.mark.parametrize("suffix", ["nbc", "nbi"])
def test_a_damaged_file_costs_the_cache_only(tmp_path: Path, suffix: str) -> None:
    said(PLAIN, NUMBA_CACHE_DIR=str(tmp_path))
    (kept,) = tmp_path.rglob(f"*resolve*.{suffix}")
    kept.write_bytes(b"")
    assert "a damaged file" in said(PLAIN, NUMBA_CACHE_DIR=str(tmp_path))
