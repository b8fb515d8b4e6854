"""Drafts of a second, smaller model, whose KV entries are in a pool of their own.

Each served sequence that is drafted for has a mirror: the same tokens, with the draft model's KV
state. A mirror is one token behind, like a sequence that decodes. If pages run out, the mirrors
that were used least recently give theirs back, and sequences without a mirror decode plainly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.cache.step import Row, RowKind, Step
from tangram.engine.drafts.draft_round import DraftRound
from tangram.engine.drafts.speculation import Drafting
from tangram.engine.passes.runner import Runner
from tangram.engine.schedule.rows import Membership, prefill_span, row_of
from tangram.engine.schedule.token_sequence import TokenSequence, sequence_of
from tangram.types import Int64


class ModelDrafter:
    """A `Drafter`: the model of `runner` drafts over `cache`, in which `retention` keeps all.

    It prefills at most `most_tokens` tokens before a step. `vocabulary` is the number of tokens of
    the served model.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        retention: Retention,
        *,
        most_tokens: int,
        vocabulary: int,
    ) -> None:
        self.cache = cache
        self._runner, self._retention = runner, retention
        self._most_tokens, self._vocabulary = most_tokens, vocabulary
        self._membership = Membership()
        # The least recently used first.
        self._mirrors = OrderedDict[TokenSequence, TokenSequence]()

    def prepare(self, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """See `Drafter`. What a long prompt lacks is computed in several steps."""
        mirrors = {entry: self._mirror(entry) for entry in sequences if self.serves(entry)}
        used = frozenset(mirrors.values())
        held = {entry: mirror for entry, mirror in mirrors.items() if self._secure(mirror, used)}
        prefill = _DraftedPrefill(self._most_tokens)
        for mirror in held.values():
            self._prefill(mirror, prefill)
        self._compute(prefill)
        return [entry for entry in sequences if entry not in held]

    def serves(self, sequence: TokenSequence) -> bool:
        """See `Drafter`: while the model can read more of it."""
        return sequence.known < self._limit(sequence)

    def offer(self, sequence: TokenSequence, most: int) -> int:
        """See `Drafter`: none until its mirror has all but the newest token."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or mirror.known != sequence.known or not _is_ready(mirror):
            return 0
        return max(0, min(most, mirror.limit - mirror.known))

    @torch.inference_mode()
    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        """See `Drafter`. The last pass of a sequence computes its last draft and chooses nothing.

        So nothing is missing if all are accepted.
        """
        mirrors = [self._mirrors[each.sequence] for each in drafting]
        caches = [mirror.held for mirror in mirrors]
        epoch = self._epoch_of(mirrors, caches)
        for cache in caches:
            self.cache.grow(cache, 1)
        rows = [
            row_of(mirror, cache, RowKind.DECODE, mirror.known - 1, mirror.known, sample=True)
            for mirror, cache in zip(mirrors, caches, strict=True)
        ]
        drafts = DraftRound(self._runner.passes, drafting, rows, epoch, self._vocabulary)
        for cache, count in zip(caches, drafts.counts.tolist(), strict=True):
            self.cache.grow(cache, count)
        for _ in range(int(drafts.counts.max())):
            drafts.choose(drafts.compute(beyond=1))
        drafts.compute(beyond=1)
        return drafts.drafts()

    def settle(self, sequence: TokenSequence) -> None:
        """See `Drafter`: entries of refused drafts are released."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or mirror.cache is None:
            return
        tokens = self._legible(sequence.computable_tokens)
        refused = mirror.cache.computed_tokens - len(tokens)
        if refused > 0:
            self.cache.shrink(mirror.cache, refused)
        self.cache.commit(mirror.cache, tokens)

    def forget(self, sequence: TokenSequence) -> None:
        """See `Drafter`: its mirror is closed; what that has published stays cached."""
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            self._close(mirror)

    # -- mirrors -----------------------------------------------------------------------------------

    def _mirror(self, sequence: TokenSequence) -> TokenSequence:
        """The mirror of `sequence` with its tokens of now; it is used most recently."""
        mirror = self._mirrors.get(sequence)
        if mirror is None:
            mirror = self._mirrors[sequence] = sequence_of(
                sequence.request_id,
                sequence.arrival_index,
                self._retention,
                sequence.keys.salt,
                sequence.known_tokens,
                self._limit(sequence),
            )
        mirror.tokens, mirror.known = self._legible(sequence.known_tokens), sequence.known
        self._mirrors.move_to_end(sequence)
        return mirror

    def _limit(self, sequence: TokenSequence) -> int:
        return min(sequence.limit, self._retention.layout.max_tokens)

    def _legible(self, tokens: Int64) -> Int64:
        """`tokens`, with token 0 for those that the draft model has no embedding of."""
        known = self._retention.layout.geometry.vocab_size
        return tokens if known >= self._vocabulary else np.where(tokens < known, tokens, 0)

    def _secure(self, mirror: TokenSequence, used: Collection[TokenSequence]) -> bool:
        """Promise `mirror` the pages up to the end of its chunk.

        Mirrors that are not `used` now give theirs back for it. If that is not enough it holds
        none.
        """
        needed = self._retention.layout.count_promised_pages(mirror.known, mirror.limit)
        fits = needed <= self.cache.ledger.total
        while not (fits and self._promise(mirror)):
            others = self._mirrors.values()
            idle = (holder for holder in others if holder.cache is not None and holder not in used)
            other = next(idle, None) if fits else None
            if other is None:
                self._close(mirror)
                return False
            self._close(other)
        return True

    def _promise(self, mirror: TokenSequence) -> bool:
        if mirror.cache is not None:
            return self.cache.extend(mirror.cache, mirror.limit, mirror.known)
        mirror.cache = self.cache.admit(mirror.keys, mirror.known_tokens, mirror.limit)
        return mirror.cache is not None

    def _close(self, mirror: TokenSequence) -> None:
        if mirror.cache is not None:
            self.cache.close(mirror.cache)
            mirror.cache = None
            mirror.preemptions += 1

    # -- passes ------------------------------------------------------------------------------------

    def _prefill(self, mirror: TokenSequence, prefill: _DraftedPrefill) -> None:
        """Take pages for what `mirror` lacks but its newest token, as much as fits `prefill`."""
        cache = mirror.held
        key = self.cache.next_key(cache, mirror.tokens[: mirror.known - 1])
        if key in prefill.sealing:
            self._close(mirror)  # the next step finds the chunk in the cache
            return
        if key is not None:
            prefill.sealing.add(key)
        while _is_behind(mirror, cache):
            kind, start, end = prefill_span(cache, mirror.known - 1)
            if end - start > prefill.spare:
                return
            if kind is RowKind.SEAL:
                self.cache.seal(cache)
            else:
                self.cache.grow(cache, end - start)
            prefill.add(mirror, row_of(mirror, cache, kind, start, end, sample=False))
            rest = mirror.known - 1 - end
            if not self.cache.can_go_on(cache, min(rest, cache.layout.chunk_tokens)):
                return

    def _compute(self, prefill: _DraftedPrefill) -> None:
        if not prefill.rows:
            return
        # Whole chunks lie end to end, because they are sealed together.
        rows = tuple(sorted(prefill.rows, key=lambda row: row.kind is RowKind.TAIL))
        step = Step(rows, 0, *self.cache.take_moves({row.slot for row in rows}))
        self._runner.run(self._runner.plan(step), [])
        for mirror in prefill.mirrors:
            self.cache.commit(mirror.held, mirror.known_tokens)

    def _epoch_of(self, mirrors: Sequence[TokenSequence], caches: Sequence[SequenceCache]) -> int:
        return self._membership.epoch_of(
            tuple(
                (mirror.arrival_index, mirror.preemptions, cache.slot, cache.sealed_chunks)
                for mirror, cache in zip(mirrors, caches, strict=True)
            )
        )


@dataclass(eq=False)
class _DraftedPrefill:
    """The rows that mirrors lack, in one step of at most `spare` more tokens.

    `sealing` are the keys of the chunks that they begin with.
    """

    spare: int
    rows: list[Row] = field(default_factory=list)
    mirrors: dict[TokenSequence, None] = field(default_factory=dict)
    sealing: set[bytes] = field(default_factory=set)

    def add(self, mirror: TokenSequence, row: Row) -> None:
        """`row` of `mirror` is computed."""
        self.rows.append(row)
        self.mirrors[mirror] = None
        self.spare -= len(row.tokens)


def _is_behind(mirror: TokenSequence, cache: SequenceCache) -> bool:
    """Whether more is missing than the newest token, or a full chunk is not sealed."""
    return cache.computed_tokens < mirror.known - 1 or cache.raw_tokens == cache.layout.chunk_tokens


def _is_ready(mirror: TokenSequence) -> bool:
    cache = mirror.cache
    return cache is not None and not _is_behind(mirror, cache)
