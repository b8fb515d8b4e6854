"""A simulated replica: a queue, a batch and a prefix cache, and the time that its steps take."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tangram_lab.fleet.arrivals import Arrival
from tangram_lab.fleet.costs import EngineCosts
from tangram_lab.load.asks import TRACE_BLOCK


@dataclass(eq=False)
class Visit:
    """A request at a replica. It came at `at_s`, and may have failed elsewhere before.

    When it is admitted, the first `hits` chunks of its chain are cached. `first_s` is the time of
    its first token.
    """

    arrival: Arrival
    at_s: float
    hits: int = 0
    first_s: float | None = None


@dataclass(eq=False)
class _Prefill:
    visit: Visit
    computed: int


@dataclass(eq=False)
class SimulatedReplica:
    """Serves visits in the order in which they come, by `costs`.

    Prompts are computed one after the other, in steps that also decode for everybody. Chunks are
    cached when the step that computes them ends, and evicted least recently used first. Pages of
    running sequences are not counted: only the batch bounds how many run. `ended` has visits that
    have ended until somebody takes them out.
    """

    costs: EngineCosts
    now_s: float = 0.0
    busy_s: float = 0.0
    computed_tokens: int = 0
    requests: int = 0
    ended: list[Visit] = field(default_factory=list)
    cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    waiting: deque[Visit] = field(default_factory=deque)
    prefills: deque[_Prefill] = field(default_factory=deque)
    changes: int = 0  # of `cached`
    _decoding: list[tuple[int, int, Visit]] = field(default_factory=list)
    _steps: int = 0
    _serial: int = 0

    @property
    def running(self) -> int:
        """Visits that have a place in the batch."""
        return len(self.prefills) + len(self._decoding)

    @property
    def open_visits(self) -> list[Visit]:
        """All that have not ended."""
        return [
            *self.waiting,
            *(prefill.visit for prefill in self.prefills),
            *(visit for *_, visit in self._decoding),
        ]

    @property
    def pending_chunks(self) -> float:
        """Chunks of prompts that are not computed, as a replica would report them."""
        tokens = sum(entry.visit.arrival.prompt_tokens - entry.computed for entry in self.prefills)
        for visit in self.waiting:
            tokens += visit.arrival.prompt_tokens - TRACE_BLOCK * self.count_cached(visit.arrival)
        return tokens / TRACE_BLOCK

    def count_cached(self, arrival: Arrival) -> int:
        """How many chunks at the beginning of a request are cached."""
        for count, key in enumerate(arrival.chain):
            if key not in self.cached:
                return count
        return len(arrival.chain)

    def take(self, visit: Visit) -> None:
        """`visit` comes now."""
        self.requests += 1
        self.waiting.append(visit)

    def advance(self, to_s: float) -> None:
        """Run steps until `to_s`. The last one may end later."""
        while self.now_s < to_s:
            self._admit()
            if self.prefills:
                self._step()
            elif self._decoding:
                self._decode_until(to_s)
            else:
                self.now_s = to_s

    def _admit(self) -> None:
        """A prompt is looked up when its computing begins: what is before it may be its prefix."""
        while self.waiting and not self.prefills and self.running < self.costs.max_num_seqs:
            visit = self.waiting.popleft()
            visit.hits = self.count_cached(visit.arrival)
            self._cache(visit.arrival.chain[: visit.hits])
            self.prefills.append(_Prefill(visit, visit.hits * TRACE_BLOCK))

    def _step(self) -> None:
        budget, begun = self.costs.step_tokens, list[Visit]()
        while budget and self.prefills:
            prefill = self.prefills[0]
            tokens = min(budget, prefill.visit.arrival.prompt_tokens - prefill.computed)
            prefill.computed += tokens
            budget -= tokens
            self._cache(prefill.visit.arrival.chain[: prefill.computed // TRACE_BLOCK])
            if prefill.computed == prefill.visit.arrival.prompt_tokens:
                begun.append(self.prefills.popleft().visit)
                self._admit()
        computed = self.costs.step_tokens - budget
        self.computed_tokens += computed
        self._pass(1, self.costs.prefill_s(computed) + self.costs.decode_s(len(self._decoding)))
        for visit in begun:
            visit.first_s = self.now_s
            self._serial += 1
            last = self._steps + visit.arrival.output_tokens - 1
            heapq.heappush(self._decoding, (last, self._serial, visit))
        self._end_finished()

    def _decode_until(self, to_s: float) -> None:
        """Steps of the same batch, until one of it ends or the time is over."""
        step_s = self.costs.decode_s(len(self._decoding))
        left = max(1, self._decoding[0][0] - self._steps)
        steps = min(left, max(1, -int(-(to_s - self.now_s) // step_s)))
        self._pass(steps, steps * step_s)
        self._end_finished()

    def _pass(self, steps: int, seconds: float) -> None:
        self._steps += steps
        self.now_s += seconds
        self.busy_s += seconds

    def _end_finished(self) -> None:
        while self._decoding and self._decoding[0][0] <= self._steps:
            self.ended.append(heapq.heappop(self._decoding)[2])

    def _cache(self, keys: Iterable[bytes]) -> None:
        """Parents are newer than their children, so that children are evicted first."""
        self.changes += 1
        for key in reversed(tuple(keys)):
            self.cached[key] = None
            self.cached.move_to_end(key)
        while len(self.cached) > self.costs.cached_chunks:
            self.cached.popitem(last=False)
