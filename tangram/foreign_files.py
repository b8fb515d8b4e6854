"""Files of users: safe reading and atomic writing.

A file is read if it is regular, UTF-8, and JSON of bounded nesting. It is written whole or not at
all.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def refuse_irregular(path: str | Path) -> None:
    """Raise `OSError` if there is something at `path` that is no regular file.

    Reading a pipe would block for ever, and some devices have no end.
    """
    if Path(path).exists() and not stat.S_ISREG(Path(path).stat().st_mode):
        raise OSError(0, "it is not a regular file")


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file, without its byte-order mark.

    Raises `OSError` if it cannot be read or is no regular file, and `ValueError` if it is no
    UTF-8.
    """
    refuse_irregular(path)
    return Path(path).read_text(encoding="utf-8-sig")


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """A file to write that becomes `path` at the end, whole or not at all.

    A pipe or a device is written directly.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # a file would replace it for the whole machine
        yield target
        return
    target = Path(os.path.realpath(target))  # a link stays a link
    # Process ids are not unique across containers that share a folder.
    partial = target.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def expand_home(path: str | Path) -> Path:
    """The path with the home folder for a leading `~`; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises RuntimeError there


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8.

    Invalid bytes of a command line become halves of characters.
    """
    return value.encode(errors="ignore").decode() == value


def parse_json(text: str | bytes) -> Any:
    """The value of `text`.

    Raises `ValueError` if it is no JSON, too deeply nested, or no Unicode text.
    """
    try:
        found = json.loads(text)
        spelled = "\\u" in text if isinstance(text, str) else b"\\u" in text
        if spelled and not is_text(json.dumps(found, ensure_ascii=False)):
            raise ValueError("it spells half a surrogate pair, which is no Unicode text")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found
