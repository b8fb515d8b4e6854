"""Which replica serves a request: the one with the longest prefix of it, unless it is overloaded.

The unit of all costs is a chunk: the time in which a replica computes it. A request waits until
what the replica has taken in before is computed. Then the chunks of its prompt that are not there
are computed anew. These count more than once, because they also take time from all that come later,
and twice that where the pool is full, because others are evicted for them. So the replica with the
longest prefix is *overloaded* for a request when the wait there exceeds the wait elsewhere by more
than the prefix saves.

A report is always old. The router adds what it has sent since: those requests count as load, and
their chunks as held, because the replica computes them before any later request.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from tangram.routing.digest import PREFIX_BYTES, KeyDigest

_Key = TypeVar("_Key")
_NOTHING = KeyDigest()
# Pools are compared by eighths of their pages: nearly equal ones are taken as equal.
_LEVELS = 8
# Of so many recent prompts the first so many keys are remembered, and what followed them.
_RECENT, _HEAD = 1024, 8


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica told of itself `age_s` seconds ago.

    `pending_chunks` of prompts are taken in and not computed. `queued` completions have no place
    in the batch, `running` ones do. Of `total_pages`, `free_pages` hold nothing.
    """

    digest: KeyDigest
    free_pages: int
    total_pages: int
    queued: int
    running: int
    pending_chunks: float
    age_s: float


@dataclass(frozen=True)
class LoadCosts:
    """What a request costs at a replica, in the time of a chunk.

    `anew` is for each chunk of it that is not there, twice that if no page is free. The rest is for
    what came before: `queued` for a completion without a place, which waits until one ends,
    `running` for one that decodes, which slows each step. For ties a request counts as `answer`
    chunks, besides those that it computes. `docs/scale.md` has what they lead to.
    """

    anew: float = 3.0
    queued: float = 8.0
    running: float = 0.125
    answer: float = 32.0


@dataclass(frozen=True)
class Candidate:
    """A replica that holds the first `held` chunks of a request. The least `cost` is best."""

    replica: str
    held: int
    cost: float


@dataclass(eq=False)
class _Replica:
    """The last report of a replica, made at `made_s`, and what was sent there.

    `coming` counts the keys of chunks that are being computed, or were since the report: those of
    open requests, and of requests that `ended` since. `work` is what was sent in all, for ties.
    """

    work: float
    report: ReplicaReport | None = None
    made_s: float = 0.0
    open_requests: int = 0
    new_requests: int = 0
    new_chunks: int = 0
    coming: Counter[bytes] = field(default_factory=Counter)
    ended: list[Sequence[bytes]] = field(default_factory=list)

    def take_report(self, report: ReplicaReport, made_s: float) -> None:
        self.report, self.made_s = report, made_s
        self.new_requests = self.new_chunks = 0
        for keys in self.ended:
            _discount(self.coming, keys)
        self.ended.clear()

    def load(self, report: ReplicaReport, costs: LoadCosts) -> float:
        """What a request waits for, in chunks."""
        running = report.running + self.new_requests - len(self.ended)
        return (
            report.pending_chunks
            + self.new_chunks
            + costs.queued * report.queued
            + costs.running * max(0, running)
        )


@dataclass(frozen=True, eq=False)
class Placement:
    """A request, of the prompt's cut `keys`, that was sent to a replica and has not ended."""

    keys: Sequence[bytes]
    _replica: _Replica


