"""How long the device works on something, without ever waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the seconds that blocks take on `device`.

    On a CPU that is the clock. On a GPU an event is put on the stream before and after a block: what lies between them
    is the time from one to the other, read by a later `collect` once both have passed. Blocks do not nest.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._device = device.type == "cuda", device
        self._running: deque[tuple[Any, Any]] = deque()
        self._spare: list[tuple[Any, Any]] = []
        self.seconds = 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time what is asked of the device inside."""
        if not self._on_gpu:
            begin_s = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begin_s
            return
        begin, end = self._spare.pop() if self._spare else (_event(), _event())
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        self._running.append((begin, end))

    def collect(self) -> None:
        """Enter the blocks that the device is through with; it is not waited for."""
        while self._running and self._running[0][1].query():
            begin, end = pair = self._running.popleft()
            self.seconds += begin.elapsed_time(end) / 1e3
            self._spare.append(pair)

    def clear(self) -> None:
        """Forget what was timed so far."""
        self._running.clear()
        self.seconds = 0.0


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
