"""Chunks that decode filled, of sequences that have ended: they are sealed when there is time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tangram.cache.manager import CacheManager
from tangram.engine.schedule.token_sequence import TokenSequence

MOST_SEQUENCES = 256  # that wait; more are forgotten, the oldest first


class OpenChunks:
    """The ended sequences of one scheduler whose chunks wait to be sealed in `cache`.

    The first of them may hold pages, while a chunk of it is computed.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._waiting = deque[TokenSequence]()

    @property
    def sealing(self) -> Sequence[TokenSequence]:
        """The sequence whose chunks are sealed now, if there is one."""
        first = self._waiting[0] if self._waiting else None
        return () if first is None or first.cache is None else (first,)

    def note(self, sequence: TokenSequence) -> None:
        """`sequence` ends: remember its chunks if some are open and others could find them."""
        cache = sequence.cache
        if cache is None or not cache.open_chunks or not self._cache.prefix_caching:
            return
        end = cache.sealed_chunks * cache.layout.chunk_tokens
        tokens = sequence.tokens[:end].copy()
        self._waiting.append(
            TokenSequence(
                sequence.request_id, sequence.arrival_index, sequence.keys, tokens, end, 0, end
            )
        )
        if len(self._waiting) > MOST_SEQUENCES:
            self.release()
            self._waiting.popleft()

    def begin(self) -> TokenSequence | None:
        """The sequence whose next chunk is to be sealed, with pages; None if there is none now."""
        while self._waiting:
            sequence = self._waiting[0]
            if sequence.cache is None and not self._is_sealed(sequence):
                sequence.cache = self._cache.admit(sequence.keys, sequence.tokens, sequence.limit)
            if sequence.cache is not None and sequence.cache.computed_tokens < sequence.known:
                return sequence
            self.release()
            self._waiting.popleft()
        return None

    def release(self) -> None:
        """Give back the pages of the sequence whose chunks are being sealed."""
        if self._waiting and (cache := self._waiting[0].cache) is not None:
            self._cache.close(cache)
            self._waiting[0].cache = None

    def forget(self) -> None:
        """Forget which chunks are to be sealed."""
        self.release()
        self._waiting.clear()

    def _is_sealed(self, sequence: TokenSequence) -> bool:
        """Whether all of its tokens, whole chunks, are cached."""
        chunks = sequence.known // sequence.retention.layout.chunk_tokens
        return self._cache.prefix.knows(sequence.keys.after(chunks, sequence.tokens))
