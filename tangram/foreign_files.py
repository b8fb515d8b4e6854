"""Files of users without surprises: read if regular, UTF-8, JSON of bounded nesting; written whole
or not at all.
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


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file, without its byte-order mark.

    Raises `OSError` if it cannot be read or is no regular file: a pipe would let us wait for ever.
    Raises `ValueError` if it is no UTF-8.
    """
    if Path(path).exists() and not stat.S_ISREG(Path(path).stat().st_mode):
        raise OSError(0, "it is not a regular file")
    return Path(path).read_text(encoding="utf-8-sig")


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """A file to write that becomes `path` at the end, whole or not at all; a pipe or a device is
    written itself.
    """
    target = Path(path)
    if (
        target.exists() and not target.is_file()
    ):  # in its place would be a file, for the whole machine
        yield target
        return
    target = Path(os.path.realpath(target))  # a link stays one
    # Containers with one folder have the same numbers
    partial = target.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def expand_home(path: str | Path) -> Path:
    """The path with the home folder for a leading `~`; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises RuntimeError there


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8; bytes of a command line that are none become halves of
    characters.
    """
    return value.encode(errors="ignore").decode() == value


def parse_json(text: str | bytes) -> Any:
    """What `text` says. Raises `ValueError` if that is no JSON, nested too deeply for Python, or no
    Unicode text.
    """
    try:
        found = json.loads(text)
        spelled = "\\u" in text if isinstance(text, str) else b"\\u" in text
        if spelled and not is_text(json.dumps(found, ensure_ascii=False)):
            raise ValueError("it spells half a surrogate pair, which is no Unicode text")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found
