"""What makes the demo fail."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "bench" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    return module


def test_nothing_beside_the_demo_hides_a_standard_module() -> None:
    """It runs as a script, whose folder comes before the standard library."""
    assert not {path.stem for path in DEMO.parent.iterdir()} & sys.stdlib_module_names


def test_reuse_and_a_smaller_cache_are_required(demo: ModuleType) -> None:
    first = demo.Turn("q", "a", 3000, 0, 10, kv_bytes=50, kv_bytes_uncompressed=100, first_token_s=1.0, decode_s=1.0)
    second = replace(first, cached_tokens=2560)
    assert demo.problems([first, second]) == []
    assert "turn 2 reused nothing" in demo.problems([first, first])[0]
    assert "turn 2 holds 100" in demo.problems([first, replace(second, kv_bytes=100)])[0]


def test_a_server_that_cannot_start_fails_the_demo(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "MODEL", "/no/such/model")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert demo.main() == 1
    assert "before it was healthy" in capsys.readouterr().out
