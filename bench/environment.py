"""What every published number carries: hardware, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit a measurement was made with."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    return {
        "date": date.today().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "cpu": model,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numba")},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
