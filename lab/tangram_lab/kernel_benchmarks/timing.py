"""Device time with a cold L2: captured graphs, medians, and a check of the answer first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UPS = 3
REPLAYS = 30
SETTLE = 5  # replays before the measured ones
# Flushes before these: some 20 ms, in which clocks rise and the host gets ahead of the device
HEAD_START = 64
WALL_REPEATS = 8
LARGEST_ERROR = 1e-2
MATRIX_SIZE = 8192
COPY_ELEMENTS = 1 << 29  # float32: 2 GiB


class Contender(Protocol):
    """A way to compute a step's attention.

    `each_step`: its plan must be made again at every step. `replans`: captured work uses the latest
    plan.
    """

    name: str
    each_step: bool
    replans: bool

    def plan(self) -> None:
        """The host work of one step, upload included."""
        ...

    def run(self) -> list[Tensor]:
        """Enqueue the device work, the same at every call: the output of each layer, [R, Q, D]."""
        ...


class NotApplicable(Exception):
    """A contender cannot run the case; the message says why."""


class WrongAnswer(Exception):
    """A contender's output differs from the reference."""


@dataclass(frozen=True)
class Measurement:
    """`wall_us` covers plan, launch and device; `wall_kept_us` the same without planning."""

    name: str
    median_us: float
    min_us: float
    max_us: float
    all_us: list[float]
    in_graph: bool
    each_step: bool
    error: float
    same_bits: bool
    plan_us: float
    wall_us: float | None
    wall_kept_us: float | None

    def as_dict(self) -> dict[str, Any]:
        """All fields, for a result file."""
        return asdict(self)


class ColdCache:
    """Empties L2 between replays: writes, then reads, buffers of more than twice its size.

    The read leaves clean lines behind, so that the timed work does not write the flush back.
    """

    def __init__(self, device: torch.device) -> None:
        size = max(256 << 20, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._written = torch.ones(size // 4, dtype=torch.int32, device=device)
        self._read = torch.ones(size // 4, dtype=torch.float32, device=device)
        self._sink = torch.empty((), dtype=torch.float32, device=device)

    def flush(self) -> None:
        """Enqueue the writes and reads."""
        self._written.bitwise_not_()
        torch.amax(self._read, 0, out=self._sink)


def measure(
    contender: Contender,
    expected: Sequence[Tensor],
    cold: ColdCache,
    *,
    replays: int = REPLAYS,
    wall: bool = True,
) -> Measurement:
    """Plan, capture, compare with `expected`, then time.

    Raises `WrongAnswer`, or any error of the contender. A contender that does not replan has no
    `wall` time, since its capture is lost with its first plan.
    """
    wall = wall and contender.replans
    contender.plan()
    for _ in range(WARM_UPS):
        contender.run()
    torch.cuda.synchronize()
    launch, outputs, in_graph = _capture(contender)
    error, same_bits = _check(contender.name, launch, outputs, expected)
    times = _device_times(launch, cold, replays)
    plan_us = _median_us(contender.plan, WALL_REPEATS if wall else 2)
    kept_us = _median_us(launch, WALL_REPEATS, cold.flush) if wall else None

    def step() -> None:
        contender.plan()
        launch()

    wall_us = _median_us(step, WALL_REPEATS, cold.flush) if wall else None
    return Measurement(
        contender.name,
        statistics.median(times),
        min(times),
        max(times),
        times,
        in_graph,
        contender.each_step,
        error,
        same_bits,
        plan_us,
        wall_us,
        kept_us,
    )


def _capture(contender: Contender) -> tuple[Callable[[], None], list[Tensor], bool]:
    """The function that replays the contender, its outputs, and whether that is a graph."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = contender.run()
    except RuntimeError as error:
        if "captur" not in str(error).lower():
            raise
        torch.cuda.synchronize()
        outputs = contender.run()

        def launch() -> None:
            for kept, new in zip(outputs, contender.run(), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)

        return launch, outputs, False
    return graph.replay, outputs, True


def _check(
    name: str, launch: Callable[[], None], outputs: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[float, bool]:
    """The largest relative error of a layer, and whether two runs agree to the bit.

    Outputs are poisoned first.
    """
    runs = []
    for _ in range(2):
        for output in outputs:
            output.fill_(torch.nan)
        launch()
        torch.cuda.synchronize()
        runs.append([output.clone() for output in outputs])
    error = max(relative_error(out, ref) for out, ref in zip(runs[0], expected, strict=True))
    if not error < LARGEST_ERROR:
        raise WrongAnswer(f"{name}: relative error {error:.3g}, at most {LARGEST_ERROR} is allowed")
    return error, all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def relative_error(output: Tensor, expected: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖; infinite if any element is not finite."""
    if not bool(torch.isfinite(output).all()):
        return float("inf")
    difference = output.float().view(expected.shape) - expected
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _device_times(launch: Callable[[], None], cold: ColdCache, replays: int) -> list[float]:
    """Microseconds of each launch, between events that exclude the flush before it."""
    events = [(_event(), _event()) for _ in range(replays + SETTLE)]
    for _ in range(HEAD_START):
        cold.flush()
    for begin, end in events:
        cold.flush()
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events[SETTLE:]]


def _median_us(
    call: Callable[[], None], repeats: int, before: Callable[[], None] | None = None
) -> float:
    """Host time of a call, with the device's work; `before` runs ahead of each, untimed."""
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """The device's best rates, measured here: bytes and floating-point operations a microsecond."""

    copy_bytes_per_us: float
    operations_per_us: float

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device) -> Ceilings:
        """A device-to-device copy of 2 GiB (bytes read plus written) and a square matrix product on
        random data.
        """
        source = torch.randn(COPY_ELEMENTS, device=device)
        target = torch.empty_like(source)
        copy_us = statistics.median(_event_times(lambda: target.copy_(source)))
        a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(a)
        product_us = statistics.median(_event_times(lambda: torch.mm(a, b, out=out)))
        return cls(2 * COPY_ELEMENTS * 4 / copy_us, 2 * MATRIX_SIZE**3 / product_us)


def _event_times(call: Callable[[], Any], repeats: int = 12) -> list[float]:
    times = []
    for number in range(repeats + 3):
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return times
