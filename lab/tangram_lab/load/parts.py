"""The time of each part of an engine, by name, without the parts inside it.

Boundaries are methods of the engine, known by name and wrapped only during a measurement. At each
boundary the host's clock is read and, on a GPU, an event is put on the stream. A part lasts from
one event to the next. Device work thus counts for the part that launched it, as does waiting for
it. Host work that overlaps with it costs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from tangram.engine.loop import Engine
from tangram.engine.passes.batcher import Batcher
from tangram.engine.passes.graphs import PassGraphs
from tangram.engine.passes.passes import Passes
from tangram.engine.schedule.scheduler import Scheduler
from tangram.kernels.stopwatch import GraphBlocks, Stopwatch
from tangram.model.attention import RepeatAttention, StepAttention
from tangram.model.sealing import ChunkSealer, GroupSealer

# A graph is one piece: its attention counts as model.
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "model": ((Passes, "forward"), (PassGraphs, "logits")),
    "attention": ((StepAttention, "attend"), (RepeatAttention, "attend")),
    "scoring and sealing": (
        (GroupSealer, "take"),
        (ChunkSealer, "take"),
        (ChunkSealer, "reconstruct"),
    ),
    "scheduling and reservation": ((Scheduler, "schedule"),),
    "tables": ((Passes, "_launch"), (Batcher, "_prefill_rows")),
    "planning": ((Batcher, "build"),),
    "prefix cache": ((Scheduler, "commit"),),
    "sampling and text": ((Engine, "step"),),
}
FORWARD = ("model", "attention", "scoring and sealing")
UPKEEP = ("scoring and sealing", "scheduling and reservation", "tables")
HOW = {
    "cpu": "host clock at the boundaries of parts; a part without the parts inside it",
    "cuda": "CUDA events on the stream at the boundaries of parts, waiting for the host included; "
    "a part without the parts inside it; a graph is all model, but for what it scores and seals, "
    "which events inside it time",
}


@dataclass(frozen=True)
class Split:
    """Seconds of each part: `seconds` by the device's clock, `host_s` by the host's.

    They are equal on a CPU.
    """

    seconds: dict[str, float]
    host_s: dict[str, float]
    steps: int

    @property
    def total_s(self) -> float:
        """All parts."""
        return sum(self.seconds.values())

    def share(self, *parts: str) -> float:
        """Of the total."""
        return sum(self.seconds[part] for part in parts) / self.total_s if self.total_s else 0.0


class PartClock:
    """Times all engines by part inside `watching`; `reset` discards what was measured.

    `clock_s` is the host's clock.
    """

    def __init__(
        self, device: torch.device, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._within, self._clock_s = device, list[str](), clock_s
        self._marks: list[tuple[str | None, float, Any]] = []
        self._replays = Counter[GraphBlocks]()

    @contextmanager
    def watching(self) -> Iterator[PartClock]:
        """Time the parts while inside."""
        with ExitStack() as undo:
            for part, methods in PARTS.items():
                for owner, name in methods:
                    method = vars(owner)[name]
                    setattr(owner, name, self._time(part, method))
                    undo.callback(setattr, owner, name, method)
            undo.callback(setattr, Stopwatch, "replayed", Stopwatch.count_replay)
            Stopwatch.count_replay = self._count(Stopwatch.count_replay)  # type: ignore[method-assign,assignment]
            yield self

    def reset(self) -> None:
        """Start again, in the current part."""
        self._marks.clear()
        self._replays.clear()
        self._mark()

    def split(self) -> Split:
        """The time of each part since the last `reset`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds, host = (dict.fromkeys(PARTS, 0.0) for _ in range(2))
        for (part, host_from, event_from), (_, host_to, event_to) in zip(
            self._marks, self._marks[1:], strict=False
        ):
            if part is not None:
                host[part] += host_to - host_from
                seconds[part] += (
                    host_to - host_from
                    if event_to is None
                    else event_from.elapsed_time(event_to) / 1e3
                )
        for blocks, times in self._replays.items():  # the same duration as in the last replay
            inside = times * blocks.seconds
            seconds["scoring and sealing"] += inside
            seconds["model"] -= inside
        return Split(seconds, host, sum(before[0] is None for before in self._marks[:-1]))

    def _count(
        self, replayed: Callable[[Stopwatch, GraphBlocks], None]
    ) -> Callable[[Stopwatch, GraphBlocks], None]:
        def run(watch: Stopwatch, blocks: GraphBlocks) -> None:
            self._replays[blocks] += 1
            replayed(watch, blocks)

        return run

    def _time(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **options: Any) -> Any:
            if self._capturing():
                return method(*args, **options)
            self._within.append(part)
            self._mark()
            try:
                return method(*args, **options)
            finally:
                self._within.pop()
                self._mark()

        return run

    def _mark(self) -> None:
        event: Any = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        self._marks.append((self._within[-1] if self._within else None, self._clock_s(), event))

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
