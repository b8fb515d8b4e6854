"""Lines typed in a terminal, with a history. Several lines can form one entry."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tangram.cli.checks import as_text
from tangram.errors import ConfigError
from tangram.foreign_files import expand_home

MOST_HISTORY_LINES = 1000
_MOST_LINE_BYTES = 64 * 2**20
_QUOTES = '"""'


def history_file() -> Path:
    """The history file, in the user's state folder."""
    home = os.environ.get("XDG_STATE_HOME") or expand_home("~/.local/state")
    return Path(home) / "tangram" / "chat_history"


@contextlib.contextmanager
def history() -> Iterator[None]:
    """Offer the lines of this and former conversations to arrow keys while inside.

    This needs a terminal. Only its owner can read the file. There is no history if the file cannot
    be read or written, or if the user has no home.
    """
    path = history_file()
    if not sys.stdin.isatty() or find_spec("readline") is None or not path.is_absolute():
        yield
        return
    import readline

    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MOST_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def read_typed_line(prompt: str) -> str:
    """One line from standard input. A terminal shows `prompt` in bold.

    Raises `EOFError` at the end, `ConfigError` for a line that is not UTF-8.
    """
    if not sys.stdin.isatty():
        return _read_piped_line()
    if not sys.stdout.isatty():
        prompt = ""
    elif "NO_COLOR" not in os.environ:
        # \001 and \002 tell readline that what they enclose has no width
        prompt = f"\001\033[1m\002{prompt}\001\033[0m\002"
    try:
        line: str = as_text("line", input(prompt))
    except UnicodeDecodeError as error:
        raise _no_text(error) from error
    return line


def _read_piped_line() -> str:
    """The next line of a pipe or file; a bad line does not affect others.

    Raises `OSError` for a line without end.
    """
    line = sys.stdin.buffer.readline(_MOST_LINE_BYTES)
    if len(line) == _MOST_LINE_BYTES:
        raise OSError(
            errno.EFBIG, f"a line has more than {_MOST_LINE_BYTES} bytes", "standard input"
        )
    if not line:
        raise EOFError
    try:
        return line.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def _no_text(error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"line has bytes that are not UTF-8: {error}")


def entry(read: Callable[[str], str], prompt: str) -> str:
    r"""One entry: a line, lines that end in \ with the next one, or lines in triple quotes.

    The end of the input also ends an entry. Raises `EOFError` if there is nothing at all.
    """
    lines = [read(prompt)]
    goes_on = ".".ljust(len(prompt))
    with contextlib.suppress(EOFError):
        if lines[0].lstrip().startswith(_QUOTES):
            lines[0] = lines[0].lstrip().removeprefix(_QUOTES)
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(read(goes_on))
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read(goes_on))
    return "\n".join(lines).strip()
