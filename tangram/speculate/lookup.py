"""Drafts without a model: what followed when the last tokens came before.

`ngram` looks in the sequence itself (prompt lookup, as vLLM's method of that name). `suffix` also
looks in recent answers, and goes on as far as earlier continuations agree (SuffixDecoding, Oliaro
et al., arXiv 2411.04975, sections 3 and 4: pattern, expected score, maximal length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tangram.speculate.lookup_loops import follow_most
from tangram.speculate.token_history import TokenHistory
from tangram.types import Int64

_MOST_PLACES = 16  # of one pattern in one history: the newest say enough
_NOTHING = np.zeros(0, np.int64)


@dataclass
class NgramDrafter:
    """Drafts for one sequence what followed the longest match of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    _history: TokenHistory = field(default_factory=TokenHistory)

    def extend(self, tokens: Int64) -> None:
        """The sequence goes on with `tokens` [n]."""
        self._history.extend(tokens)

    def draft(self, most: int) -> Int64:
        """int64 [up to `most`]: what may come next."""
        places = self._history.places(self._history.newest(self.longest), _MOST_PLACES)
        matched = places[:, 2]
        if matched.max(initial=0) < self.shortest:
            return _NOTHING
        # The first of equal matches is the newest.
        return self._history.after(places[matched.argmax()], most)


class RecentAnswers:
    """Tokens of ended answers, up to `most_tokens` of them; the older half goes first."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._halves = (TokenHistory(), TokenHistory())

    def add(self, tokens: Int64) -> None:
        """An answer of `tokens` [n] has ended."""
        if not self._most:
            return
        newest, older = self._halves
        if len(newest) + len(tokens) > self._most // 2:
            newest, older = TokenHistory(), newest
            self._halves = newest, older
        newest.begin_text()
        newest.extend(tokens[-self._most // 2 :])

    @property
    def histories(self) -> Sequence[TokenHistory]:
        """Where to look, the newest first."""
        return self._halves


@dataclass
class SuffixDrafter:
    """Drafts for one sequence what most earlier occurrences of a pattern agree on.

    A pattern has up to `depth` tokens. A draft is at most `factor` times as long as its pattern,
    and ends where less than `least_share` of the occurrences have gone on like it.
    """

    recent: RecentAnswers
    depth: int
    factor: float
    least_share: float
    _history: TokenHistory = field(default_factory=TokenHistory)

    def extend(self, tokens: Int64) -> None:
        """The sequence goes on with `tokens` [n]."""
        self._history.extend(tokens)

    def draft(self, most: int) -> Int64:
        """int64 [up to `most`]: what may come next."""
        context, known = self._history.newest(self.depth), 0
        histories = self._history, *self.recent.histories
        continuations = np.empty((len(histories) * _MOST_PLACES, most + 2), np.int64)
        for history in histories:
            known = history.note_continuations(context, _MOST_PLACES, known, continuations)
        path, best = np.empty((2, most), np.int64)
        count = follow_most(continuations[:known], self.factor, self.least_share, path, best)
        return best[:count]


def rehearse_lookups() -> None:
    """Compile the loops, or load them from Numba's cache, before the first draft."""
    drafter = SuffixDrafter(RecentAnswers(0), depth=2, factor=1.0, least_share=0.0)
    drafter.extend(np.zeros(4, np.int64))
    drafter.draft(1)
