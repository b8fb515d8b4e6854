"""Measures the device time of blocks of work without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class GraphBlocks:
    """The events around blocks that a graph replays."""

    events: tuple[tuple[Any, Any], ...]

    @property
    def seconds(self) -> float:
        """Their time in the last replay, which the device must have finished."""
        return float(sum(begin.elapsed_time(end) for begin, end in self.events)) / 1e3


class Stopwatch:
    """Adds up the seconds that blocks take on `device`.

    On a CPU it reads the clock. On a GPU it puts an event on the stream before and after a block. A
    later `collect` reads the time between them once both have passed. Blocks do not nest. A graph
    that is captured around blocks includes their events (`GraphBlocks`): call `count_replay` for
    each replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._device = device.type == "cuda", device
        self._running: deque[tuple[Any, Any]] = deque()
        self._spare: list[tuple[Any, Any]] = []
        self._captured: list[tuple[Any, Any]] = []
        self._replayed: dict[GraphBlocks, tuple[int, Any]] = {}
        self.seconds = 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the device work that is queued inside."""
        if not self._on_gpu:
            begin_s = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begin_s
            return
        captured = torch.cuda.is_current_stream_capturing()
        begin, end = (
            self._spare.pop()
            if self._spare and not captured
            else (_event(captured), _event(captured))
        )
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        (self._captured if captured else self._running).append((begin, end))

    def take_blocks(self) -> GraphBlocks:
        """The blocks of the graph that has just been captured."""
        found, self._captured = GraphBlocks(tuple(self._captured)), []
        return found

    def count_replay(self, blocks: GraphBlocks) -> None:
        """Report that the graph with `blocks` has just been launched once more."""
        if blocks.events:
            passed = _event(external=False)
            passed.record(torch.cuda.current_stream(self._device))
            self._replayed[blocks] = self._replayed.get(blocks, (0, None))[0] + 1, passed

    def collect(self) -> None:
        """Add the blocks that the device has finished, without waiting for it."""
        while self._running and self._running[0][1].query():
            begin, end = pair = self._running.popleft()
            self.seconds += begin.elapsed_time(end) / 1e3
            self._spare.append(pair)
        # A replay overwrites the times before: an unread replay counts as the last.
        for blocks in [graph for graph, (_, passed) in self._replayed.items() if passed.query()]:
            times, _ = self._replayed.pop(blocks)
            self.seconds += times * blocks.seconds

    def clear(self) -> None:
        """Forget all times."""
        self._running.clear()
        self._replayed.clear()
        self.seconds = 0.0


def _event(external: bool) -> Any:
    return torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
