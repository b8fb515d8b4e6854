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
    ("seconds", "requests"), [(120, 8), pytest.param(60, None, marks=pytest.mark.nightly)]
)
def test_a_load_generator_is_answered_every_request(
    seconds: int, requests: int | None, tmp_path: Path
) -> None:
    kept = tmp_path / "load.json"
    command = [
        sys.executable,
        "-m",
        "bench.stress.guidellm_load",
        "--seconds",
        str(seconds),
        *(() if requests is None else ("--requests", str(requests))),
        "-o",
        str(kept),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    result = json.loads(kept.read_text())
    assert result["figures"]["answered"] > 0 == result["figures"]["failed"]
    assert result["pages_afterwards"]["held"] == 0
