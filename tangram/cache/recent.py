"""Recent conversations: why a prompt lost its prefix.

A prompt is compared with the conversations of its own domain alone: one client, one salt, one
profile. It has *diverged* from one if it differs at a token and goes on with the same text behind
that: a date has changed, tools come in another order, a thought is gone. A prompt that only begins
alike is another conversation, and has lost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from tangram.types import MOST_SHOWN, Int32, Int64, LossReason, LostPrefix

# All conversations together have at most so many tokens of 4 bytes; each counts for some more.
MOST_TOKENS, ENTRY_TOKENS = 1 << 23, 256
MOST_OF_DOMAIN = 32
# Text goes on if half of so many samples of so many tokens are found again, in any order.
_SAMPLES, _SAMPLE_TOKENS = 8, 16
_MOST_TRIED = 8


@dataclass(frozen=True, eq=False)
class _Conversation:
    """`tokens` int32 [n], of which the first `stored` were in the prefix cache at the end."""

    tokens: Int32
    stored: int

    @property
    def cost_tokens(self) -> int:
        return len(self.tokens) + ENTRY_TOKENS

    def adds_to(self, newer: _Conversation) -> bool:
        """Whether it has stored what `newer` has not."""
        return self.stored > newer.stored or _count_common(self.tokens, newer.tokens) < self.stored


@dataclass
class Conversations:
    """The newest conversations by domain, up to the bounds above. One without chunks is left out.

    A conversation that continues another takes its place.
    """

    chunk_tokens: int
    _by_domain: OrderedDict[bytes, list[_Conversation]] = field(default_factory=OrderedDict)
    cost_tokens: int = 0

    def remember(self, domain: bytes, tokens: Int64, stored: int) -> None:
        """`tokens` int64 [n] have ended; the first `stored` are in the prefix cache."""
        if not stored:
            return
        new = _Conversation(tokens.astype(np.int32), stored)
        before = self._by_domain.pop(domain, [])
        after = [*(other for other in before if other.adds_to(new)), new][-MOST_OF_DOMAIN:]
        self._by_domain[domain] = after
        self.cost_tokens += _cost(after) - _cost(before)
        while self.cost_tokens > MOST_TOKENS:
            oldest = next(iter(self._by_domain))
            self.cost_tokens -= self._by_domain[oldest].pop(0).cost_tokens
            if not self._by_domain[oldest]:
                del self._by_domain[oldest]

    def find_loss(
        self, domain: bytes, tokens: Int64, cached: int, known: int = 0
    ) -> LostPrefix | None:
        """What the prompt `tokens` int64 [n] has lost, of which the cache has the first `cached`.

        It has the KV entries of the first `known`, but not the recurrent state behind them.
        None if no conversation of the domain had more of it.
        """
        most = (len(tokens) - 1) // self.chunk_tokens * self.chunk_tokens
        if domain not in self._by_domain or cached >= most:
            return None
        prompt = tokens.astype(np.int32)
        newest_first = reversed(self._by_domain[domain])
        common = [(_count_common(other.tokens, prompt), other) for other in newest_first]
        common.sort(key=lambda pair: pair[0], reverse=True)
        text = ""
        for at, other in common[:_MOST_TRIED]:
            had = min(other.stored, most)
            shared = min(had, at // self.chunk_tokens * self.chunk_tokens)
            if shared > cached:
                reason = LossReason.EVICTED if known < shared else LossReason.STATELESS
                return LostPrefix(reason, shared - cached)
            if had <= cached:
                continue
            text = text or _as_text(prompt)
            if _goes_on(other.tokens[at:], text, at):
                shown = tuple(other.tokens[at : at + MOST_SHOWN].tolist())
                return LostPrefix(LossReason.DIVERGED, had - cached, at, shown)
        return None


def _cost(conversations: list[_Conversation]) -> int:
    return sum(other.cost_tokens for other in conversations)


def _count_common(tokens: Int32, others: Int32) -> int:
    """How many tokens int32 [n] and [m] have in common at the beginning."""
    most, begin, size = min(len(tokens), len(others)), 0, 128
    while begin < most:
        end = min(begin + size, most)
        differs = tokens[begin:end] != others[begin:end]
        first = int(differs.argmax())
        if differs[first]:
            return begin + first
        begin, size = end, 4 * size
    return most


def _goes_on(rest: Int32, text: str, begin: int) -> bool:
    """Whether much of `rest` int32 [n] of a conversation is anywhere in `text` from `begin` on."""
    last = len(rest) - _SAMPLE_TOKENS
    if last < 0:
        return False
    missed = 0
    for number in range(_SAMPLES):
        at = number * last // (_SAMPLES - 1)
        missed += text.find(_as_text(rest[at : at + _SAMPLE_TOKENS]), begin) < 0
        if 2 * missed > _SAMPLES:
            return False
    return True


def _as_text(tokens: Int32) -> str:
    """One character a token: Python searches texts in linear time, whatever is in them."""
    return tokens.astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")
