"""Progress bars for long work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def show_progress(items: Sequence[Item], description: str = "Calibrating") -> Iterable[Item]:
    """`items` with a progress bar on standard error, or without one if that is no terminal."""
    console = Console(stderr=True)
    return track(items, description, console=console, disable=not console.is_terminal)
