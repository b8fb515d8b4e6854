"""How many tokens to draft: what pays, by measured times and by the acceptance seen.

An iteration that drafts γ tokens with acceptance a yields 1 + a + … + a^γ tokens on average
(Leviathan et al., arXiv 2211.17192, section 3). It takes the time of its drafts and of one
verification, for every sequence of the batch. So one whose drafts are refused loses time by those
of the others, and `patience` says how much it may lose.

Times are lower quartiles of recent iterations at a like load: what disturbs an iteration makes it
longer, and may disturb a dozen in a row. An iteration after one of the other kind, with drafts or
without, waits for what that one left on the device: its time is not told to a `Pace`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from statistics import fmean

import numpy as np
import numpy.typing as npt

_KEPT_TIMES = 64  # a disturbance of fewer than 48 iterations in a row changes no choice
_NEWEST = 8  # of the kept times of a number of drafts
_KEPT_LOOKS = 8
_KEPT_DRAFTS = 256  # tokens over which the acceptance of a sequence is remembered
_PRIOR_DRAFTS, _PRIOR_ACCEPTED = 4.0, 3.0
_LEAST_S = 1e-6
_FIRST = 2  # place in the counts of the number that a load is tried with: few drafts cost little
TRIES = 3  # of each number that a load begins with
_MOST_ASKED = 4 * TRIES  # of such a number, where no time of it comes
REST_STEPS = 8  # a choice of no drafts holds for so many more: choosing costs some 50 µs
_TRIAL_STEPS = 2  # with drafts: the first one follows a plain step, so its time does not count
PROBE_EVERY = 32
NEAR = 2  # steps between loads whose times are alike, but for a factor
PROBE_SHARE = 0.005  # of the time; on a GPU trials have lost twice as much as they were to
_WAITING = 2  # a trial of drafts among plain steps loses as much again: steps around it wait
_LEAST_GAIN = 1.05  # of drafts over none: less is within the errors of what is measured
_ENOUGH = 0.999  # of the tokens that a sequence can expect: for the rest it gets no more drafts


Floats = npt.NDArray[np.float64]


@dataclass
class Acceptance:
    """The share of drafted tokens that were accepted where all before them were, recent ones
    counting more.
    """

    _tried: float = _PRIOR_DRAFTS
    _accepted: float = _PRIOR_ACCEPTED
    _found: float = 1.0
    _all: Acceptance | None = None

    def begin_sequence(self) -> Acceptance:
        """The acceptance of a new sequence: it begins at the average, which then counts it."""
        return Acceptance(_PRIOR_DRAFTS, _PRIOR_DRAFTS * self.share, self._found, self)

    @property
    def share(self) -> float:
        """Between 0 and 1: it rounds to 1 after hundreds of drafts that were all accepted."""
        return self._accepted / self._tried

    @property
    def found(self) -> float:
        """The share of the times when a drafter that was asked had something to draft."""
        return self._found

    def count(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were; the one after those was refused."""
        tried = min(drafted, accepted + 1)
        fade = 1.0 - tried / (_KEPT_DRAFTS + tried)
        self._tried = self._tried * fade + tried
        self._accepted = self._accepted * fade + accepted
        if self._all is not None:
            self._all.count(drafted, accepted)

    def count_found(self, found: bool) -> None:
        """A drafter was asked; it had something to draft or not."""
        self._found += ((1.0 if found else 0.0) - self._found) / _KEPT_LOOKS
        if self._all is not None:
            self._all.count_found(found)


def expected_tokens(share: float | Floats, most: int) -> Floats:
    """float64 [.., most + 1]: what an iteration yields on average that drafts 0 up to `most`.

    Its own token is included. `share` [..] is that of the drafts that are accepted.
    """
    return (np.asarray(share)[..., None] ** np.arange(most + 1)).cumsum(axis=-1)


def expected_of(acceptances: Sequence[Acceptance], most: int) -> Floats:
    """float64 [n, most + 1]: `expected_tokens` of sequences whose drafters may find nothing."""
    found = np.array([each.found for each in acceptances])
    beyond = expected_tokens(np.array([each.share for each in acceptances]), most) - 1.0
    return 1.0 + found[:, None] * beyond


