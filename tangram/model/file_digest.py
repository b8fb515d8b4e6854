"""The digest of a large file, which is remembered as long as the file stays the same."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from tangram.errors import ModelError
from tangram.foreign_files import parse_json, read_text, refuse_irregular, replace_file

_SAMPLES, _SAMPLE_BYTES = 64, 4096
# Times of files advance in steps of some milliseconds, and on a few file systems of two seconds.
_STEP_NS = 2 * 10**9


def file_digest(path: Path, notes: Path) -> str:
    """SHA-256 (hex) of the content of `path`.

    The folder `notes` remembers it beside the file's inode, size, times and samples of its content,
    so an unchanged file is not read again. Raises `ModelError` if the file changes meanwhile, and
    `OSError` if it cannot be read.
    """
    stamp = _stamp(path)
    note = notes / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    with suppress(OSError, ValueError, LookupError, TypeError):
        remembered = parse_json(read_text(note))
        if remembered["stamp"] == stamp:
            return str(remembered["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _stamp(path) != stamp:
        raise ModelError(f"model {str(path)!r} is being written: try again when it is whole")
    status = path.stat()
    # A file that has just been written may change again without another time.
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _STEP_NS:
        with suppress(OSError):  # without a note the file is read again at the next start
            notes.mkdir(parents=True, exist_ok=True)
            refuse_irregular(note)  # writing to a pipe that nobody reads would block for ever
            with replace_file(note) as written:
                written.write_text(json.dumps({"stamp": stamp, "sha256": digest}))
    return digest


def _stamp(path: Path) -> list[int | str]:
    """What differs when the content does.

    A copy that keeps the time of modification has another inode or time of change. Images of file
    systems may set all of these to fixed values, so parts of the content are sampled, too.
    """
    samples = hashlib.sha256()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        for place in range(_SAMPLES):
            file.seek(place * status.st_size // _SAMPLES)
            samples.update(file.read(_SAMPLE_BYTES))
    times = status.st_mtime_ns, status.st_ctime_ns
    return [status.st_ino, status.st_size, *times, samples.hexdigest()]
