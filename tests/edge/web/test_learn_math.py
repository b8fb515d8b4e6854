"""The formulas of /learn equal the Python functions, on recorded cases that are current."""

from __future__ import annotations

# isort: off
import tests.interpreter  # noqa: F401, before Triton is imported

# isort: on
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels' tiles need Triton, which this system lacks")

from tools.learn_cases import cases
from tools.learn_data import LISTED
from tools.learn_page import CASES
from tools.learn_site import PAGE

# Parts of functions that have cases.
PARTS = {"forestOf", "choosePacking", "countEntries", "fillShare"}
HINT = "run python -m tools.learn_page"


def read_cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CASES.read_text())
    return found


def agrees(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            agrees(found[name], value, tolerance) for name, value in expected.items()
        )
    if isinstance(expected, list):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(agrees(*pair, tolerance) for pair in pairs)
    return bool(found == expected)


def test_the_python_still_gives_the_recorded_results() -> None:
    now, then = json.loads(json.dumps(cases())), read_cases()
    assert now.keys() == then.keys(), HINT
    wrong = [
        name
        for name in then
        if not agrees(now[name], then[name], max(1e-9, now[name]["tolerance"]))
    ]
    assert wrong == [], HINT


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What node says of math.js; the copy is marked as modules, which browsers need no mark for."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: it would compare math.js with the recorded cases")
    folder = tmp_path_factory.mktemp("math")
    shutil.copytree(PAGE.parent / "math", folder / "math")
    shutil.copy(PAGE.parent / "math.js", folder)
    (folder / "package.json").write_text('{"type": "module"}')
    script = Path(__file__).with_name("check_math.mjs")
    command = [node, str(script), str(folder / "math.js"), str(CASES)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_javascript_gives_the_recorded_results(checked: dict[str, Any]) -> None:
    assert checked["wrong"] == []
    assert checked["checked"] == sum(len(one["cases"]) for one in read_cases().values()) > 500


def test_every_formula_has_cases(checked: dict[str, Any]) -> None:
    assert set(checked["exported"]) - PARTS == set(read_cases())


def results(name: str) -> list[tuple[list[Any], Any]]:
    return [(one["arguments"], one["result"]) for one in read_cases()[name]["cases"]]


def test_the_positions_of_naive_decoding() -> None:
    found = [(given, result) for given, result in results("countNaivePositions")]
    assert ([1, 100], 5_050) in found
    assert ([1, 4096], 8_390_656) in found


@pytest.mark.parametrize(
    ("model", "bytes_per_token", "gib"),
    [
        ("llama-3.1-8b", 131_072, 3.91),
        ("llama-3.1-70b", 327_680, 9.77),
        ("llama-3.1-405b", 516_096, 15.38),
        ("qwen3-4b", 147_456, 4.39),
        ("qwen3-32b", 262_144, 7.81),
        ("mistral-large-2", 360_448, 10.74),
        ("deepseek-v3", 70_272, 2.09),
        ("kimi-k2", 70_272, 2.09),
    ],
)
def test_the_eight_sizes(model: str, bytes_per_token: int, gib: float) -> None:
    from tangram.sizing.cache_size import kv_size

    size = kv_size(model, 32_000)
    assert model in LISTED and len(LISTED) == 8
    assert size.bytes_per_token == bytes_per_token
    assert round(size.uncompressed_bytes / 2**30, 2) == gib


def test_the_crossover_batches() -> None:
    """H100: 989.4 TFLOP/s over 3.35 TB/s, 2 bytes a weight: 295.3."""
    found = {
        given[0]["name"]: result for given, result in results("crossoverBatch") if given[1] == 2
    }
    assert found["H100 SXM"] == 296 and found["H200"] == 207 and found["A100 80 GB"] == 154
