"""Drafts without a model: what followed when the last tokens came before.

`ngram` looks in the sequence itself (prompt lookup, as vLLM's method of that name). `suffix` also
looks in recent answers, and goes on as far as earlier continuations agree (SuffixDecoding, Oliaro
et al., arXiv 2411.04975, sections 3 and 4: pattern, expected score, maximal length).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tangram.speculate.token_history import TokenHistory
from tangram.types import Int64

_MOST_PLACES = 16  # of one pattern: the newest say enough, and each costs microseconds
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
        fitting = [place for place in places if place.matched >= self.shortest]
        if not fitting:
            return _NOTHING
        # The first of equal matches is the newest.
        best = max(fitting, key=lambda place: place.matched)
        return np.array(self._history.after(best, most), np.int64)


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
    def histories(self) -> Iterable[TokenHistory]:
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
        context = self._history.newest(self.depth)
        found = [
            (place, history.after(place, most))
            for history in (self._history, *self.recent.histories)
            for place in history.places(context, _MOST_PLACES)
        ]
        best, best_score = list[int](), 0.0
        for length in sorted({place.matched for place, _ in found}, reverse=True):
            longest = min(most, int(self.factor * length))
            if longest <= best_score:
                break  # no draft expects more tokens than it has
            continuations = [tokens for place, tokens in found if place.matched >= length]
            path, score = self._follow(continuations, longest)
            if score > best_score:
                best, best_score = path, score
        return np.array(best, np.int64)

    def _follow(self, continuations: list[list[int]], longest: int) -> tuple[list[int], float]:
        """The path that most `continuations` take, and how many of its tokens to expect."""
        path: list[int] = []
        total, score = len(continuations), 0.0
        while len(path) < longest:
            at = len(path)
            nexts = [tokens[at] for tokens in continuations if len(tokens) > at]
            if not nexts:
                break
            token = nexts[0]
            if nexts.count(token) < len(nexts):
                token = max(nexts, key=nexts.count)  # of equal counts the newest
            agreeing = nexts.count(token)
            share = agreeing / total
            if share < self.least_share:
                break
            path.append(token)
            score += share
            if agreeing < len(continuations):
                continuations = [one for one in continuations if len(one) > at and one[at] == token]
        return path, score
