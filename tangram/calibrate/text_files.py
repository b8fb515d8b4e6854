"""Read calibration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.errors import ConfigError
from tangram.foreign_files import parse_json, read_text


def read_texts(path: str | Path) -> list[str]:
    """The texts of a calibration file: one object a line in `.jsonl`, one text in any other file.

    A line has "text", "prompt" or "messages" (chat messages, joined as `role: content`). Blank
    lines are skipped. Raises `ConfigError` naming the file and the line.
    """
    return [text for text, _ in _read(path)]


def read_kinds(path: str | Path) -> list[str]:
    """The kind of each text of `read_texts`: "kind" of its line, or the file's name.

    The file's name is without its ending.
    """
    return [kind for _, kind in _read(path)]


def _read(path: str | Path) -> list[tuple[str, str]]:
    """Texts and kinds."""
    try:
        content = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data {path}: cannot be read as UTF-8 text: {error}") from error
    name = Path(path).stem
    if Path(path).suffix != ".jsonl":
        read = [(content, name)]
    else:
        # Not splitlines(): a JSON string may hold the line separators of Unicode.
        numbered = enumerate(content.split("\n"), start=1)
        read = [
            _record(line, f"data {path}, line {number}", name)
            for number, line in numbered
            if line.strip()
        ]
    if not any(text.strip() for text, _ in read):
        raise ConfigError(f"data {path}: holds no text")
    return read


def _record(line: str, place: str, name: str) -> tuple[str, str]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(
            f'{place}: needs an object with "text" or "prompt" (a string) or "messages" (a list)'
        )
    kind = record.get("kind", name)
    if not isinstance(kind, str):
        raise ConfigError(f'{place}: "kind" is {kind!r}, it must be a string')
    return _text_of(record, place), kind


def _text_of(record: dict[str, Any], place: str) -> str:
    for key in ("text", "prompt"):
        if isinstance(record.get(key), str):
            return str(record[key])
    if isinstance(record.get("messages"), list):
        return "\n".join(_message_text(message, place) for message in record["messages"])
    raise ConfigError(
        f'{place}: needs an object with "text" or "prompt" (a string) or "messages" (a list)'
    )


def _message_text(message: object, place: str) -> str:
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return f"{message.get('role', 'user')}: {message['content']}"
    raise ConfigError(f'{place}: every message needs "content", a string')
