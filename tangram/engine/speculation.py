"""What an engine drafts, and what of it the model accepts.

A step decodes the newest token of a sequence and its drafts, each in a row of its own. At every row
the model's token is chosen exactly as without drafts: by the same logits, penalties and random
numbers, which are keyed by (seed, sample index, position) (`draw.py`). The longest beginning of the
draft that equals these tokens is accepted, and the model's token behind it comes for free. So an
answer is the same with and without speculation, up to the rounding of logits; Leviathan et al.
(arXiv 2211.17192) accept as often where a draft is certain, and draw other tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from tangram.engine.token_sequence import TokenSequence
from tangram.errors import ConfigError
from tangram.speculate.lookup import NgramDrafter, RecentAnswers, SuffixDrafter
from tangram.speculate.pace import Acceptance, Pace
from tangram.speculative_config import Ngram, SpeculativeConfig, Suffix
from tangram.types import Int64

_TOKENS_OF_AN_ANSWER = (
    512  # by which `suffix_decoding_max_cached_requests` becomes a bound in tokens
)

Drafter = NgramDrafter | SuffixDrafter


def count_accepted(drafts: Sequence[int], tokens: Sequence[int | None]) -> int:
    """How many of `drafts` equal the model's `tokens` before the first that does not."""
    differing = (at for at, draft in enumerate(drafts) if draft != tokens[at])
    return next(differing, len(drafts))


def make_drafters(config: SpeculativeConfig) -> tuple[Callable[[], Drafter], RecentAnswers]:
    """What makes a drafter for a sequence, and the answers that they share."""
    match config:
        case Ngram():
            recent = RecentAnswers(0)
            return lambda: NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max), recent
        case Suffix():
            recent = RecentAnswers(
                config.suffix_decoding_max_cached_requests * _TOKENS_OF_AN_ANSWER
            )
            return lambda: SuffixDrafter(
                recent,
                config.suffix_decoding_max_tree_depth,
                config.suffix_decoding_max_spec_factor,
                config.suffix_decoding_min_token_prob,
            ), recent
        case _:
            raise ConfigError(f"speculative_config.method {type(config).__name__} is not served")


@dataclass
class _Course:
    """What is known of one sequence: its drafter, the tokens it has seen, and what was accepted."""

    drafter: Drafter
    seen: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


class Speculation:
    """Drafts for the sequences of one engine, as many tokens as pay."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.most = config.num_speculative_tokens
        self._make, self._recent = make_drafters(config)
        self._pace = Pace(self.most)
        self._courses: WeakKeyDictionary[TokenSequence, _Course] = WeakKeyDictionary()
        self._load, self._drafted, self._rows, self._begin_s = 0, 0, 0, 0.0
        self._now = time.perf_counter

    def begin_step(self, rows: int) -> None:
        """A step with about `rows` decoding sequences is scheduled next."""
        self._load, self._drafted, self._rows = rows.bit_length(), 0, 0
        self._begin_s = self._now()

    def draft(self, sequence: TokenSequence, most: int) -> Int64:
        """int64 [up to `most`]: what may come behind the known tokens of `sequence`."""
        if not sequence.speculative:
            return np.zeros(0, np.int64)
        course = self._courses.get(sequence)
        if course is None:
            course = self._courses[sequence] = _Course(self._make())
        course.drafter.extend(sequence.known_tokens[course.seen :])
        course.seen = sequence.known
        count = min(most, self._pace.choose(self._load, course.acceptance.share))
        drafts = course.drafter.draft(count) if count else np.zeros(0, np.int64)
        self._drafted += len(drafts)
        self._rows += 1
        return drafts

    def settle(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """The model has accepted so many of the tokens drafted for `sequence`."""
        if drafted:
            self._courses[sequence].acceptance.count(drafted, accepted)

    def end_step(self) -> None:
        """The step is through, and nothing but decoding took its time."""
        if self._rows:
            mean = round(self._drafted / self._rows)
            nearest = min(self._pace.counts, key=lambda count: abs(count - mean))
            self._pace.record(self._load, nearest, self._now() - self._begin_s)

    def remember(self, sequence: TokenSequence) -> None:
        """The answer of `sequence` has ended; later ones may be like it."""
        self._recent.add(sequence.settled_tokens[sequence.prompt_tokens :])
        self._courses.pop(sequence, None)
