"""Output of commands. Paths, names and errors are printed literally, never as markup."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


def output() -> Console:
    """Standard output."""
    return _console(stderr=False)


def messages() -> Console:
    """Standard error."""
    return _console(stderr=True)


def tell(text: str, style: str = "") -> None:
    """Write a message; its lines are not broken."""
    _print(Text(text, style))


def tell_error(error: object, kind: str = "error", colour: str = "red") -> None:
    """Write an error in one line, after a coloured word."""
    _print(Text.assemble((f"{kind}:", colour), f" {' '.join(str(error).splitlines())}"))


def waiting(text: str) -> AbstractContextManager[object]:
    """Show a spinner in a terminal while inside."""
    return messages().status(Text(text))


def progress(*, counted: bool = True) -> Progress:
    """A progress bar in a terminal; if `counted`, it shows the number done and the total."""
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *([MofNCompleteColumn()] if counted else []),
        TimeRemainingColumn(),
    ]
    shown = messages()
    whole_run_s = 24 * 3600.0  # what is left goes by all that was done, not by the last seconds
    return Progress(
        *columns, console=shown, disable=not shown.is_terminal, speed_estimate_period=whole_run_s
    )


def is_wrapped() -> bool:
    """Whether output has a width: a terminal has a width, and COLUMNS sets it."""
    return sys.stderr.isatty() or "COLUMNS" in os.environ


def _print(text: Text) -> None:
    messages().print(text, soft_wrap=True)


def _console(**options: Any) -> Console:
    return Console(markup=False, emoji=False, highlight=False, **options)
