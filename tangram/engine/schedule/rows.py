"""The rows of one sequence, as its tokens and its pages determine them, and sets of such rows."""

from __future__ import annotations

import numpy as np

from tangram.cache.sequence_cache import SequenceCache
from tangram.cache.step import Row, RowKind
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.types import Int32, Int64

PRECEDING_TOKENS = 16
_NOTHING, _UNKNOWN = np.zeros(0, np.int64), np.zeros(1, np.int64)


def row_of(
    sequence: TokenSequence,
    cache: SequenceCache,
    kind: RowKind,
    start: int,
    end: int,
    *,
    sample: bool,
    targets: Int64 | None = None,
    snapshot: Int32 | None = None,
) -> Row:
    """The row that computes the tokens `start` to `end` of `sequence` into `cache`."""
    tokens, pending = sequence.tokens[start:end], sequence.pending and end == sequence.known
    return Row(
        sequence.request_id,
        cache.slot,
        sequence.retention,
        kind,
        start,
        tokens.copy() if pending else tokens,  # a row keeps its tokens when the last is known
        sequence.tokens[max(0, start - PRECEDING_TOKENS) : start],
        sample,
        pending,
        targets,
        snapshot,
    )


def newest_row(sequence: TokenSequence, cache: SequenceCache) -> Row:
    """The DECODE row of the newest token of `sequence`."""
    end, pending = sequence.known, sequence.pending
    begin = end - 1
    return Row(
        sequence.request_id,
        cache.slot,
        sequence.keys.retention,
        RowKind.DECODE,
        begin,
        _UNKNOWN if pending else sequence.tokens[begin:end],
        _NOTHING,
        True,
        pending,
    )


def prefill_span(cache: SequenceCache, known: int) -> tuple[RowKind, int, int]:
    """What comes next of `known` tokens: a whole chunk to seal, or the tail that fills none.

    The kind of its row, its first token, and the one behind it.
    """
    chunk_tokens = cache.layout.chunk_tokens
    begin = cache.sealed_chunks * chunk_tokens
    if known - begin < chunk_tokens:
        return RowKind.TAIL, cache.computed_tokens, known
    return RowKind.SEAL, begin, begin + chunk_tokens


class Membership:
    """Numbers the sets of rows that passes decode, as plans see them."""

    def __init__(self) -> None:
        self._members: tuple[object, ...] = ()
        self._epoch = 0

    def epoch_of(self, members: tuple[object, ...]) -> int:
        """A number that changes when `members` do: the plan may no longer hold."""
        if members != self._members:
            self._members, self._epoch = members, self._epoch + 1
        return self._epoch
