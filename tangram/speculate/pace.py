"""How many tokens to draft: what pays, by measured times and by the acceptance seen.

An iteration that drafts γ tokens with acceptance a yields 1 + a + … + a^γ tokens on average
(Leviathan et al., arXiv 2211.17192, section 3). It takes the time of its drafts and of one
verification. Times are medians of recent iterations at a like load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median_low

_KEPT_TIMES = 16
_KEPT_LOOKS = 8
_KEPT_DRAFTS = 256  # tokens over which the acceptance of a sequence is remembered
_PRIOR_DRAFTS, _PRIOR_ACCEPTED = 4.0, 3.0
_LEAST_S = 1e-6
TRIES = 3  # of each number that a load begins with
PROBE_EVERY = 32
NEAR = 2  # steps between loads whose times are alike, but for a factor
PROBE_SHARE = 0.01  # of the time
_ENOUGH = 0.999  # of the tokens that a sequence can expect: for the rest it gets no more drafts


@dataclass
class Acceptance:
    """The share of drafted tokens that were accepted where all before them were, recent ones
    counting more.
    """

    _tried: float = _PRIOR_DRAFTS
    _accepted: float = _PRIOR_ACCEPTED
    _found: float = 1.0

    @property
    def share(self) -> float:
        """Between 0 and 1, both excluded."""
        return self._accepted / self._tried

    def count(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were; the one after those was refused."""
        tried = min(drafted, accepted + 1)
        fade = 1.0 - tried / (_KEPT_DRAFTS + tried)
        self._tried = self._tried * fade + tried
        self._accepted = self._accepted * fade + accepted

    def count_found(self, found: bool) -> None:
        """A drafter was asked; it had something to draft or not."""
        self._found += ((1.0 if found else 0.0) - self._found) / _KEPT_LOOKS

    def expected_tokens(self, drafted: int) -> float:
        """What an iteration yields on average that asks for `drafted` drafts."""
        return 1.0 + self._found * (expected_tokens(self.share, drafted) - 1.0)


def expected_tokens(share: float, drafted: int) -> float:
    """What an iteration with `drafted` drafts yields on average, its own token included.

    `share`, below 1, is that of the drafts that are accepted.
    """
    return (1.0 - share ** (drafted + 1)) / (1.0 - share)


def _rate(drafted: int, acceptances: Sequence[Acceptance], others: int) -> float:
    """What sequences yield on average in an iteration: the harmonic mean, as time per token is.

    `others` are the sequences without drafts.
    """
    waits = sum(1.0 / own.expected_tokens(drafted) for own in acceptances)
    return (len(acceptances) + others) / (waits + others)


@dataclass
class _Load:
    """What is known of iterations of one load: seconds by number of drafts, how many there were,
    what they took, and what trials have lost. `usual` are the usual times, by number, of those that
    were tried often enough.
    """

    seconds: dict[int, deque[float]] = field(default_factory=dict)
    usual: dict[int, float] = field(default_factory=dict)
    iterations: int = 0
    probed_at: int = 0
    total_s: float = 0.0
    lost_s: float = 0.0

    def add(self, drafted: int, seconds: float) -> None:
        times = self.seconds.setdefault(drafted, deque(maxlen=_KEPT_TIMES))
        times.append(seconds)
        if len(times) >= TRIES:
            self.usual[drafted] = median_low(times)  # a first pass may take twice as long
        self.iterations += 1
        self.total_s += seconds

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
        if drafted in self.usual:
            return self.usual[drafted]
        factor = 1.0
        if self.usual:
            factor = fmean(self.usual[count] / like.interpolate(count) for count in self.usual)
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


