"""A completion in progress, as the scheduler orders it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram.cache.keys import ChunkKeys
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.errors import IntegrityError
from tangram.types import Int64, LostPrefix


@dataclass(eq=False)
class TokenSequence:
    """One completion in progress: `tokens[: known]` are its prompt and its sampled tokens.

    With `pending` the last of them is still on the device: it counts, but its value is not here.
    Space for sampled tokens is allocated with the first one: until then the completions of one
    request share its prompt. `keys` name its chunks in the prefix cache. `limit` is the most tokens
    whose KV state it may ever need. `arrival_index` is never reused. `due_tokens`, in computed
    tokens, is set when the sequence is first queued; `admitted_s`, of the monotonic clock, when it
    first leaves the queue. `foreseen` tokens behind the known are accepted drafts. Nothing is
    drafted for a sequence that is not `speculative`. It is number `sample_index` of the completions
    of its request, which `client` has sent. `lost` is known when it first leaves the queue.
    The log-probabilities of the first `scored` tokens of its prompt are asked of the device; all
    are, unless a client wants them.
    """

    request_id: str
    arrival_index: int
    keys: ChunkKeys
    tokens: Int64
    known: int
    prompt_tokens: int
    limit: int
    due_tokens: int = 0
    cache: SequenceCache | None = None
    cached_tokens: int | None = None
    admitted_s: float | None = None
    preemptions: int = 0
    pending: bool = False
    foreseen: int = 0
    speculative: bool = True
    sample_index: int = 0
    client: bytes = b""
    lost: LostPrefix | None = None
    scored: int | None = None

    @property
    def domain(self) -> bytes:
        """It shares prefixes with the sequences of this domain, and may say so to their client."""
        return self.client + self.keys.after(0, self.tokens)

    @property
    def retention(self) -> Retention:
        """How it keeps its KV entries."""
        return self.keys.retention

    @property
    def held(self) -> SequenceCache:
        """Its cache. Raises `IntegrityError` if it has none: it runs without pages."""
        if self.cache is None:
            raise IntegrityError(f"{self.request_id} runs without pages")
        return self.cache

    @property
    def complete(self) -> bool:
        """True when nothing is left to compute."""
        return self.known > self.limit

    @property
    def rank(self) -> tuple[int, int]:
        """The earlier due goes first, then the earlier arrival."""
        return self.due_tokens, self.arrival_index

    @property
    def read_tokens(self) -> int:
        """How many sampled tokens have arrived on the host."""
        return self.known - self.prompt_tokens - self.pending

    @property
    def known_tokens(self) -> Int64:
        """int64 [known]: prompt and sampled tokens."""
        return self.tokens[: self.known]

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.scored is not None and self.scored < self.prompt_tokens

    @property
    def reusable_tokens(self) -> Int64:
        """int64 [n]: the known tokens whose KV state may come from the cache.

        What comes from there has no logits, so the tokens behind must be scored.
        """
        return self.tokens[: self.scored if self.unscored else self.known]

    def take_targets(self, start: int, end: int) -> Int64 | None:
        """The prompt tokens behind those of `start` to `end`, if they are to be scored next."""
        if not self.unscored or self.scored != start + 1:
            return None
        self.scored = min(end + 1, self.prompt_tokens)
        return self.tokens[start + 1 : self.scored]

    @property
    def settled_tokens(self) -> Int64:
        """int64 [n]: the known tokens whose values are on the host."""
        return self.tokens[: self.known - self.pending]

    @property
    def computable_tokens(self) -> Int64:
        """int64 [n]: the known tokens and those foreseen behind them."""
        return self.tokens[: self.known + self.foreseen]

    def foresee(self, tokens: Sequence[int]) -> None:
        """`tokens` come next: their KV state is in the pool, and they are about to be expected."""
        self._allocate()
        self.tokens[self.known : self.known + len(tokens)] = tokens
        self.foreseen = len(tokens)

    def _allocate(self) -> None:
        if self.known == len(self.tokens):
            prompt, self.tokens = self.tokens, np.zeros(self.limit + 1, np.int64)
            self.tokens[: self.known] = prompt

    def expect(self) -> None:
        """Count one more token, which is being sampled."""
        known = self.known
        if known == len(self.tokens):
            self._allocate()
        if self.foreseen:
            self.foreseen -= 1
        self.known = known + 1
        self.pending = True

    def extend(self, tokens: Sequence[int]) -> None:
        """The values of the tokens that come next: the expected token, then those foreseen."""
        begin = self.known - self.pending
        end = begin + len(tokens)
        if end > len(self.tokens):
            self._allocate()
        self.tokens[begin:end] = tokens
        self.foreseen = max(0, self.foreseen - (end - self.known))
        self.known, self.pending = end, False

    def count_state(self) -> tuple[int, int]:
        """Its sealed chunks and its raw tokens, up to the token before the newest.

        Of a preempted sequence, as it was when last computed.
        """
        cache, chunk_tokens = self.cache, self.keys.retention.layout.chunk_tokens
        if cache is not None:
            sealed, raw = len(cache.spans), cache.raw_tokens
            ahead = sealed * chunk_tokens + raw - self.known + 1
            return sealed, raw - ahead if ahead > 0 else raw
        if self.cached_tokens is None:
            return 0, 0
        return divmod(self.known - 1 - self.pending, chunk_tokens)


def sequence_of(
    request_id: str,
    arrival: int,
    retention: Retention,
    salt: str,
    prompt: tuple[int, ...] | Int64,
    limit: int,
    *,
    speculative: bool = True,
    sample_index: int = 0,
    client: bytes = b"",
    scored: int | None = None,
) -> TokenSequence:
    """A new sequence with the tokens of `prompt`; an array, int64 [n], is not copied."""
    return TokenSequence(
        request_id,
        arrival,
        ChunkKeys(retention, salt),
        np.asarray(prompt, np.int64),
        known=len(prompt),
        prompt_tokens=len(prompt),
        limit=limit,
        speculative=speculative,
        sample_index=sample_index,
        client=client,
        scored=scored,
    )
