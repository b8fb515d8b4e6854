"""Checks of weight files: the whole header is read before anything is built from it.

Sizes, offsets and names must be consistent.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from gguf import GGUFReader
from safetensors import SafetensorError, safe_open

from tangram.errors import ModelError
from tangram.model.config_json import refuse_parts
from tangram.model.folder import report_damage

_GGUF_MAGIC = b"GGUF"
# Forms of a GGUF header's numbers, by kind (`struct`); arrays hold these or texts.
_FORM_OF_KIND = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
}
_TEXT, _ARRAY = 8, 9
_MOST_ITEMS = 2**22  # of an array, which GGUFReader makes objects of; vocabularies have some 2**18
# What parsers raise for garbage.
_ASTRAY = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
)


def check_gguf(path: Path) -> None:
    """Raise `ModelError` unless the header can be read and every tensor lies inside the file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"model {str(path)!r} cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise ModelError(
            f"model {str(path)!r} is no GGUF file: it begins with {magic!r}, not with "
            f"{_GGUF_MAGIC!r}"
        )
    try:
        with path.open("rb") as file:
            header = _Header(file, path.stat().st_size)
            header.tensor_names()
        GGUFReader(path)
    except _ASTRAY as error:
        raise report_damage(path) from error
    refuse_parts(f"model {str(path)!r}", header.numbers)


def gguf_tensor_names(path: Path) -> list[str]:
    """The tensors that a GGUF file lists. The file must have passed `check_gguf`."""
    with path.open("rb") as file:
        return _Header(file, path.stat().st_size).tensor_names()


def gguf_numbers(path: Path, prefix: str) -> dict[str, float]:
    """The numbers of a GGUF file whose keys begin with `prefix`.

    Raises `ModelError` if the header cannot be read.
    """
    try:
        with path.open("rb") as file:
            header = _Header(file, path.stat().st_size)
            header.tensor_names()
    except _ASTRAY as error:
        raise report_damage(path) from error
    return {key: number for key, number in header.numbers.items() if key.startswith(prefix)}


class _Header:
    """A GGUF header, read without building anything. Its lengths are checked against the file.

    `numbers` are those of its keys, once `tensor_names` has read them.

    GGUFReader trusts the length of an array, and calls itself for arrays in arrays.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left, self._order = file, size, "<"
        self.numbers = dict[str, float]()

    def tensor_names(self) -> list[str]:
        """The names. Raises `ValueError` at a length beyond the file's end or an unknown kind."""
        self._skip(len(_GGUF_MAGIC))
        # The version is a small number: if its lower half is zero, the byte order is reversed.
        if self._number("I") & 0xFFFF == 0:
            self._order = ">"
        tensors, pairs = self._number("Q"), self._number("Q")
        for _ in range(pairs):
            key = self._read(self._number("Q")).decode()
            number = self._value(self._number("I"))
            if number is not None:
                self.numbers[key] = number
        names = []
        for _ in range(tensors):
            names.append(self._read(self._number("Q")).decode())
            dimensions = self._number("I")
            self._skip(8 * dimensions + struct.calcsize("<IQ"))
        return names

    def _value(self, kind: int) -> float | None:
        """A number; None for a text or an array, which are skipped."""
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if count > _MOST_ITEMS:
                raise ValueError(f"an array has {count} items, at most {_MOST_ITEMS} are read")
            if kind == _TEXT:
                for _ in range(count):
                    self._text()
            else:
                self._skip(struct.calcsize(_FORM_OF_KIND[kind]) * count)
        elif kind == _TEXT:
            self._text()
        else:
            return self._scalar(_FORM_OF_KIND[kind])
        return None

    def _text(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, form: str) -> int:
        return int(self._scalar(form))

    def _scalar(self, form: str) -> float:
        number: float
        (number,) = struct.unpack(self._order + form, self._read(struct.calcsize(f"<{form}")))
        return round(number, 6) if form == "f" else number

    def _read(self, count: int) -> bytes:
        self._take(count)
        return self._file.read(count)

    def _skip(self, count: int) -> None:
        self._take(count)
        self._file.seek(count, 1)

    def _take(self, count: int) -> None:
        if count > self._left:
            raise ValueError(f"{count} bytes are promised, {self._left} are left")
        self._left -= count


def check_safetensors(folder: Path) -> None:
    """Raise `ModelError` unless each safetensors file in `folder` is as long as its header says."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                file.keys()
        except (SafetensorError, *_ASTRAY) as error:
            raise report_damage(path) from error
