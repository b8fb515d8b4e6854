"""The scheduler: chooses the rows of the next step. Integers only.

Counts are known before the step (Tangram, budget reservation). Sequences are served in the order of
their due numbers: the tokens computed when a sequence came, plus `prompt_patience` times its new
tokens. Short prompts overtake long ones, but only until that many tokens are computed.

A step is a budget of tokens. Decoding sequences take one each. The rest goes to whole chunks and
prompt tails of one sequence after the other, running or waiting. A chunk is never split. A sequence
is admitted when its footprint up to the end of its current chunk can be promised. A new promise is
needed only when a chunk ends. If there are not enough pages then, the last sequence is preempted
and later recomputed to the same state. The first one continues. If another sequence seals the same
first chunk in this step, a sequence waits for the next step and finds the chunk in the cache. A
sequence whose chunks come back from host memory joins one step later if others run: the step runs
beside the copies. One whose chunks come from disk is queued when they are read.

A step may be scheduled while the tokens of the one before are still on the device: only their
number matters. Where prefill rows are computed in passes of their own, a prompt's first token does
not wait for the decode pass beside them: they are a step of their own, and the next one decodes.

A chunk that decode has filled is computed again before its sequence goes on, and before any prompt:
its client waits for a next token. While others decode, a step takes few of these, so that no row
waits for the chunks of all others.

Where a chunk that decode filled has its place already (ρ = 1.0), its sequence goes on at once. The
chunk is computed again, and sealed for others, when nothing else is to be computed. Where drafts
read a part of each chunk, only few stay open: then all of them are computed again at once.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from tangram.cache.disk import Fetch
from tangram.cache.fetching import begin_reads, end_fetch, is_over, plan_fetch
from tangram.cache.manager import CacheManager
from tangram.cache.purge import purge, suspects
from tangram.cache.recent import Conversations
from tangram.cache.sequence_cache import SequenceCache
from tangram.cache.step import Row, RowKind, Step
from tangram.engine.schedule.open_chunks import OpenChunks
from tangram.engine.schedule.rows import Membership, newest_row, prefill_span, row_of
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.types import Int32, Int64, LossReason
from tangram.watch import SequenceState

_rank = attrgetter("rank")
_MOMENT_S = 0.01


@dataclass
class SchedulerCounters:
    """Counts since the start."""

    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    sealed_chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    lost_tokens: dict[LossReason, int] = field(default_factory=lambda: dict.fromkeys(LossReason, 0))


class Drafts(Protocol):
    """What may come behind the newest tokens of sequences."""

    @property
    def on_device(self) -> bool:
        """Whether drafts are not known when a step is scheduled."""
        ...

    def offer(self, sequence: TokenSequence, most: int) -> Int64:
        """int64 [up to `most`]: drafts for `sequence`, or zeros where the device will draft."""
        ...


@dataclass(frozen=True)
class StepLimits:
    """The most sequences and tokens of a step, and how long a prompt may wait for shorter ones.

    That is `prompt_patience` times its tokens; 0 is first come, first served.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_patience: int = 0


