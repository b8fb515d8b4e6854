"""What an engine drafts, and what of it the model accepts.

A step decodes the newest token of a sequence and its drafts together. Behind each of them the
model's token is chosen exactly as without drafts: by the same logits, penalties and random
numbers, which are keyed by (seed, sample index, position) (`draw.py`). The longest beginning of the
draft that equals these tokens is accepted, and the model's token behind it comes for free. So an
answer is the same with and without speculation, up to the rounding of logits. Leviathan et al.
(arXiv 2211.17192) accept somewhat more of a draft that was drawn, and then draw other tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from tangram.cache.manager import CacheManager
from tangram.cache.step import Row
from tangram.engine.sampling.sampler import SampleRow
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.metrics import SpeculationStats
from tangram.speculate.lookup import NgramDrafter, RecentAnswers, SuffixDrafter, rehearse_lookups
from tangram.speculate.pace import REST_STEPS, Acceptance, Pace
from tangram.speculative_config import Ngram, SpeculativeConfig, Suffix
from tangram.types import ChosenToken, DraftedTokens, Int64

# Of the time of a sequence: what it loses at most by drafts of others. Trials of `Pace` come to it.
LOST_SHARE = 0.02
# A first iteration with drafts waits for the step before, so there must be patience for some.
BURST = 4
LOOK_EVERY = 16  # tokens of a sequence that is not drafted for: how often a lookup is tried out
# By which `suffix_decoding_max_cached_requests` becomes a bound in tokens.
_TOKENS_OF_AN_ANSWER = 512
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Drafting:
    """A sequence that is drafted for: `row` decodes its newest token and `row.drafts` drafts.

    `sampler` chooses the token behind the newest.
    """

    sequence: TokenSequence
    row: Row
    sampler: SampleRow


class Drafter(Protocol):
    """A model that drafts on the device."""

    @property
    def cache(self) -> CacheManager | None:
        """The cache of its own KV entries, if it has any."""
        ...

    def serves(self, sequence: TokenSequence) -> bool:
        """Whether `sequence` is kept in a way that it can draft for."""
        ...

    def prepare(self, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """Before a step: compute what is missing to draft for `sequences`, as far as a step may.

        Returns those that it cannot draft for now.
        """
        ...

    def offer(self, sequence: TokenSequence, most: int) -> int:
        """How many tokens, up to `most`, it can draft for `sequence` now."""
        ...

    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        """int64 [Σ row.drafts]: the drafts of one sequence after the other, on the device."""
        ...

    def settle(self, sequence: TokenSequence) -> None:
        """The tokens of `sequence` are its computable ones now; other drafts were refused."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """`sequence` has ended."""
        ...


@dataclass(eq=False)
class Lookup:
    """Drafts for one sequence what is found in earlier tokens.

    Where nothing is drafted, a lookup is made now and then and compared with what comes, so that
    its acceptance stays known.
    """

    source: NgramDrafter | SuffixDrafter
    seen: int = 0
    guess: Int64 = field(default_factory=lambda: _NOTHING)
    guessed_at: int = 0

    def extend(self, sequence: TokenSequence) -> None:
        """Take in the settled tokens of `sequence`."""
        tokens = sequence.settled_tokens
        self.source.extend(tokens[self.seen :])
        self.seen = len(tokens)

    def try_out(self, sequence: TokenSequence, acceptance: Acceptance, most: int) -> None:
        """Compare the last guess, once all of its tokens are known, and make another."""
        tokens = sequence.settled_tokens
        if len(tokens) - self.guessed_at < max(LOOK_EVERY, len(self.guess)):
            return
        if self.guessed_at:
            came = tokens[self.guessed_at : self.guessed_at + len(self.guess)]
            acceptance.count(len(self.guess), count_accepted(self.guess.tolist(), came.tolist()))
            acceptance.count_found(bool(len(self.guess)))
        self.extend(sequence)
        self.guess, self.guessed_at = self.source.draft(most), len(tokens)


@dataclass(eq=False)
class _Course:
    """What is known of one sequence: what was accepted, how many tokens to draft now."""

    lookup: Lookup | None
    acceptance: Acceptance
    chosen: int = 0
    accepted: int = 0
    refused: int = 0
    saved: float = 0.0  # iterations without drafts, by those with some

    def patience(self, tokens: int) -> float:
        """Iterations without drafts that its sequence may lose now, with an answer of `tokens`."""
        return max(0.0, self.saved + LOST_SHARE * tokens)


def verifiers(sampler: SampleRow, drafts: Tensor) -> list[SampleRow]:
    """n + 1 samplers: number i draws the token after the first i of `drafts` [n], if accepted."""
    if sampler.stays:
        return [sampler] * (len(drafts) + 1)
    return [sampler.ahead(count, drafts) for count in range(len(drafts) + 1)]


def accept(drafts: Sequence[int], tokens: Sequence[ChosenToken | None]) -> list[ChosenToken | None]:
    """The tokens that a sequence goes on with: those of accepted drafts and the next.

    `tokens` [n + 1] are what the `verifiers` of `drafts` [n] have chosen.
    """
    chosen = [None if token is None else token.token_id for token in tokens]
    return list(tokens[: count_accepted(drafts, chosen) + 1])


def count_accepted(drafts: Sequence[int], tokens: Sequence[int | None]) -> int:
    """How many of `drafts` equal the model's `tokens` before the first that does not."""
    pairs = zip(drafts, tokens, strict=False)
    return next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


