"""Compiled code without a place to keep it: a new process computes the same, and says what was not
kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def said(code: str, **variables: str) -> str:
    """All that a new Python writes; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(1, 2)\n"
    return done.stderr


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