@dataclass
class Scheduler:
    """Two queues in order of rank, `waiting` and `running`, over one cache manager.

    Sequences of `fetching` are not queued yet: chunks of them are read from disk.
    `drafts` says what may come behind the newest token of a sequence. `changes` are those noted,
    None before `note_changes`. `passes_apart` says whether prefill rows are computed in passes of
    their own beside decode rows.
    """

    cache: CacheManager
    limits: StepLimits
    waiting: list[TokenSequence] = field(default_factory=list)
    running: list[TokenSequence] = field(default_factory=list)
    fetching: dict[TokenSequence, Fetch] = field(default_factory=dict)
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    drafts: Drafts | None = None
    changes: list[tuple[TokenSequence, SequenceState]] | None = None
    open_chunks: OpenChunks = field(init=False)
    conversations: Conversations = field(init=False)
    passes_apart: Callable[[Sequence[Row]], bool] = lambda rows: False
    _sealing: set[bytes] = field(default_factory=set)
    _membership: Membership = field(default_factory=Membership)
    _decode_waits: bool = False
    _fresh: int = 0  # of those waiting, how many never ran
    _accepted: int = 0  # drafts of the last step

    def __post_init__(self) -> None:
        self.open_chunks = OpenChunks(self.cache)
        self.conversations = Conversations(self.cache.chunk_tokens)

    def note_changes(self) -> None:
        """From now on note who is queued and who is admitted."""
        self.changes = []

    def take_changes(self) -> list[tuple[TokenSequence, SequenceState]]:
        """The changes noted since the last call, in order."""
        noted = self.changes or []
        self.note_changes()
        return noted

    def excess(self, entering: int) -> int:
        """Sequences that never ran, with `entering` more, minus the free places of the batch.

        A positive number waits; a negative number is free places.
        """
        return self._fresh + entering - (self.limits.max_num_seqs - len(self.running))

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence; its most pages (`Layout.most_pages`) must not exceed the pool.

        If the disk has chunks of it that memory does not have, it is queued when they are read.
        """
        fetch = plan_fetch(self.cache, sequence.keys, sequence.reusable_tokens)
        if fetch is None:
            self._enter(sequence)
        else:
            self.fetching[sequence] = fetch
            self._fresh += 1
            begin_reads(self.cache, self.fetching.values())

    def _enter(self, sequence: TokenSequence) -> None:
        """Queue a sequence for the first time."""
        reusable = sequence.reusable_tokens
        new_tokens = self.cache.new_tokens(sequence.keys, reusable) + sequence.known - len(reusable)
        sequence.due_tokens = (
            self.counters.computed_tokens + self.limits.prompt_patience * new_tokens
        )
        self._queue(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence, ended or aborted, and free its pages. Unknown ones are ignored."""
        self.open_chunks.note(sequence)
        if sequence.cache is not None:
            stored = len(sequence.cache.chunk_nodes) * self.cache.chunk_tokens
            self.conversations.remember(sequence.domain, sequence.settled_tokens, stored)
        self._forget(sequence)

    def leave_open(self) -> None:
        """Sequences go on behind a chunk that decode filled, where it has its place already.

        Where too many are open, they are computed again.
        """
        self._leave_open(self._at_boundary())

    def _leave_open(self, sequences: Iterable[TokenSequence]) -> None:
        for sequence in sequences:
            cache = sequence.held
            if sequence.complete or not cache.raw_tokens:
                continue
            if self.cache.can_leave_open(cache):
                self.cache.leave_open(cache)
            elif cache.open_chunks:
                self.cache.drop_open(cache)

    def _forget(self, sequence: TokenSequence) -> None:
        if (fetch := self.fetching.pop(sequence, None)) is not None:
            self._fresh -= 1
            if self.cache.disk is not None:
                self.cache.disk.drop(fetch)
        queue = self.waiting if sequence.cache is None else self.running
        at = bisect_left(queue, sequence.rank, key=_rank)
        if at < len(queue) and queue[at] is sequence:
            del queue[at]
            self._fresh -= sequence.cached_tokens is None
        if sequence.cache is not None:
            self.cache.close(sequence.cache)
            sequence.cache = None

    def quarantine(self, sequence: TokenSequence) -> Int32:
        """Forget a sequence with unsound state, and every cached link that may share it.

        See `cache/purge.py`. Other sequences that use these links give their pages back and are
        recomputed from their tokens. Returns the pages [n], now unused, that must be cleared: a
        kernel may read a page beyond its entries with weight zero, and zero times NaN is NaN.
        """
        found = suspects(self.cache, sequence.keys, sequence.settled_tokens)
        if sequence.cache is not None and sequence.cache.slot not in found.slots:
            found.slots.append(sequence.cache.slot)
        pages = found.pages(self.cache)
        self.open_chunks.forget()
        self._forget(sequence)
        for other in [entry for entry in self.running if entry.held.slot in found.slots]:
            self._preempt(other)
        purge(self.cache, found)
        return pages

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run.

        The pages of its rows are taken and their tables written.
        """
        budget = self.limits.max_num_batched_tokens
        self._take_fetched()
        self._sealing.clear()
        if self.running or self.waiting:
            self.open_chunks.release()
        at_boundary = self._at_boundary()
        self._leave_open(at_boundary)
        self._secure_promises(at_boundary)
        decoding, filled, unfinished = self._sort_running()
        if decoding:
            filled = filled[: self._most_filled()]
        self._accepted = 0
        in_turn = chain(filled, self._in_turn(unfinished, self._admissions()))
        prefill = self._prefill(
            (sequence for sequence in in_turn if not sequence.held.arriving), budget - len(decoding)
        )
        self._decode_waits = bool(
            decoding and not self._decode_waits and self._comes_first(prefill)
        )
        spare = 0  # a step that computes a prompt is for that
        if self.drafts is not None and not self._computes_prompt(prefill):
            spare = budget - len(decoding) - sum(len(row.tokens) for row in prefill)
        decode = [] if self._decode_waits else self._decode_rows(decoding, spare)
        if not decode and not prefill:
            prefill = self._prefill(
                [sequence for sequence in self.running if sequence.held.arriving], budget
            )
        if not self.running and not self.waiting:
            prefill = self._seal_open()
        if not decode and not prefill:
            return None
        self.counters.steps += 1
        # Whole chunks lie end to end, because they are sealed together.
        prefill.sort(key=lambda row: row.kind is RowKind.TAIL)
        rows = tuple(decode + prefill)
        moves = self.cache.take_moves({row.slot for row in rows})
        step = Step(rows, self._epoch_of(decode), *moves)
        self.counters.computed_tokens += step.decode_tokens
        self.counters.computed_tokens += sum(len(row.tokens) for row in prefill)
        return step

    def settle(self, sequence: TokenSequence, drafts: Sequence[int], accepted: int) -> None:
        """Of `drafts`, which a step has computed, the model takes the first `accepted`.

        Call it before `commit`.
        """
        self._accepted += accepted
        sequence.foresee(drafts[:accepted])
        self.cache.shrink(sequence.held, len(drafts) - accepted)

    @property
    def prefilling(self) -> bool:
        """Whether a running sequence computes its prompt: its first token is still to come."""
        _, _, unfinished = self._sort_running()
        return any(not sequence.read_tokens for sequence in unfinished)

    @property
    def computing(self) -> Sequence[TokenSequence]:
        """The running sequences, and an ended sequence whose chunks are sealed now."""
        return *self.running, *self.open_chunks.sealing

    @property
    def decoding(self) -> list[TokenSequence]:
        """The running sequences whose next row decodes."""
        return self._sort_running()[0]

    def commit(self, step: Step) -> None:
        """Record what `step` computes.

        Call it when nothing is pending, before its tokens are expected. Sequences that were removed
        since it was scheduled are skipped.
        """
        by_slot = {
            sequence.cache.slot: sequence
            for sequence in self.computing
            if sequence.cache is not None
        }
        for row in _publishing(step, self.cache.page_tokens):
            self.counters.sealed_chunks += row.kind is RowKind.SEAL
            sequence = by_slot.get(row.slot)
            if sequence is not None and sequence.cache is not None:
                self.cache.commit(sequence.cache, sequence.computable_tokens)

    # -- internals ---------------------------------------------------------------------------------

    def _take_fetched(self) -> None:
        """Queue the sequences whose chunks have been read from disk, or take too long.

        If there is nothing else to do, the first of them is awaited, for a moment.
        """
        if self.fetching and not self.running and not self.waiting:
            next(iter(self.fetching.values())).wait(_MOMENT_S)
        for sequence, fetch in list(self.fetching.items()):
            if is_over(self.cache, fetch):
                del self.fetching[sequence]
                self._fresh -= 1
                end_fetch(self.cache, fetch, sequence.keys, sequence.reusable_tokens)
                self._enter(sequence)
        begin_reads(self.cache, self.fetching.values())

    def _secure_promises(self, at_boundary: Iterable[TokenSequence]) -> None:
        """Promise each sequence that enters a new chunk that chunk's pages, in order."""
        for sequence in at_boundary:
            while (
                sequence.cache is not None and not sequence.complete and _at_chunk_start(sequence)
            ):
                if self.cache.extend(sequence.cache, sequence.limit):
                    break
                self._preempt(self.running[-1])

    def _at_boundary(self) -> list[TokenSequence]:
        """The running sequences that are at the end of a chunk: sealed, or full and not yet."""
        size = self.cache.chunk_tokens
        return [sequence for sequence in self.running if not sequence.held.raw_tokens % size]

    def _sort_running(self) -> tuple[list[TokenSequence], list[TokenSequence], list[TokenSequence]]:
        """The running sequences that are not complete, in three parts.

        Those whose next row decodes, those that wait with a chunk that decode has filled, and those
        that compute a prompt.
        """
        size, decoding = self.cache.chunk_tokens, list[TokenSequence]()
        filled, others = list[TokenSequence](), list[TokenSequence]()
        for sequence in self.running:
            known, cache = sequence.known, sequence.held
            if known > sequence.limit:
                continue
            raw_tokens = cache.raw_tokens
            if raw_tokens == size:
                filled.append(sequence)
            else:
                left = known - len(cache.spans) * size - raw_tokens
                (decoding if left == 1 else others).append(sequence)
        return decoding, filled, others

    def _most_filled(self) -> int:
        """How many chunks that decode has filled a step takes beside rows that decode.

        As many as the batch fills in a step on average, with as many accepted drafts as the last
        one had: with fewer, ever more would wait.
        """
        return -(-(len(self.running) + self._accepted) // self.cache.chunk_tokens)

    def _seal_open(self) -> list[Row]:
        """The next chunk that an ended sequence left open, if there are pages for it."""
        sequence = self.open_chunks.begin()
        if sequence is None:
            return []
        row = self._prefill_row(sequence, self.limits.max_num_batched_tokens)
        return [] if row is None else [replace(row, sample=False)]

    def _queue(self, sequence: TokenSequence) -> None:
        self._note(sequence, SequenceState.WAITING)
        insort(self.waiting, sequence, key=_rank)
        self._fresh += sequence.cached_tokens is None

    def _note(self, sequence: TokenSequence, state: SequenceState) -> None:
        if self.changes is not None:
            self.changes.append((sequence, state))

    def _preempt(self, sequence: TokenSequence) -> None:
        self._forget(sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._queue(sequence)

    def _in_turn(
        self, unfinished: Iterable[TokenSequence], admissions: Iterator[TokenSequence]
    ) -> Iterator[TokenSequence]:
        """Running and waiting sequences by rank. A waiting one is admitted in its turn.

        If it cannot be admitted, the running ones continue.
        """
        for sequence in unfinished:
            while self.waiting and self.waiting[0].rank < sequence.rank:
                admitted = next(admissions, None)
                if admitted is None:
                    break
                yield admitted
            yield sequence
        yield from admissions

    def _admissions(self) -> Iterator[TokenSequence]:
        """Waiting sequences as they are admitted, up to the first that does not fit.

        No sequence of a later rank overtakes it.
        """
        while (
            self.waiting
            and len(self.running) < self.limits.max_num_seqs
            and self._admit(self.waiting[0])
        ):
            sequence = self.waiting.pop(0)
            insort(self.running, sequence, key=_rank)
            self._note(sequence, SequenceState.RUNNING)
            yield sequence
            # About a step's budget of tokens may be copied from host memory at a time.
            if self.cache.arriving_tokens >= self.limits.max_num_batched_tokens:
                return

    def _admit(self, sequence: TokenSequence) -> bool:
        if sequence.pending:  # just preempted; its tokens identify what the cache may have
            return False
        known, reusable = sequence.known_tokens, sequence.reusable_tokens
        sequence.cache = self.cache.admit(sequence.keys, known, sequence.limit, reusable)
        if sequence.cache is None:
            return False
        if not sequence.unscored and self.cache.next_key(sequence.cache, known) in self._sealing:
            self.cache.close(sequence.cache)
            sequence.cache = None
            return False
        if sequence.cached_tokens is None:
            self._fresh -= 1
            sequence.cached_tokens, sequence.admitted_s = (
                sequence.cache.cached_tokens,
                time.monotonic(),
            )
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_tokens += sequence.cached_tokens
            self._find_loss(sequence, sequence.cached_tokens)
        return True

    def _find_loss(self, sequence: TokenSequence, cached: int) -> None:
        if sequence.unscored:  # it reuses nothing on purpose
            return
        known = sequence.held.left_chunks * self.cache.chunk_tokens
        lost = sequence.lost = self.conversations.find_loss(
            sequence.domain, sequence.known_tokens, cached, known
        )
        if lost is not None:
            self.counters.lost_tokens[lost.reason] += lost.tokens

    def _comes_first(self, prefill: Sequence[Row]) -> bool:
        """Whether `prefill` ends a prompt sooner if no decode row is in its step."""
        return any(row.sample for row in prefill) and self.passes_apart(prefill)

    def _computes_prompt(self, prefill: Sequence[Row]) -> bool:
        """Whether a row of `prefill` is of a sequence whose first token is still to come."""
        slots = {row.slot for row in prefill}
        return any(
            sequence.held.slot in slots and not sequence.read_tokens
            for sequence in (self.running if slots else ())
        )

    def _decode_rows(self, sequences: Sequence[TokenSequence], spare: int) -> list[Row]:
        """The newest token of each sequence, and its drafts, up to `spare` in all."""
        if self.drafts is None:
            caches = [sequence.held for sequence in sequences]
            self.cache.grow_each(caches)
            return [newest_row(*pair) for pair in zip(sequences, caches, strict=True)]
        rows: list[Row] = []
        for sequence in sequences:
            row = self._decode_row(sequence, spare)
            spare -= row.drafts
            rows.append(row)
        return rows

    def _decode_row(self, sequence: TokenSequence, spare: int) -> Row:
        """The newest token and up to `spare` drafts, with pages for them."""
        cache = sequence.held
        drafts = self._draft(sequence, cache, spare)
        self.cache.grow(cache, 1 + len(drafts))
        row = newest_row(sequence, cache)
        if self.drafts is None or not len(drafts):
            return row
        tokens = np.concatenate([row.tokens, drafts])
        return replace(row, tokens=tokens, pending=self.drafts.on_device)

    def _draft(self, sequence: TokenSequence, cache: SequenceCache, most: int) -> Int64:
        """What is drafted behind the newest token; none crosses the end of a chunk."""
        of_chunk = cache.layout.chunk_tokens - cache.raw_tokens - 1
        left = min(most, of_chunk, sequence.limit - sequence.known)
        if self.drafts is None or sequence.pending or left <= 0:
            return np.zeros(0, np.int64)
        return self.drafts.offer(sequence, left)

    def _prefill(self, candidates: Iterable[TokenSequence], budget: int) -> list[Row]:
        """All rows that the first sequence may have, then those of the second, while they fit."""
        rows: list[Row] = []
        for sequence in candidates:
            goes_on = True
            while goes_on and not self._waits_to_score(sequence, rows):
                row = self._prefill_row(sequence, budget)
                if row is None:
                    return rows
                rows.append(row)
                budget -= len(row.tokens)
                goes_on = self._goes_on(sequence, row)
        return rows

    def _waits_to_score(self, sequence: TokenSequence, rows: Sequence[Row]) -> bool:
        """Whether a step of `rows` would have logits of more than a chunk of prompt tokens."""
        if not sequence.unscored:
            return False
        _, start, end = prefill_span(sequence.held, sequence.known)
        scored = sum(len(row.targets) for row in rows if row.targets is not None)
        return scored + end - start > self.cache.chunk_tokens

    def _goes_on(self, sequence: TokenSequence, row: Row) -> bool:
        """Whether the step that seals a chunk may compute more of the sequence.

        A single token is left to decode.
        """
        if row.kind is not RowKind.SEAL or sequence.retention.one_chunk_a_step:
            return False
        cache, rest = sequence.held, sequence.known - row.start - len(row.tokens)
        return rest > 1 and self.cache.can_go_on(cache, min(rest, cache.layout.chunk_tokens))

    def _prefill_row(self, sequence: TokenSequence, budget: int) -> Row | None:
        cache = sequence.held
        kind, start, end = prefill_span(cache, sequence.known)
        if end - start > budget:
            return None
        # A chunk that decode completed has been sampled already; one that ends the known tokens has
        # not.
        sample = end == sequence.known and cache.raw_tokens < cache.layout.chunk_tokens
        snapshot = None
        if kind is RowKind.SEAL:
            key = self.cache.next_key(cache, sequence.settled_tokens)
            if key is not None:
                self._sealing.add(key)
            self.cache.seal(cache)
            snapshot = self.cache.take_snapshot(cache, sequence.known)
        else:
            self.cache.grow(cache, end - start)
        self.counters.computed_prompt_tokens += max(0, min(end, sequence.prompt_tokens) - start)
        targets = sequence.take_targets(start, end)
        return row_of(
            *(sequence, cache, kind, start, end), sample=sample, targets=targets, snapshot=snapshot
        )

    def _epoch_of(self, decode: list[Row]) -> int:
        size = self.cache.chunk_tokens
        return self._membership.epoch_of(
            tuple((row.slot, row.retention, row.start // size) for row in decode)
        )


def _publishing(step: Step, page_tokens: int) -> list[Row]:
    """The rows of `step` that may leave something to publish.

    A row that decodes one token does if it fills a page.
    """
    first = step.decode_rows
    decode = [
        row for row in step.rows[:first] if len(row.tokens) > 1 or not (row.start + 1) % page_tokens
    ]
    return [*decode, *step.rows[first:]]


def _decodes(sequence: TokenSequence) -> bool:
    """True if only its newest token must be computed, within the current chunk."""
    cache = sequence.held
    return (
        sequence.known - cache.computed_tokens == 1 and cache.raw_tokens < cache.layout.chunk_tokens
    )


def _at_chunk_start(sequence: TokenSequence) -> bool:
    cache = sequence.held
    rest = sequence.known - cache.computed_tokens
    # With chunks of one token the newest token fills its chunk but is still decoded.
    return cache.raw_tokens == 0 and (rest < cache.layout.chunk_tokens or _decodes(sequence))
