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

ROOT = Path(__file__).parents[3]


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


def install(sources: Path, name: str, work: Path) -> Path:
    """A folder that holds what the wheel of a distribution has, and nothing else."""
    wheels, site = work / "wheels", work / "site"
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    built = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, sources)
    run(*pip, *built, folder=work)
    (wheel,) = wheels.glob(f"{name}-*.whl")
    run(*pip, "install", "--no-deps", "--target", site, wheel, folder=work)
    return site


def copy(folder: Path, to: Path, *names: str) -> Path:
    """What a wheel is built from: `names` of `folder`, without what was built before."""
    to.mkdir()
    for name in names:
        source = folder / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to)
    return to


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the serving wheel has, and no lab: the one that these tests run beside is hidden.

    The first distribution of a name counts.
    """
    work = tmp_path_factory.mktemp("wheel")
    names = ("tangram", "pyproject.toml", "README.md", "LICENSE")
    site = install(copy(ROOT, work / "sources", *names), "tangram_serve", work)
    hidden = site / "tangram_lab-0.dist-info"
    hidden.mkdir()
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: tangram-lab\nVersion: 0\n")
    return site


@pytest.fixture(scope="module")
def lab_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the lab's wheel has."""
    work = tmp_path_factory.mktemp("lab")
    names = ("tangram_lab", "pyproject.toml", "LICENSE")
    return install(copy(ROOT / "lab", work / "sources", *names), "tangram_lab", work)


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


def test_the_serving_wheel_has_no_lab_and_lists_its_commands(
    tangram: Callable[..., str], site: Path
) -> None:
    assert not (site / "tangram_lab").exists() and not (site / "tangram" / "lab").exists()
    told = tangram("--help").split()
    assert {"serve", "eval", "bench"} <= set(told)


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "smollm2", "--quick"],
        ["bench", "serving", "throughput"],
        ["bench", "--help"],
        ["calibrate", "-o", "p.json", "--report", "r.json"],
        ["calibrate", "--train-gate", "gate.safetensors"],
    ],
    ids=" ".join,
)
def test_without_the_lab_a_command_says_what_to_install(
    command: list[str], site: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, site / "bin" / "tangram", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 2 and not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and "pip install ./lab" in line
    assert not list(tmp_path.iterdir())


def test_without_the_lab_a_shell_completes_no_option_of_its_commands(
    site: Path, tmp_path: Path
) -> None:
    """What is written on standard error would stand in the middle of the line."""
    told = {"_TANGRAM_COMPLETE": "complete_bash", "COMP_WORDS": "tangram eval --s"}
    script = "import sys; from tangram.cli import main; sys.argv[0] = 'tangram'; main()"
    variables = {**os.environ, **told, "COMP_CWORD": "2", "PYTHONPATH": str(site)}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert (ended.stdout.strip(), ended.stderr) == ("", "")


def test_with_the_wheel_of_the_lab_its_commands_are_there(
    site: Path, lab_site: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join(map(str, (lab_site, site)))
    for command, option in ((["eval"], "--suites"), (["bench", "fleet"], "--replicas")):
        program = (site / "bin" / "tangram", *command, "--help")
        assert option in run(*program, folder=tmp_path, PYTHONPATH=path)


# Kernels are compiled for each copy of the package and for each dtype of the cache.
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_installed_wheel_answers(tangram: Callable[..., str], dtype: str) -> None:
    """At ρ 0.5 the embedded model's default is a scorer whose gate and profile are in the wheel."""
    asked = ("-p", "The capital of France is", "--max-tokens", "1", "--dtype", dtype)
    assert "Paris" in tangram("generate", *asked)
