"""Ways to choose a replica: `tangram.routing`, and what other balancers do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice

from tangram.routing.digest import KeyDigest
from tangram.routing.replica_choice import (
    LoadCosts,
    Placement,
    ReplicaReport,
    Router,
    weigh_replica,
)
from tangram_lab.fleet.simulated_replica import SimulatedReplica, Visit

# Keys of a report at most: those of 8 million tokens.
MOST_KEYS = 2**14


class Balancer(ABC):
    """Chooses among the replicas `names`. `open_visits` counts what it has sent there and runs."""

    def __init__(self) -> None:
        self.names: Sequence[int] = ()
        self.open_visits: dict[int, int] = {}

    def set_replicas(self, names: Sequence[int]) -> None:
        """The replicas there are now."""
        self.names = names
        self.open_visits = {name: self.open_visits.get(name, 0) for name in names}

    def send(self, visit: Visit) -> int:
        """The replica that gets `visit`."""
        name = self.choose(visit)
        self.open_visits[name] += 1
        return name

    def end(self, visit: Visit, name: int) -> None:
        """`visit` has ended at replica `name`, or failed with it."""
        if name in self.open_visits:
            self.open_visits[name] -= 1

    def take_report(self, name: int, replica: SimulatedReplica) -> None:  # noqa: B027
        """Replica `name` tells of itself. Most balancers do not listen."""

    @abstractmethod
    def choose(self, visit: Visit) -> int:
        """The replica that `visit` should go to."""


class RoundRobin(Balancer):
    """One after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._number = count()

    def choose(self, visit: Visit) -> int:
        """See `Balancer`."""
        return self.names[next(self._number) % len(self.names)]


class LeastLoaded(Balancer):
    """Where the fewest requests are open."""

    def choose(self, visit: Visit) -> int:
        """See `Balancer`."""
        return min(self.names, key=self.open_visits.__getitem__)


class ConsistentHashing(Balancer):
    """Rendezvous hashing of chunk `chunk` of the prompt, or of its last one if it is shorter."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self._chunk = chunk

    def choose(self, visit: Visit) -> int:
        """See `Balancer`."""
        chain = visit.arrival.chain
        key = chain[min(self._chunk, len(chain) - 1)] if chain else b""
        return max(self.names, key=lambda name: weigh_replica(str(name), key))


class Routing(Balancer):
    """`tangram.routing`, with reports or without."""

    def __init__(
        self, clock: Callable[[], float], *, reports: bool = True, costs: LoadCosts | None = None
    ) -> None:
        super().__init__()
        self._router, self._reports = Router(costs, clock=clock), reports
        self._placements: dict[Visit, Placement] = {}
        self._digests: dict[int, tuple[int, KeyDigest]] = {}

    def set_replicas(self, names: Sequence[int]) -> None:
        """See `Balancer`."""
        super().set_replicas(names)
        self._router.set_replicas(map(str, names))

    def choose(self, visit: Visit) -> int:
        """See `Balancer`."""
        best = self._router.rank(visit.arrival.chain)[0]
        self._placements[visit] = self._router.begin(best, visit.arrival.chain)
        return int(best.replica)

    def end(self, visit: Visit, name: int) -> None:
        """See `Balancer`."""
        super().end(visit, name)
        self._router.end(self._placements.pop(visit))

    def take_report(self, name: int, replica: SimulatedReplica) -> None:
        """See `Balancer`."""
        if not self._reports:
            return
        changes, digest = self._digests.get(name, (-1, KeyDigest()))
        if changes != replica.changes:
            # Simulated keys have 8 bytes, so nothing is cut.
            digest = KeyDigest(frozenset(islice(reversed(replica.cached), MOST_KEYS)))
            self._digests[name] = replica.changes, digest
        self._router.take_report(str(name), report_of(replica, digest))


def report_of(replica: SimulatedReplica, digest: KeyDigest) -> ReplicaReport:
    """What a simulated replica would report. A page is a chunk here."""
    total = replica.costs.cached_chunks
    return ReplicaReport(
        digest=digest,
        free_pages=total - min(total, len(replica.cached)),
        total_pages=total,
        queued=len(replica.waiting) if replica.running >= replica.costs.max_num_seqs else 0,
        running=replica.running,
        pending_chunks=replica.pending_chunks,
        age_s=0.0,
    )


BALANCERS: Mapping[str, Callable[[Callable[[], float]], Balancer]] = {
    "routing": Routing,
    "no-reports": lambda clock: Routing(clock, reports=False),
    "hash-first": lambda clock: ConsistentHashing(0),
    "hash-second": lambda clock: ConsistentHashing(1),
    "least-loaded": lambda clock: LeastLoaded(),
    "round-robin": lambda clock: RoundRobin(),
}
