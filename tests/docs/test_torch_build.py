"""Which build of PyTorch `make` installs, asked of pip with wheels in a folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import torch_build
from tools.torch_build import choose, describe, has_places

REQUIREMENT = "torch==2.13.0"
CUDA = "Requires-Dist: nvidia-nccl-cu13==2.30\n"


def make_wheel(folder: Path, version: str, required: str = "") -> None:
    """A wheel called torch that holds nothing."""
    folder.mkdir(exist_ok=True)
    info = f"torch-{version}.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{required}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "".join(f"{info}/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")),
    }
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(f"{info}/{name}", text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder in which pip looks, with the CUDA build alone; nothing is installed."""
    folder = tmp_path / "wheels"
    make_wheel(folder, "2.13.0+cu130", CUDA)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    monkeypatch.setenv("PIP_IGNORE_INSTALLED", "1")
    return folder


def let_driver(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(torch_build, "has_driver", lambda: installed)


def test_without_a_driver_the_cpu_build_is_taken_where_pip_finds_one(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels, "2.13.0+cpu")
    make_wheel(wheels, "2.13.0", CUDA)
    let_driver(monkeypatch, False)
    choice = choose(REQUIREMENT, [])
    assert choice is not None and choice.arguments == ["torch==2.13.0+cpu"]
    assert describe(choice) == (
        f"PyTorch 2.13.0+cpu, the CPU build, from {wheels}: 0.2 GB to download with its "
        "requirements, 0.7 GB on disk. No NVIDIA driver is installed."
    )
    let_driver(monkeypatch, True)
    choice = choose(REQUIREMENT, [])
    assert choice is not None and "2.13.0+cu130, the CUDA build" in describe(choice)


def test_the_cuda_build_without_a_driver_says_why_and_how_large(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_driver(monkeypatch, False)
    choice = choose(REQUIREMENT, [])
    assert choice is not None and choice.arguments == [REQUIREMENT]
    said = describe(choice)
    assert "2.9 GB to download with its requirements, 4.8 GB on disk" in said
    assert "No NVIDIA driver is installed, but pip finds no CPU build" in said
    assert "make TORCH_INDEX=https://download.pytorch.org/whl/cpu" in said


def test_an_index_that_is_named_decides(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels, "2.13.0+cpu")
    let_driver(monkeypatch, False)
    choice = choose(REQUIREMENT, ["--find-links", str(wheels)])
    assert choice is not None and "the CUDA build" in describe(choice)


def test_pytorchs_own_index_is_asked_only_where_pip_is_set_to_none(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "https://download.pytorch.org/whl/cpu"
    assert not any(own in search for search in torch_build.cpu_searches(REQUIREMENT))
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    assert own in torch_build.cpu_searches(REQUIREMENT)[-1]
    assert has_places("global.extra-index-url='https://here/simple'\n")
    assert not has_places(":env:.target='/tmp'\nglobal.timeout='60'\n")


def test_the_command_says_what_it_does_and_installs(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, "2.13.0+cpu")
    script = Path(torch_build.__file__)
    ended = subprocess.run(
        [sys.executable, script, "torch==2.13.0+cpu"], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()[:2]
    assert first == "Asking pip which build of torch==2.13.0+cpu there is"
    assert second.startswith("PyTorch 2.13.0+cpu, the CPU build")
    assert (tmp_path / "installed" / "torch-2.13.0+cpu.dist-info").is_dir()
    failed = subprocess.run([sys.executable, script, "torch==9.9"], capture_output=True, text=True)
    assert failed.returncode == 1 and "No matching distribution" in failed.stderr
    assert "Traceback" not in failed.stderr
