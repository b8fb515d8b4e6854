"""Weight files are read to the end of their headers before anything is built from them: sizes, offsets, names."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader
from safetensors import SafetensorError, safe_open

from tangram.errors import ModelError

_GGUF_MAGIC = b"GGUF"
# A parser that is led astray by garbage fails in many ways.
_ASTRAY = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, TypeError, ValueError)


def check_gguf(path: Path) -> None:
    """Raise `ModelError` unless every field of the header can be read and every tensor lies inside the file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"model {str(path)!r} cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise ModelError(f"model {str(path)!r} is no GGUF file: it begins with {magic!r}, not with {_GGUF_MAGIC!r}")
    try:
        GGUFReader(path)
    except _ASTRAY as error:
        raise _damaged(path) from error


def check_safetensors(folder: Path) -> None:
    """Raise `ModelError` unless the tensors of each safetensors file in `folder` fill it as its header says."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                file.keys()
        except (SafetensorError, *_ASTRAY) as error:
            raise _damaged(path) from error


def _damaged(path: Path) -> ModelError:
    return ModelError(f"model file {str(path)!r} is damaged or was cut short: fetch it again and compare its checksum")
