"""Installs PyTorch: the CPU build where there is no NVIDIA driver and pip finds one.

`python tools/torch_build.py REQUIREMENT [PIP OPTIONS]` asks pip which build it would take, says
which one, from where, how large and why, then lets pip install it. Where pip would take the CUDA
build and no driver is installed, it looks for the CPU build of the same version: in the indexes and
folders that pip is set to, and if pip is set to none, in PyTorch's own index. With pip options,
such as an index, the choice is pip's. It needs no package but pip.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

# GB on x86-64 Linux, of PyTorch 2.13 with all that it requires.
_CUDA_GB, _CPU_GB = (2.9, 4.8), (0.2, 0.7)
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What says where pip looks for packages.
_PLACES = ("index-url", "extra-index-url", "find-links", "no-index")

Wheel = dict[str, Any]  # an entry of pip's report


class Choice(NamedTuple):
    """What to install, why, and the arguments that let pip install it."""

    wheel: Wheel
    why: str
    arguments: list[str]


def choose(requirement: str, options: Sequence[str]) -> Choice | None:
    """The build to install; None if what is installed fits. Raises `CalledProcessError`."""
    arguments = [*options, requirement]
    found = ask_pip(arguments)
    if not found:
        return None
    if options or not is_cuda(found[0]):
        return Choice(found[0], "", arguments)
    if has_driver():
        return Choice(found[0], "An NVIDIA driver is installed.", arguments)
    for searched in cpu_searches(requirement):
        try:
            wheel = ask_pip(searched, quiet=True)[0]
        except subprocess.CalledProcessError:
            continue
        return Choice(wheel, "No NVIDIA driver is installed.", searched)
    why = (
        "No NVIDIA driver is installed, but pip finds no CPU build of this version. It takes "
        f"{_CPU_GB[0]} and {_CPU_GB[1]} GB: make TORCH_INDEX={_CPU_INDEX}"
    )
    return Choice(found[0], why, arguments)


def cpu_searches(requirement: str) -> list[list[str]]:
    """The arguments by which pip may find the CPU build, first to last."""
    searches = [[f"{requirement}+cpu"]]
    if not has_places(_pip("config", "list")):
        hurried = ["--retries", "0", "--timeout", "10"]
        searches.append(["--index-url", _CPU_INDEX, *hurried, requirement])
    return searches


def has_places(settings: str) -> bool:
    """Whether the output of `pip config list` names an index or a folder of packages."""
    names = {line.partition("=")[0].rpartition(".")[2] for line in settings.splitlines()}
    return not names.isdisjoint(_PLACES)


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed; its library comes with no other package."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def is_cuda(wheel: Wheel) -> bool:
    """Whether a wheel of PyTorch is built for CUDA."""
    required = wheel["metadata"].get("requires_dist", [])
    return sys.platform == "linux" and any(name.startswith(("cuda", "nvidia")) for name in required)


def ask_pip(arguments: Sequence[str], *, quiet: bool = False) -> list[Wheel]:
    """What `pip install` would install, by metadata alone. Raises `CalledProcessError`."""
    report = _pip(
        *("install", "--dry-run", "--no-deps", "--quiet", "--report", "-", *arguments), quiet=quiet
    )
    found: list[Wheel] = json.loads(report)["install"]
    return found


def _pip(*arguments: str, quiet: bool = False) -> str:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        check=True,
        text=True,
    ).stdout


def describe(choice: Choice) -> str:
    """Which build, from where, how large, and why."""
    wheel = choice.wheel
    fetched, kept = _CUDA_GB if is_cuda(wheel) else _CPU_GB
    url = urlsplit(wheel["download_info"]["url"])
    place = url.netloc or unquote(str(PurePosixPath(url.path).parent))
    return (
        f"PyTorch {wheel['metadata']['version']}, the {'CUDA' if is_cuda(wheel) else 'CPU'} build, "
        f"from {place}: {fetched} GB to download with its requirements, {kept} GB on disk. "
        f"{choice.why}"
    ).rstrip()


def main() -> None:
    """Choose, say so, install. PyTorch's requirements are installed with those of Tangram."""
    requirement, *options = sys.argv[1:]
    print(f"Asking pip which build of {requirement} there is", flush=True)
    try:
        choice = choose(requirement, options)
        if choice is None:
            print("PyTorch stays as it is: for another build, make clean first", flush=True)
            return
        print(describe(choice), flush=True)
        install = [sys.executable, "-m", "pip", "install", "--no-deps", *choice.arguments]
        subprocess.run(install, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
