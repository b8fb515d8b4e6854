"""Python's garbage collection in a process that serves.

A collection of all objects looks at modules and weights, too, which takes half a second. It comes
the sooner the more objects outlive some steps. So a process that serves leaves out what was made
before it serves (CPython, `gc.freeze`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_uncollected() -> Iterator[None]:
    """Collect no garbage inside, and never what was made by then, until `gc.unfreeze`."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
