"""The wheel by itself, installed and used away from the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


# A cache in float32 is read by kernels that are compiled for each copy of the package.
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_an_installed_wheel_serves_its_commands_from_any_folder(
    dtype: str, site: Path, tmp_path: Path
) -> None:
    """Presets, profiles and the gate are read, the distribution's own version is told, the model
    answers.
    """

    def tangram(*arguments: str) -> str:
        return run(site / "bin" / "tangram", *arguments, folder=tmp_path, PYTHONPATH=str(site))

    where = (
        "import tangram, importlib.metadata as m; print(tangram.__file__, "
        "m.version('tangram-serve'))"
    )
    told = run("-c", where, folder=tmp_path, PYTHONPATH=str(site))
    assert told.split() == [str(site / "tangram" / "__init__.py"), __version__]
    assert tangram("--version") == f"tangram {__version__}\n"
    assert "GiB" in tangram("size", "llama-3.1-8b")
    # At ρ 0.5 the embedded model's default is a scorer whose gate and profile are in the wheel.
    asked = ("-p", "The capital of France is", "--max-tokens", "1", "--dtype", dtype)
    assert "Paris" in tangram("generate", *asked)
