"""Counts the heap of a server: that of its engine's process, and of all that it starts.

Resident memory includes the allocator's gaps, which grow, so it does not show what is in use. glibc
counts that itself (`mallinfo2`). Every process of the server begins to count when its Python
starts, and writes to a file of its own. The count includes Python's own objects.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

FOLDER_VARIABLE = "TANGRAM_BENCH_HEAP_COUNTS"
COUNTED = Path(__file__).parent / "counted"
ROOT = Path(__file__).parents[2]
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


def count_into(folder: Path) -> dict[str, str]:
    """The variables with which a process, and all that it starts, count into `folder`."""
    paths = [str(COUNTED), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(paths), **EVERY_BYTE}


def begin_to_count() -> None:
    """Write the bytes in use repeatedly, as long as this process lives."""
    target = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    threading.Thread(target=_watch, args=(counter(), target), daemon=True).start()


def _watch(count: Callable[[], Mallinfo], target: Path) -> None:
    file = os.open(target, os.O_WRONLY | os.O_CREAT)
    while True:
        now = count()
        os.pwrite(file, f"{now.uordblks + now.hblkhd:0{DIGITS}}".encode(), 0)
        time.sleep(COUNT_EVERY_S)


def in_use_mb(folder: Path) -> float:
    """The last counts of the processes that count into `folder` and still run, together."""
    counts = [one.read_text() for one in folder.iterdir() if Path("/proc", one.name).exists()]
    return sum(int(count) for count in counts if count) / 1e6
