"""`make quick` needs no torch: its tests are collected in a process without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLLECT = """
import sys
import pytest
sys.modules["torch"] = None
FOLDERS = ["tests/core/host", "tests/edge/host", "lab/tests/host"]
sys.exit(pytest.main([*FOLDERS, "--collect-only", "--quiet", "-p", "no:cacheprovider"]))
"""


def test_tests_of_the_host_are_collected_without_torch() -> None:
    command = [sys.executable, "-c", COLLECT]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout[-2000:]
