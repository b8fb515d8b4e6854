"""`tangram` with a count of its heap: `python -m bench.stress.heap COUNT serve MODEL …`.

It writes to the file COUNT. Resident memory includes the allocator's gaps, which grow, so it does
not show what is in use. glibc counts that itself (`mallinfo2`). With `EVERY_BYTE` its count
includes Python's own objects.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

EVERY_BYTE = {"PYTHONMALLOC": "malloc"}
COUNT_EVERY_S = 0.5
# One write of a fixed length, so that readers never see half a count.
DIGITS = 20


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h.

    In use are `uordblks` bytes in arenas and `hblkhd` in blocks of their own.
    """

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *(
            (name, ctypes.c_size_t)
            for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        ),
    ]


def counter() -> Callable[[], Mallinfo]:
    """Raises `OSError` or `AttributeError` with another C library, or one older than 2.33."""
    count = ctypes.CDLL("libc.so.6").mallinfo2
    count.restype = Mallinfo
    return count


def watch(count: Callable[[], Mallinfo], target: Path) -> None:
    """Write the bytes in use to `target` repeatedly, as long as the process lives."""
    file = os.open(target, os.O_WRONLY | os.O_CREAT)
    while True:
        now = count()
        os.pwrite(file, f"{now.uordblks + now.hblkhd:0{DIGITS}}".encode(), 0)
        time.sleep(COUNT_EVERY_S)


def in_use_mb(target: Path) -> float:
    """The last count of the process that writes to `target`."""
    return int(target.read_text()) / 1e6


def main() -> None:
    from tangram.cli import main as tangram  # readers of a count need no engine

    target, *sys.argv[1:] = sys.argv[1:]
    threading.Thread(target=watch, args=(counter(), Path(target)), daemon=True).start()
    tangram()


if __name__ == "__main__":
    main()