@dataclass
class _Load:
    """What is known of iterations of one load: seconds by number of drafts, how many there were,
    what they took, and what trials have lost. `usual` are the usual times, by number, of those that
    were tried often enough, found when they are asked for. `unfound` are seconds of iterations that
    found nothing to draft.

    `asked` counts the choices of a number that the load begins with. `trial` is to be tried again.
    """

    seconds: dict[int, deque[float]] = field(default_factory=dict)
    _usual: dict[int, float] = field(default_factory=dict)
    _stale: set[int] = field(default_factory=set)
    newest: dict[int, int] = field(default_factory=dict)  # the last iteration of a number
    unfound: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    asked: Counter[int] = field(default_factory=Counter)
    trial: int | None = None
    iterations: int = 0
    probed_at: int = 0
    total_s: float = 0.0
    lost_s: float = 0.0

    def add(self, drafted: int, seconds: float) -> None:
        times = self.seconds.setdefault(drafted, deque(maxlen=_KEPT_TIMES))
        times.append(seconds)
        if len(times) >= TRIES:  # a first pass may take twice as long
            self._stale.add(drafted)
        self._count(seconds)
        self.newest[drafted] = self.iterations

    @property
    def usual(self) -> Mapping[int, float]:
        """The usual seconds of the numbers that were tried often enough."""
        for drafted in self._stale:
            times = self.seconds[drafted]
            usual = _find_usual(times)
            # Drafts that were fast once must be so now, too: a machine may have become slower.
            self._usual[drafted] = (
                max(usual, _find_usual([*times][-_NEWEST:])) if drafted else usual
            )
        self._stale.clear()
        return self._usual

    def add_unfound(self, seconds: float) -> None:
        self.unfound.append(seconds)
        self._count(seconds)

    def _count(self, seconds: float) -> None:
        self.iterations += 1
        self.total_s += seconds

    def is_tried(self, count: int) -> bool:
        """Whether enough is known of a number that the load begins with, or may not come."""
        tries = len(self.seconds.get(count, ())) + (len(self.unfound) if count else 0)
        return tries >= TRIES or self.asked[count] >= _MOST_ASKED

    def expect(self, seconds: float, nothing: float) -> float:
        """What takes `seconds` where something is found to draft, in the mean.

        `nothing` is the probability that nothing is.
        """
        if not self.unfound:
            return seconds
        return (1.0 - nothing) * seconds + nothing * _find_usual(self.unfound)

    def may_probe(self) -> bool:
        """Whether it is time for a trial; the next one is `PROBE_EVERY` iterations later."""
        if self.iterations - self.probed_at < PROBE_EVERY:
            return False
        self.probed_at = self.iterations
        return True

    def may_lose(self, seconds: float) -> bool:
        """Whether a trial may lose that much, which is then spent."""
        fits = self.lost_s + seconds <= PROBE_SHARE * self.total_s
        self.lost_s += seconds if fits else 0.0
        return fits

    def estimate(self, drafted: int, like: _Load) -> float:
        """The usual time of `drafted`: measured, or in proportion to the times of `like`.

        A single time may be that of a first pass of its kind: it is believed if it is short.
        """
        usual, factor = self.usual, 1.0
        if drafted in usual:
            return usual[drafted]
        if usual:
            factor = fmean(usual[count] / like.interpolate(count) for count in usual)
        return min(factor * like.interpolate(drafted), *self.seconds.get(drafted, (inf,)))

    def interpolate(self, drafted: int) -> float:
        """The usual time of `drafted`; a straight line between and beyond what was measured."""
        known = sorted(self.usual.items())
        if drafted in self.usual or len(known) == 1:
            return self.usual.get(drafted, known[0][1])
        below = [pair for pair in known if pair[0] < drafted]
        above = [pair for pair in known if pair[0] > drafted]
        first, second = (
            (below[-1], above[0]) if below and above else (known[:2] if above else known[-2:])
        )
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return max(first[1] + slope * (drafted - first[0]), _LEAST_S)


def _find_usual(times: Iterable[float]) -> float:
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


