"""Replays requests over simulated replicas: hits, times to first tokens, balance, decisions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tangram.routing.digest import PREFIX_BYTES
from tangram_lab.fleet.arrivals import Arrival
from tangram_lab.fleet.costs import EngineCosts
from tangram_lab.fleet.policies import BALANCERS, MOST_KEYS
from tangram_lab.fleet.simulated_replica import SimulatedReplica, Visit

# So often the balancer learns which requests have ended.
TICK_S = 0.25
IDEAL = "ideal"


@dataclass(frozen=True)
class Loss:
    """The replica with the most open requests dies at `at_s`. A new one comes after `gone_s`."""

    at_s: float
    gone_s: float = 60.0


@dataclass(eq=False)
class FleetRun:
    """What one replay has shown. Times are simulated, but `decision_s` is that of this CPU."""

    balancer: str
    replicas: int
    report_s: float
    visits: list[Visit] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    digest_keys: list[int] = field(default_factory=list)
    report_ages_s: list[float] = field(default_factory=list)
    resent: int = 0
    work: list[SimulatedReplica] = field(default_factory=list)

    def figures(self, ideal_hits: int) -> dict[str, Any]:
        """Everything that is published of it."""
        asked = sum(len(visit.arrival.chain) for visit in self.visits)
        hits = sum(visit.hits for visit in self.visits)
        first_s = [visit.first_s - visit.at_s for visit in self.visits if visit.first_s is not None]
        return {
            "balancer": self.balancer,
            "replicas": self.replicas,
            "report_s": self.report_s,
            "requests": len(self.visits),
            "resent": self.resent,
            "hit_share": hits / asked,
            "of_ideal": hits / ideal_hits,
            "ttft_s": _percentiles(first_s, 50, 90, 99),
            "busy_share": sum(one.busy_s for one in self.work)
            / sum(one.now_s for one in self.work),
            "most_over_mean": {
                "busy_s": _most_over_mean([one.busy_s for one in self.work]),
                "computed_tokens": _most_over_mean([one.computed_tokens for one in self.work]),
                "requests": _most_over_mean([one.requests for one in self.work]),
            },
            "decision_us": _percentiles([1e6 * each for each in self.decision_s], 50, 99),
            "digest_bytes": {
                "mean": PREFIX_BYTES * float(np.mean(self.digest_keys or [0])),
                "most": PREFIX_BYTES * max(self.digest_keys, default=0),
            },
            "report_age_s": _percentiles(self.report_ages_s, 50, 99),
        }


class SimulatedFleet:
    """Replicas behind one balancer. `now_s` is the time of the simulation."""

    def __init__(
        self, balancer: str, replicas: int, costs: EngineCosts, *, report_s: float = 1.0
    ) -> None:
        self.now_s = 0.0
        self._costs = costs
        self._shared: OrderedDict[bytes, None] | None = None
        if balancer == IDEAL:
            self._costs = costs.model_copy(update={"cached_chunks": 2**62})
            self._shared = OrderedDict()
        self.run = FleetRun(balancer, replicas, report_s)
        make = BALANCERS["least-loaded" if balancer == IDEAL else balancer]
        self._balancer = make(lambda: self.now_s)
        self._alive = {name: self._make_replica() for name in range(replicas)}
        self._reported_s = dict.fromkeys(self._alive, 0.0)
        self._ticks = 0
        self._balancer.set_replicas(list(self._alive))

    def _make_replica(self) -> SimulatedReplica:
        replica = SimulatedReplica(self._costs, self.now_s)
        if self._shared is not None:
            replica.cached = self._shared
        self.run.work.append(replica)
        return replica

    def replay(self, arrivals: Sequence[Arrival], loss: Loss | None = None) -> FleetRun:
        """Send `arrivals` at their times, and wait until all have ended."""
        joins_s, lost = float("inf"), -1
        for arrival in arrivals:
            self._run_until(arrival.at_s)
            if loss is not None and lost < 0 and arrival.at_s >= loss.at_s:
                lost, joins_s = self._lose(), arrival.at_s + loss.gone_s
            if arrival.at_s >= joins_s:
                joins_s = float("inf")
                self._alive[lost] = self._make_replica()
                self._balancer.set_replicas(sorted(self._alive))
            self._send(Visit(arrival, arrival.at_s))
        while any(one.running or one.waiting for one in self._alive.values()):
            self._run_until(self.now_s + 10.0)
        return self.run

    def _send(self, visit: Visit) -> None:
        begin_s = time.thread_time()
        name = self._balancer.send(visit)
        self.run.decision_s.append(time.thread_time() - begin_s)
        self.run.report_ages_s.append(self.now_s - self._reported_s[name])
        self.run.visits.append(visit)
        replica = self._alive[name]
        replica.advance(self.now_s)
        replica.take(visit)

    def _lose(self) -> int:
        """The replica that has the most to lose dies. Its clients ask again at once."""
        lost = max(self._alive, key=lambda name: len(self._alive[name].open_visits))
        replica = self._alive.pop(lost)
        self._balancer.set_replicas(sorted(self._alive))
        for visit in replica.open_visits:
            self._balancer.end(visit, lost)
            self.run.visits.remove(visit)
            self.run.resent += 1
            again = visit.at_s if visit.first_s is None else self.now_s
            self._send(Visit(visit.arrival, again))
        return lost

    def _run_until(self, to_s: float) -> None:
        while (self._ticks + 1) * TICK_S <= to_s:
            self._ticks += 1
            self.now_s = self._ticks * TICK_S
            for name, replica in self._alive.items():
                replica.advance(self.now_s)
                for visit in replica.ended:
                    self._balancer.end(visit, name)
                replica.ended.clear()
            self._report()
        self.now_s = to_s

    def _report(self) -> None:
        """Replicas report in turns, each every `report_s`."""
        every = max(1, round(self.run.report_s / TICK_S))
        for name, replica in self._alive.items():
            if (self._ticks + name) % every == 0:
                self._balancer.take_report(name, replica)
                self._reported_s[name] = self.now_s
                self.run.digest_keys.append(min(MOST_KEYS, len(replica.cached)))


def _percentiles(values: Sequence[float], *shares: int) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) if values else 0.0 for share in shares}


def _most_over_mean(values: Sequence[float]) -> float:
    return float(max(values) / np.mean(values))
