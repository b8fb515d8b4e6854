"""The environment of every published number: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numba", "triton", "flashinfer-python", "vllm")


@cache
def environment() -> dict[str, Any]:
    """The machine, versions and commit of a measurement; a GPU and packages only if present."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        "unknown",
    )
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "cpu": model,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **_gpu(),
        **_versions(),
    }


def _commit() -> str:
    """The commit, with "+" if files other than results differ from it.

    $GIT_COMMIT replaces it where sources are deployed without git.
    """
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    commit = _git("rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    changed = _git("status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)bench/results")
    return commit + ("+" if changed else "")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpu() -> dict[str, Any]:
    """Name, multiprocessors, L2 and memory from torch, and the driver from nvidia-smi."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    ).splitlines()
    return {
        "gpu": properties.name,
        "gpu_uuid": str(properties.uuid),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "gpu_memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": driver[0] if driver else "unknown",
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _git(*arguments: str) -> str:
    return _output("git", *arguments)


def _output(program: str, *arguments: str) -> str:
    """The output of a program; empty where it is not installed."""
    if shutil.which(program) is None:
        return ""
    folder = Path(__file__).parent  # the commit of this code, whatever the current folder is
    return subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    ).stdout.strip()