def _count_steps(load: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(abs(first - second) for first, second in zip(load, other, strict=True))


def counts_up_to(most: int) -> tuple[int, ...]:
    """The numbers of drafts to choose from: 0, 1, 3, 7, … below `most`, and `most`.

    With the newest token these are powers of two, which fill the tiles of a GPU's kernels.
    """
    return *((1 << bits) - 1 for bits in range(most.bit_length() + 1) if 1 << bits <= most), most


class Pace:
    """Chooses how many tokens to draft, 0 to `most`, for each load of the engine.

    A load is what iterations of equal cost have in common, as integers; near loads have near
    numbers. A load that is not near a known one is tried with some drafts and without first. Later
    one iteration of `PROBE_EVERY` may begin a trial of a neighbour of the best or of no drafts, as
    long as trials have lost no more than `PROBE_SHARE` of the time. A choice of no drafts is meant
    to hold for `REST_STEPS` more iterations.
    """

    def __init__(self, most: int) -> None:
        self._counts = counts_up_to(most)
        self._first = self._counts[min(_FIRST, len(self._counts) - 1)]
        # The nearest of the counts, by what was drafted.
        self._nearest = [
            min(self._counts, key=lambda count: abs(count - drafted)) for drafted in range(most + 1)
        ]
        self._loads: defaultdict[tuple[int, ...], _Load] = defaultdict(_Load)

    @property
    def counts(self) -> Sequence[int]:
        """The numbers of drafts that it chooses from, ascending."""
        return self._counts

    def choose(
        self,
        load: tuple[int, ...],
        acceptances: Sequence[Acceptance],
        others: int = 0,
        patience: float | Sequence[float] = inf,
    ) -> list[int]:
        """How many tokens to draft in the next iteration, for each sequence by its acceptance.

        The sequence with most drafts decides how long an iteration takes, for all of them and for
        `others` that cannot have drafts. So the largest number is the one with the least time per
        token, in the mean of the sequences; in a trial it is another one. Sequences that do not
        gain by so many get fewer. None is expected to lose more than its `patience`, in iterations
        without drafts: that of all, or of each, `others` last.
        """
        if not acceptances:
            return []
        known = self._loads[load]
        begin = self._begin(load, known)
        if begin is not None:
            return [begin] * len(acceptances)
        like = self._find_like(load)
        if like is None:
            return [0] * len(acceptances)
        nothing = prod(1.0 - each.found for each in acceptances)
        seconds = {count: known.estimate(count, like) for count in self._counts}
        for count in self._counts[1:]:
            seconds[count] = known.expect(seconds[count], nothing)
        tokens = np.ones((len(acceptances) + others, len(self._counts)))
        tokens[: len(acceptances)] = expected_of(acceptances, self._counts[-1])[:, self._counts]
        times = np.array([seconds[count] for count in self._counts])
        loss = (times / times[0] - tokens - np.broadcast_to(patience, len(tokens))[:, None]).max(0)
        # The harmonic mean of what sequences yield, as time per token is.
        rates = len(tokens) / (1.0 / tokens).sum(0) / times
        gain = np.where(loss <= 0.0, rates, 0.0)
        gain[0] = _LEAST_GAIN * rates[0]
        best = int(gain.argmax())
        trial = self._trial(known, times, rates, loss, best) if known.may_probe() else None
        if trial is not None:
            return [trial] * len(acceptances)
        return self._find_enough(tokens[: len(acceptances)], best)

    def _begin(self, load: tuple[int, ...], known: _Load) -> int | None:
        """What to draft because little is known of `load`, or because a trial goes on."""
        if known.trial is not None:
            trial, known.trial = known.trial, None
            return trial
        if self._is_known(known) or self._find_near(load) is not None:
            return None
        untried = [count for count in (self._first, 0) if not known.is_tried(count)]
        if not untried:
            return None
        known.asked[untried[0]] += 1
        return untried[0]

    def _is_known(self, known: _Load) -> bool:
        begin = all(known.is_tried(count) for count in (0, self._first))
        return begin and bool(known.usual)

    def _find_enough(self, tokens: Floats, best: int) -> list[int]:
        """The number of each sequence, of whose `tokens` [n, counts] those at `best` are most."""
        enough = (tokens >= _ENOUGH * tokens[:, best : best + 1]).argmax(axis=1)
        return [self._counts[place] for place in enough]

    def _find_like(self, load: tuple[int, ...]) -> _Load | None:
        """What is known of `load`, or else of the nearest one."""
        known = self._loads[load]
        return known if self._is_known(known) else self._find_near(load)

    def _find_near(self, load: tuple[int, ...]) -> _Load | None:
        """What is known of the nearest load that was tried."""
        near = [
            (distance, known)
            for other, known in self._loads.items()
            if (distance := _count_steps(load, other)) <= NEAR and self._is_known(known)
        ]
        return min(near, key=lambda pair: pair[0])[1] if near else None

    def _trial(
        self, known: _Load, times: Floats, rates: Floats, loss: Floats, best: int
    ) -> int | None:
        """A number beside that at the place `best`, if its loss can be afforded."""
        place = self._find_beside(best, known)
        other = self._counts[place]
        steps = (_TRIAL_STEPS if best else _WAITING * _TRIAL_STEPS) if other else 1 + REST_STEPS
        if other and loss[place] > 0.0:
            return None
        if not known.may_lose(steps * times[place] * max(0.0, 1.0 - rates[place] / rates[best])):
            return None
        known.trial = other if other else None
        return other

    def _find_beside(self, best: int, known: _Load) -> int:
        """The place beside the best, or that of no drafts: what was measured longest ago."""
        near: set[int] = {*range(max(0, best - 1), min(best + 2, len(self._counts))), 0} - {best}
        return min(sorted(near), key=lambda place: known.newest.get(self._counts[place], 0))

    def count_lost(self, load: tuple[int, ...], seconds: float) -> float:
        """How many iterations without drafts would take `seconds`, but for one.

        It is what a sequence loses that gets one token by it: 0 where their time is unknown.
        """
        known, like = self._loads[load], self._find_like(load)
        return 0.0 if like is None else seconds / known.estimate(0, like) - 1.0

    def record(self, load: tuple[int, ...], drafted: int, seconds: float) -> None:
        """An iteration of `load` that drafted up to so many tokens a sequence took `seconds`."""
        self._loads[load].add(self._nearest[drafted], seconds)

    def record_unfound(self, load: tuple[int, ...], seconds: float) -> None:
        """An iteration of `load` was to have drafts, found none and took `seconds`."""
        self._loads[load].add_unfound(seconds)
