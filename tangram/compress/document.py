"""The file form of a profile: a JSON object on disk with its format version and its own digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tangram.errors import ProfileError
from tangram.foreign_files import parse_json, read_text


def canonical(value: object) -> str:
    """JSON text that is the same for equal values."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: object) -> str:
    """SHA-256 (hex) of the canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def read_object(path: str | Path, versions: Collection[int]) -> dict[str, Any]:
    """The JSON object in the file.

    Its `format_version` is checked first, so that a newer file is not reported as damaged. Raises
    `ProfileError` naming the file and what is wrong with it.
    """
    try:
        content = parse_json(read_text(path))
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"profile {path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ProfileError(
            f"profile {path}: holds a {type(content).__name__}, a profile is a JSON object"
        )
    if content.get("format_version") not in versions:
        raise ProfileError(
            f"profile {path}: format_version is {content.get('format_version')!r}, this Tangram "
            f"reads {' and '.join(map(str, versions))}: calibrate again, or use the Tangram that "
            "wrote it"
        )
    for place, number in _numbers(content, ""):
        if not math.isfinite(number):
            raise ProfileError(
                f"profile {path}: {place} is {json.dumps(number)}, it must be a finite number"
            )
    return content


def _numbers(value: object, place: str) -> Iterator[tuple[str, float]]:
    """Every number with a fraction inside `value`, with its path: `mean.0.3`."""
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(entry, f"{place}.{key}" if place else str(key))
