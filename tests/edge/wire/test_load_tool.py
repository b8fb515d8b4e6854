"""A load generator of other people's making, for a while: it lives in an environment of its own
(docs/load.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stress.guidellm_load import GUIDELLM, ROOT


@pytest.mark.skipif(not GUIDELLM.exists(), reason="make load brings GuideLLM")
@pytest.mark.parametrize(
    "options",
    [
        # Two turns of two conversations.
        ("--seconds", "120", "--requests", "4", "--streams", "2", "--output-tokens", "8"),
        pytest.param(("--seconds", "120", "--requests", "8"), marks=pytest.mark.nightly),
        pytest.param(("--seconds", "60"), marks=pytest.mark.nightly),
    ],
    ids=["few", "eight", "a minute"],
)
def test_a_load_generator_is_answered_every_request(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    kept = tmp_path / "load.json"
    command = [sys.executable, "-m", "bench.stress.guidellm_load", *options, "-o", str(kept)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    result = json.loads(kept.read_text())
    assert result["figures"]["answered"] > 0 == result["figures"]["failed"]
    assert result["pages_afterwards"]["held"] == 0
