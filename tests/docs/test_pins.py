"""The pinned versions fit together on the public index, for every Python and platform that is
promised.

uv resolves without this machine's configuration and wheels, for platforms that need not be this
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
# glibc 2.31 is that of Debian 11 and Ubuntu 20.04; llguidance's wheels need it.
LINUX = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
MACOS = "aarch64-apple-darwin"
PINS = (ROOT / "constraints.txt", ROOT / "constraints-cuda.txt")
# What the CPU build of PyTorch requires, by its metadata; that build is on PyTorch's own index.
CPU_BUILD_REQUIRES = (
    "filelock",
    "typing-extensions>=4.10.0",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
KEPT_VARIABLES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTPS_PROXY",
    "https_proxy",
    "NO_PROXY",
    "no_proxy",
)
OFFLINE = ("error sending request", "dns error", "Failed to fetch", "timed out")


def name_of(pin: str) -> str:
    return pin.partition("==")[0].lower().replace("_", "-").replace(".", "-")


def read_pins(*files: Path) -> dict[str, str]:
    lines = [line for file in files for line in file.read_text().splitlines()]
    return {name_of(line): line.partition("==")[2] for line in lines}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that an index page is fetched once."""
    return tmp_path_factory.mktemp("uv")


def resolve_pins(
    cache: Path, python: str, platform: str, *options: str, pins: tuple[Path, ...] = PINS
) -> dict[str, str]:
    """All extras, from wheels alone; skips where there is no network."""
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    command = [
        *(
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "pyproject.toml",
            "--all-extras",
            "--no-config",
            "--quiet",
        ),
        *(
            "--only-binary",
            ":all:",
            "--no-annotate",
            "--no-header",
            "--no-python-downloads",
            "--cache-dir",
            str(cache),
        ),
        *(option for file in pins for option in ("--constraint", str(file))),
        *(
            "--python",
            sys.executable,
            "--python-version",
            python,
            "--python-platform",
            platform,
            *options,
        ),
    ]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        # PyTorch has wheels for macOS 14 and later.
        env={
            **variables,
            "HOME": str(cache),
            "PATH": os.defpath,
            "MACOSX_DEPLOYMENT_TARGET": "14.0",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ended.returncode and any(sign in ended.stderr for sign in OFFLINE):
        pytest.skip(f"the public index cannot be reached: {ended.stderr.strip().splitlines()[0]}")
    assert ended.returncode == 0, ended.stderr
    # Without its header uv may still name an index of its own choice.
    return {
        name_of(line): line.partition("==")[2] for line in ended.stdout.splitlines() if "==" in line
    }


@pytest.mark.parametrize(
    ("python", "platform"),
    [
        pytest.param(python, platform, marks=() if (at + of) % 3 == 0 else pytest.mark.nightly)
        for at, python in enumerate(PYTHONS)
        for of, platform in enumerate((*LINUX, MACOS))
    ],
)
def test_the_public_index_has_all_that_is_pinned_and_nothing_else_is_needed(
    cache: Path, python: str, platform: str
) -> None:
    found = resolve_pins(cache, python, platform)
    assert found.items() <= read_pins(*PINS).items(), "pin what is left over"
    assert ("nvidia-cudnn-cu13" in found) == ("triton" in found) == (platform != MACOS)


@pytest.mark.parametrize(
    ("python", "platform"),
    [
        pytest.param(python, platform, marks=() if (at + of) % 3 == 0 else pytest.mark.nightly)
        for at, python in enumerate(PYTHONS)
        for of, platform in enumerate(LINUX)
    ],
)
def test_a_cpu_build_that_lies_on_disk_is_taken_without_cuda(
    cache: Path, python: str, platform: str, tmp_path: Path
) -> None:
    torch = read_pins(*PINS)["torch"]
    cpu_build(tmp_path, torch)
    found = resolve_pins(cache, python, platform, "--find-links", str(tmp_path), pins=PINS[:1])
    assert found.pop("torch") == f"{torch}+cpu"
    assert found.items() <= read_pins(PINS[0]).items(), "pin what is left over"
    assert not [name for name in found if name.startswith(("cuda", "nvidia"))]
    assert found["triton"] == read_pins(PINS[0])["triton"]


def cpu_build(folder: Path, version: str) -> None:
    """A wheel with the name and the requirements of PyTorch's CPU build."""
    info = f"torch-{version}+cpu.dist-info"
    metadata = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}+cpu"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in CPU_BUILD_REQUIRES]
    with zipfile.ZipFile(folder / f"torch-{version}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_what_is_promised_is_what_is_resolved() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    named = [entry.rpartition(" ")[2] for entry in project["classifiers"] if ":: 3." in entry]
    assert named == list(PYTHONS)
    assert "(3, 11) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text()
