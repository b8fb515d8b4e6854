"""Times every schedule on every case, and makes or judges a policy (PersistentKV)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from tangram.kernels.card import Card
from tangram.plan.cost import CostModel
from tangram.plan.policy import FLASHINFER, Policy, StepLoad
from tangram_lab.baselines.compared_schedules import KernelVariant
from tangram_lab.kernel_benchmarks import flashinfer
from tangram_lab.kernel_benchmarks.case import BatchGeometry
from tangram_lab.kernel_benchmarks.cases import NamedCase
from tangram_lab.kernel_benchmarks.contenders import Ours
from tangram_lab.kernel_benchmarks.cost_fit import measure_cost
from tangram_lab.kernel_benchmarks.flashinfer_contender import Library
from tangram_lab.kernel_benchmarks.timing import ColdCache, Contender, Measurement, measure
from tangram_lab.kernel_benchmarks.workloads import Workload, compute_expected

# One for each limit of a step: balance, one row's latency, repeated reads of a prefix.
SCHEDULES = (
    "aot",
    "workqueue",
    "workqueue+ctas=2+warps=4",
    "workqueue+ctas=2",
    "packing:thrifty",
    "packing:thrifty+queries=128",
    "packing:thrifty+onetile",
)
REPLAYS = 20
Cases = Iterable[NamedCase]


@dataclass(frozen=True)
class TimedCase:
    """One case: its load, and the measurement of each schedule by name."""

    case: NamedCase
    load: StepLoad
    times: dict[str, Measurement]


class ScheduleBench:
    """Schedules of one geometry on one device, with FlashInfer where it is installed."""

    def __init__(
        self, geometry: BatchGeometry, dtype: torch.dtype, device: torch.device, cost: CostModel
    ) -> None:
        self._geometry, self._dtype, self._device, self._cost = geometry, dtype, device, cost
        self._card = Card.of(device)
        self._cold = ColdCache(device)
        self._library = flashinfer.is_installed()
        workspace_bytes = flashinfer.WORKSPACE_BYTES if self._library else 0
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)

    def time(self, case: NamedCase, schedules: Sequence[str]) -> TimedCase:
        """Measure each schedule, after its answer was compared with float32."""
        workload = Workload.build(case.make(), self._dtype, self._device)
        answer, load = compute_expected(workload), StepLoad.of(workload.case.decoding)
        builds: dict[str, Callable[[], Contender]] = {
            text: partial(Ours, KernelVariant.parse(text), workload, self._card, self._cost)
            for text in schedules
        }
        if self._library:
            builds[FLASHINFER] = partial(Library, workload, self._workspace)
        times = {
            name: measure(build(), answer, self._cold, replays=REPLAYS)
            for name, build in builds.items()
        }
        del workload, answer, builds
        torch.cuda.empty_cache()
        return TimedCase(case, load, times)


def geometry_of(geometry: BatchGeometry, dtype: torch.dtype) -> dict[str, Any]:
    """The geometry that a policy's measurements are for."""
    shape = asdict(geometry)
    del shape["element_bytes"]  # the dtype says it
    return shape | {"dtype": str(dtype).removeprefix("torch.")}


def calibrate_policy(
    geometry: BatchGeometry,
    dtype: torch.dtype,
    device: torch.device,
    cases: Cases,
    schedules: Sequence[str] = SCHEDULES,
) -> Policy:
    """Measure the cost model, then every schedule on every case. `cases` may show its progress."""
    cost = measure_cost(geometry, dtype, device)
    bench = ScheduleBench(geometry, dtype, device, cost)
    timed = [bench.time(case, schedules) for case in cases]
    return Policy.fit(
        torch.cuda.get_device_name(device),
        geometry_of(geometry, dtype),
        cost,
        list(timed[0].times),
        [one.load for one in timed],
        [[step_us(m) for m in one.times.values()] for one in timed],
    )


def step_us(measurement: Measurement) -> float:
    """The cost of a step: the device, and planning where every step plans."""
    return measurement.median_us + (measurement.plan_us if measurement.each_step else 0.0)


@dataclass(frozen=True)
class Verdict:
    """One held-out case: the choice, and the time of each schedule in microseconds.

    Times are of a whole step, and of the device alone.
    """

    name: str
    family: str
    load: dict[str, float]
    chosen: str
    choosing_us: float
    step_us: dict[str, float]
    device_us: dict[str, float]
    wall_us: dict[str, float]


def judge(
    policy: Policy, dtype: torch.dtype, geometry: BatchGeometry, device: torch.device, cases: Cases
) -> list[Verdict]:
    """Measure every schedule on every case, and record the policy's choices."""
    bench = ScheduleBench(geometry, dtype, device, policy.cost)
    ours = [name for name in policy.schedules if name != FLASHINFER]
    return [_verdict(policy, bench.time(case, ours)) for case in cases]


def _verdict(policy: Policy, timed: TimedCase) -> Verdict:
    began = time.perf_counter()
    chosen = policy.choose(timed.load, library=FLASHINFER in timed.times)
    choosing_us = (time.perf_counter() - began) * 1e6
    wall = {
        name: (m.wall_us if m.each_step else m.wall_kept_us) or 0.0
        for name, m in timed.times.items()
    }
    return Verdict(
        timed.case.name,
        timed.case.family,
        asdict(timed.load),
        chosen,
        choosing_us,
        {name: step_us(m) for name, m in timed.times.items()},
        {n: m.median_us for n, m in timed.times.items()},
        wall,
    )


def best_single(verdicts: Sequence[Verdict]) -> str:
    """The schedule that is fastest over all cases, by geometric mean."""
    names = verdicts[0].step_us
    return min(
        names, key=lambda name: statistics.geometric_mean([v.step_us[name] for v in verdicts])
    )


def regret(verdict: Verdict, single: str) -> float:
    """How much slower the choice is than that schedule: 0.03 is 3 %; a negative value is faster."""
    return verdict.step_us[verdict.chosen] / verdict.step_us[single] - 1.0
