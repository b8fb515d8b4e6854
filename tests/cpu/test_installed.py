"""The wheel by itself, installed and used away from the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.version import __version__

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel has, and nothing else."""
    work = tmp_path_factory.mktemp("wheel")
    sources = work / "sources"
    shutil.copytree(
        ROOT / "tangram", sources / "tangram", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        work,
        sources,
        folder=work,
    )
    (wheel,) = work.glob("tangram_serve-*.whl")
    run(*pip, "install", "--no-deps", "--target", work / "site", wheel, folder=work)
    return work / "site"


@pytest.fixture
def tangram(site: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs the installed command in an empty folder; what it prints."""

    def call(*arguments: str) -> str:
        return run(site / "bin" / "tangram", *arguments, folder=tmp_path, PYTHONPATH=str(site))

    return call


def test_an_installed_wheel_serves_its_commands_from_any_folder(
    tangram: Callable[..., str], site: Path, tmp_path: Path
) -> None:
    """Presets are read, and the distribution's own version is told."""
    where = (
        "import tangram, importlib.metadata as m; print(tangram.__file__, "
        "m.version('tangram-serve'))"
    )
    told = run("-c", where, folder=tmp_path, PYTHONPATH=str(site))
    assert told.split() == [str(site / "tangram" / "__init__.py"), __version__]
    assert tangram("--version") == f"tangram {__version__}\n"
    assert "GiB" in tangram("size", "llama-3.1-8b")


# Kernels are compiled for each copy of the package and for each dtype of the cache.
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_installed_wheel_answers(tangram: Callable[..., str], dtype: str) -> None:
    """At ρ 0.5 the embedded model's default is a scorer whose gate and profile are in the wheel."""
    asked = ("-p", "The capital of France is", "--max-tokens", "1", "--dtype", dtype)
    assert "Paris" in tangram("generate", *asked)