def _count_steps(load: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(abs(one - two) for one, two in zip(load, other, strict=True))


def counts_up_to(most: int) -> tuple[int, ...]:
    """The numbers of drafts to choose from: 0, 1, 3, 7, … below `most`, and `most`.

    With the newest token these are powers of two, which fill the tiles of a GPU's kernels.
    """
    return *((1 << bits) - 1 for bits in range(most.bit_length() + 1) if 1 << bits <= most), most


class Pace:
    """Chooses how many tokens to draft, 0 to `most`, for each load of the engine.

    A load is what iterations of equal cost have in common, as integers; near loads have near
    numbers. A load that is not near a known one is tried without drafts and with some first. Later
    one iteration of `PROBE_EVERY` may try a neighbour of the best, as long as trials have lost no
    more than `PROBE_SHARE` of the time.
    """

    def __init__(self, most: int) -> None:
        self._counts = counts_up_to(most)
        self._first = self._counts[len(self._counts) // 2]
        self._loads: dict[tuple[int, ...], _Load] = {}

    @property
    def counts(self) -> Sequence[int]:
        """The numbers of drafts that it chooses from, ascending."""
        return self._counts

    def choose(
        self, load: tuple[int, ...], acceptances: Sequence[Acceptance], others: int = 0
    ) -> list[int]:
        """How many tokens to draft in the next iteration, for each sequence by its acceptance.

        The sequence with most drafts decides how long an iteration takes, for all of them and for
        `others` that cannot have drafts. So the largest number is the one with the least time per
        token, in the mean of the sequences; in a trial it is another one. Sequences that do not
        gain by so many get fewer.
        """
        if not acceptances:
            return []
        known = self._loads.setdefault(load, _Load())
        untried = self._find_untried(known)
        like = self._find_near(load) if untried else known
        if like is None:
            begun = bool(known.seconds)
            return [untried[-1] if begun else self._first] * len(acceptances)
        seconds = {count: known.estimate(count, like) for count in self._counts}
        rates = {count: _rate(count, acceptances, others) / seconds[count] for count in seconds}
        best = max(rates, key=lambda count: rates[count])
        trial = self._trial(known, seconds, rates, best) if known.may_probe() else None
        if trial is not None:
            return [trial] * len(acceptances)
        return [self._find_enough(own, best) for own in acceptances]

    def _find_enough(self, acceptance: Acceptance, most: int) -> int:
        enough = _ENOUGH * acceptance.expected_tokens(most)
        return next(count for count in self._counts if acceptance.expected_tokens(count) >= enough)

    def _find_untried(self, known: _Load) -> list[int]:
        """Of the numbers that a load begins with, those that were not tried often enough."""
        begin = (0, self._first)
        return [count for count in begin if len(known.seconds.get(count, ())) < TRIES]

    def _find_near(self, load: tuple[int, ...]) -> _Load | None:
        """What is known of the nearest load that was tried."""
        near = [
            (distance, known)
            for other, known in self._loads.items()
            if (distance := _count_steps(load, other)) <= NEAR and not self._find_untried(known)
        ]
        return min(near, key=lambda pair: pair[0])[1] if near else None

    def _trial(
        self, known: _Load, seconds: Mapping[int, float], rates: Mapping[int, float], best: int
    ) -> int | None:
        """A neighbour of `best`, if its loss can be afforded."""
        other = self._neighbour(best, known)
        lost_s = seconds[other] * (1.0 - rates[other] / rates[best])
        return other if known.may_lose(lost_s) else None

    def record(self, load: tuple[int, ...], drafted: int, seconds: float) -> None:
        """An iteration of `load` that drafted up to so many tokens a sequence took `seconds`."""
        drafted = min(self._counts, key=lambda count: abs(count - drafted))
        self._loads.setdefault(load, _Load()).add(drafted, seconds)

    def _neighbour(self, best: int, known: _Load) -> int:
        """The one next to the best that was measured less often."""
        at = self._counts.index(best)
        near = self._counts[max(0, at - 1) : at] + self._counts[at + 1 : at + 2]
        return min(near, key=lambda count: len(known.seconds.get(count, ())))