class Speculation:
    """Decides for the sequences of one engine when to draft and how much, and keeps count.

    Either `drafter` drafts on the device, or lookups that `look` makes do on the host.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        *,
        drafter: Drafter | None = None,
        look: Callable[[], NgramDrafter | SuffixDrafter] | None = None,
        recent: RecentAnswers | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most, self.drafter = config.num_speculative_tokens, drafter
        self.counters = SpeculationCounters(self.most)
        self._look, self._recent, self._now = look, recent, now
        self._pace, self._acceptance = Pace(self.most), Acceptance()
        self._courses: WeakKeyDictionary[TokenSequence, _Course] = WeakKeyDictionary()
        self._load: tuple[int, int] = 0, 0
        self._drafted, self._begin_s = 0, 0.0
        self._wanted = False
        # Whether drafts were wanted in the two last steps; None where one did not only decode.
        self._before: bool | None = None
        self._last: bool | None = None
        self._rest, self._running = 0, 0
        self._planned = list[_Course]()

    @property
    def on_device(self) -> bool:
        """Whether drafts are not known when a step is scheduled."""
        return self.drafter is not None

    @property
    def cache(self) -> CacheManager | None:
        """The cache of a model that drafts, if it has one of its own."""
        return None if self.drafter is None else self.drafter.cache

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins; drafts are wanted in it if `plan` says so."""
        self._drafted, self._begin_s, self._wanted = 0, self._now(), False
        self._before, self._last = self._last, None

    def rests(self, running: int) -> bool:
        """Whether nothing is drafted, as chosen in an earlier step, for `running` sequences.

        Where drafts do not pay and all of them decode, `plan` is to be asked again after
        `REST_STEPS`, or when their number changes.
        """
        if running != self._running:
            self._running, self._rest = running, 0
        rests = self._rest > 0
        self._rest -= rests
        return rests

    def plan(self, sequences: Sequence[TokenSequence], *, waiting: bool) -> bool:
        """Choose how many tokens to draft for each of the decoding `sequences`.

        Returns whether any is drafted for. None of the sequences loses more than `LOST_SHARE` of
        its time by drafts of others. If requests are `waiting` for their places, they may: all are
        answered sooner then.
        """
        self._load = (
            len(sequences).bit_length(),
            sum(sequence.known for sequence in sequences).bit_length(),
        )
        # Those that can have drafts come first.
        ordered = sorted(sequences, key=lambda sequence: not self._serves(sequence))
        self._planned = [self._course(sequence) for sequence in ordered]
        served = sum(map(self._serves, sequences))
        patience: float | list[float] = inf
        if not waiting:
            most = 1.0 if self._before else BURST
            patience = [
                course.patience(sequence.read_tokens) / most
                for sequence, course in zip(ordered, self._planned, strict=True)
            ]
        acceptances = [course.acceptance for course in self._planned[:served]]
        others = len(sequences) - served
        counts = self._pace.choose(self._load, acceptances, others, patience)
        for course, count in zip(self._planned, (*counts, *[0] * others), strict=True):
            course.chosen = count
        self._wanted = any(counts)
        # A sequence that decodes no token now may do so in the next step.
        self._rest = REST_STEPS if not self._wanted and len(sequences) == self._running else 0
        return self._wanted

    def _serves(self, sequence: TokenSequence) -> bool:
        serves = self.drafter is None or self.drafter.serves(sequence)
        return sequence.speculative and serves

    def skip(self, sequences: Sequence[TokenSequence]) -> None:
        """The next step drafts nothing for the decoding `sequences`."""
        for sequence in sequences:
            course = self._course(sequence)
            if course.lookup is not None and sequence.speculative:
                course.lookup.try_out(sequence, course.acceptance, self.most)

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        """All tokens of the decoding `sequences` are known: what drafts for them gets ready."""
        if self.drafter is None:
            return
        chosen = [entry for entry in sequences if entry.speculative and self._course(entry).chosen]
        for sequence in self.drafter.prepare(chosen):
            course = self._course(sequence)
            course.chosen = 0
            course.acceptance.count_found(False)

    def offer(self, sequence: TokenSequence, most: int) -> Int64:
        """int64 [up to `most`]: drafts for `sequence`, or zeros where the device will draft."""
        if not self._wanted:  # tokens of other sequences may be on the device
            return _NOTHING
        course = self._course(sequence)
        count = min(most, course.chosen)
        if count <= 0 or not sequence.speculative:
            return _NOTHING
        drafts = self._find(course, sequence, count)
        self._drafted = max(self._drafted, len(drafts))
        return drafts

    def _find(self, course: _Course, sequence: TokenSequence, count: int) -> Int64:
        if self.drafter is not None:
            offered = self.drafter.offer(sequence, count)
            if offered:
                course.acceptance.count_found(True)
            return np.zeros(offered, np.int64)
        if course.lookup is None:
            return _NOTHING
        course.lookup.extend(sequence)
        drafts = course.lookup.source.draft(count)
        course.acceptance.count_found(bool(len(drafts)))
        return drafts

    def settle(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """The model has accepted so many of the tokens drafted for `sequence`, now foreseen."""
        course = self._course(sequence)
        if drafted:
            course.acceptance.count(drafted, accepted)
            course.saved += accepted
            course.accepted += accepted
            course.refused += drafted - accepted
            self.counters.count(drafted, accepted)
            if self.drafter is not None:
                self.drafter.settle(sequence)

    def end_step(self) -> None:
        """The step has ended, and it did nothing but decode.

        Its time counts if the step before was of its kind: otherwise it has waited for it.
        """
        self._last, seconds = self._wanted, self._now() - self._begin_s
        if self._drafted:
            lost = self._pace.count_lost(self._load, seconds)
            for course in self._planned:
                course.saved -= lost
        if self._before is not self._wanted:
            return
        if self._wanted and not self._drafted:
            self._pace.record_unfound(self._load, seconds)
        else:
            self._pace.record(self._load, self._drafted, seconds)

    # -- a sequence --------------------------------------------------------------------------------

    def usage(self, sequence: TokenSequence) -> DraftedTokens:
        """The tokens drafted for `sequence`. Those behind its end are rejected, too."""
        course, unused = self._course(sequence), sequence.foreseen
        return DraftedTokens(course.accepted - unused, course.refused + unused)

    def remember(self, sequence: TokenSequence) -> None:
        """The answer of `sequence` has ended; later ones may be like it."""
        if self._recent is not None:
            self._recent.add(sequence.settled_tokens[sequence.prompt_tokens :])
        if self.drafter is not None:
            self.drafter.forget(sequence)

    def _course(self, sequence: TokenSequence) -> _Course:
        course = self._courses.get(sequence)
        if course is None:
            lookup = None if self._look is None else Lookup(self._look())
            course = self._courses[sequence] = _Course(lookup, self._acceptance.begin_sequence())
        return course


def speculate_by_lookup(config: Ngram | Suffix) -> Speculation:
    """Speculation that drafts by lookup, as `config` says."""
    rehearse_lookups()
    if isinstance(config, Ngram):
        ngram = partial(NgramDrafter, config.prompt_lookup_min, config.prompt_lookup_max)
        return Speculation(config, look=ngram)
    recent = RecentAnswers(config.suffix_decoding_max_cached_requests * _TOKENS_OF_AN_ANSWER)
    suffix = partial(
        SuffixDrafter,
        recent,
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
    return Speculation(config, look=suffix, recent=recent)


@dataclass
class SpeculationCounters:
    """Counts since the start: of drafts, drafted tokens and accepted tokens.

    `accepted_at[i]` counts the accepted tokens at place i of their drafts.
    """

    most: int
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.most

    def count(self, drafted: int, accepted: int) -> None:
        """One draft of `drafted` tokens, of which the first `accepted` were accepted."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1

    def read(self) -> SpeculationStats:
        """The counts now."""
        return SpeculationStats(
            self.drafts, self.drafted, self.accepted, accepted_at=tuple(self.accepted_at)
        )