class Router:
    """Chooses replicas by their reports, and counts what it has sent. For one thread.

    A report older than `stale_s` says nothing. `clock` gives seconds.
    """

    def __init__(
        self,
        costs: LoadCosts | None = None,
        *,
        stale_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs = LoadCosts() if costs is None else costs
        self._stale_s, self._clock = stale_s, clock
        self._replicas: dict[str, _Replica] = {}
        self._recent = deque[Sequence[tuple[bytes, bytes]]]()
        self._pairs, self._followers = Counter[tuple[bytes, bytes]](), Counter[bytes]()

    def set_replicas(self, names: Iterable[str]) -> None:
        """The replicas there are now. What is known of others is forgotten."""
        known = self._replicas
        works = [replica.work for replica in known.values()]
        work = sum(works) / len(works) if works else 0.0
        self._replicas = {name: known.get(name) or _Replica(work) for name in names}

    def take_report(self, name: str, report: ReplicaReport) -> None:
        """The newest report of replica `name`. That of an unknown replica is dropped."""
        if (replica := self._replicas.get(name)) is not None:
            replica.take_report(report, self._clock() - report.age_s)

    def rank(self, chain: Sequence[bytes]) -> Sequence[Candidate]:
        """All replicas, the best for a prompt of the chunk keys `chain` first.

        A replica without a report is taken to be empty, and to have the mean load of the others. If
        none has one, a hash decides (`_rank_by_hash`). Equal costs go to the replica that was sent
        the least.
        """
        keys = _cut(chain)
        reports = {name: self._fresh(replica) for name, replica in self._replicas.items()}
        loads = {
            name: self._replicas[name].load(report, self._costs)
            for name, report in reports.items()
            if report is not None
        }
        if not loads:
            return self._rank_by_hash(keys)
        mean, common = sum(loads.values()) / len(loads), self._count_common(keys)
        ranked = list[tuple[float, float, str, Candidate]]()
        for name, replica in self._replicas.items():
            report = reports[name]
            if report is None:
                load, used = mean + self._costs.queued * replica.open_requests, 0.0
            else:
                load = loads[name]
                used = round(_LEVELS * (1 - report.free_pages / report.total_pages)) / _LEVELS
            digest = _NOTHING if report is None else report.digest
            held = digest.longest_prefix(keys, replica.coming)
            missing = len(keys) + 1 - max(held, common)
            cost = load + self._costs.anew * missing * (1 + used)
            ranked.append((cost, replica.work, name, Candidate(name, held, cost)))
        ranked.sort(key=lambda entry: entry[:3])
        return [entry[-1] for entry in ranked]

    def _rank_by_hash(self, keys: Sequence[bytes]) -> Sequence[Candidate]:
        """Replicas by rendezvous hashing of the conversation's first chunk, those in bounds first.

        In bounds is a replica with at most 1.25 times the mean of the requests that this router has
        open, and one more ("Consistent hashing with bounded loads", Mirrokni et al., 2018). A
        prompt that has no chunk of its own goes where the fewest requests are open.
        """
        replicas, common = self._replicas, self._count_common(keys)
        key = keys[common] if common < len(keys) else None
        total = sum(replica.open_requests for replica in replicas.values())
        bound = 1 + 1.25 * total / max(1, len(replicas))

        def place(name: str) -> tuple[float, float]:
            replica = replicas[name]
            if key is None:
                return replica.open_requests, replica.work
            return replica.open_requests > bound, -weigh_replica(name, key)

        order = sorted(replicas, key=place)
        return [Candidate(name, 0, 0.0) for name in order]

    def _count_common(self, keys: Sequence[bytes]) -> int:
        """How many keys at the beginning are those of a system's prompt, or the like.

        More different chunks followed them lately than an eighth of the replicas. Every replica
        will hold them soon, so they draw no conversation to one that does.
        """
        most = max(2, len(self._replicas) // 8)
        heads = enumerate(keys[:_HEAD], 1)
        return max((count for count, key in heads if self._followers[key] > most), default=0)

    def _remember(self, keys: Sequence[bytes]) -> None:
        pairs = list(pairwise(keys[: _HEAD + 1]))
        for pair in pairs:
            self._followers[pair[0]] += pair not in self._pairs
            self._pairs[pair] += 1
        self._recent.append(pairs)
        if len(self._recent) > _RECENT:
            oldest = self._recent.popleft()
            _discount(self._pairs, oldest)
            _discount(self._followers, [pair[0] for pair in oldest if pair not in self._pairs])

    def begin(self, candidate: Candidate, chain: Sequence[bytes]) -> Placement:
        """The request of `chain` is sent to `candidate`, which is still there."""
        replica, keys = self._replicas[candidate.replica], _cut(chain)
        computed = len(keys) + 1 - candidate.held
        replica.open_requests += 1
        replica.new_requests += 1
        replica.new_chunks += computed
        replica.work += computed + self._costs.answer
        replica.coming.update(keys)
        self._remember(keys)
        return Placement(keys, replica)

    def end(self, placement: Placement) -> None:
        """The request of `placement` has ended, in whatever way. Call it once.

        Its chunks count as held until the next report, which lists them.
        """
        replica = placement._replica
        replica.open_requests -= 1
        if self._fresh(replica) is None:
            _discount(replica.coming, placement.keys)
        else:
            replica.ended.append(placement.keys)

    def _fresh(self, replica: _Replica) -> ReplicaReport | None:
        return replica.report if self._clock() - replica.made_s <= self._stale_s else None


def weigh_replica(replica: str, key: bytes) -> int:
    """The weight of `replica` for `key`: rendezvous hashing takes the replica of the highest."""
    return int.from_bytes(hashlib.sha256(replica.encode() + b"\0" + key).digest()[:8], "big")


def _discount(counts: Counter[_Key], keys: Sequence[_Key]) -> None:
    counts.subtract(keys)
    for key in keys:
        if not counts[key]:
            del counts[key]


def _cut(chain: Sequence[bytes]) -> Sequence[bytes]:
    return [key[:PREFIX_BYTES] for key in chain]
