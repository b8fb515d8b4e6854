"""A scheduler with a labelled pool for a device: as the tests of the scheduler use it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tangram.cache.fetching import plan_fetch
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind, Step
from tangram.engine.schedule.rows import PRECEDING_TOKENS
from tangram.engine.schedule.scheduler import Scheduler, StepLimits
from tangram.engine.schedule.token_sequence import TokenSequence, sequence_of
from tangram.types import Int64, PageMove
from tests.core.host.device_double import Device, retentions
from tests.core.host.disk_double import DiskDouble

MAX_TOKENS = 48


@dataclass
class DeviceDrafts:
    """Drafts of up to `most` tokens, of which each is right with probability `sure`.

    With `on_device` the scheduler sees zeros; `offered` are the drafts themselves.
    """

    most: int
    sure: float
    on_device: bool
    rng: random.Random
    tastes: dict[TokenSequence, int] = field(default_factory=dict)
    offered: dict[TokenSequence, list[int]] = field(default_factory=dict)
    accepted: int = 0
    refused: int = 0

    def offer(self, sequence: TokenSequence, most: int) -> Int64:
        """What a `Scheduler` asks: the sequence's answer as it will be, or something else."""
        assert not sequence.pending
        tokens, drafts = sequence.known_tokens.tolist(), list[int]()
        for _ in range(min(most, self.rng.randint(0, self.most))):
            token = next_token(self.tastes[sequence], [*tokens, *drafts])
            wrong = self.rng.random() > self.sure
            drafts.append((token + 1) % 3 if wrong else token)
        self.offered[sequence] = drafts
        return np.asarray([0] * len(drafts) if self.on_device else drafts, np.int64)


def next_token(taste: int, tokens: Sequence[int]) -> int:
    """The token behind `tokens`."""
    return hash((taste, *tokens)) % 3


class ScheduledDevice:
    """A scheduler with a labelled pool for a device; a step checks every rule. A sampled token
    depends on its prefix and on the sequence's `taste`, so that sequences of one taste stay
    together and others part; one of taste 2 ends when it samples a 2. With `ahead` a step is
    scheduled before the tokens of the one before are there, unless `drafts` are asked for some.
    `kept` are the retentions of `layouts`, if these are special. Up to `apart` prefill rows of a
    step have passes of their own.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        *,
        slack_pages: int,
        max_num_seqs: int,
        slack_tokens: int = 0,
        caching: bool = True,
        one_chunk_a_step: frozenset[int] = frozenset(),
        ahead: bool = False,
        host_pages: int = 0,
        patience: int = 16,
        drafts: DeviceDrafts | None = None,
        kept: Sequence[Retention] = (),
        apart: int = 0,
        state_pages: int = 0,
        disk: DiskDouble | None = None,
    ) -> None:
        self.retentions = kept or retentions(*layouts, one_chunk_a_step=one_chunk_a_step)
        self.ahead, self.drafts = ahead, drafts
        chunk, page = layouts[0].chunk_tokens, layouts[0].page_tokens
        self.limits = StepLimits(max_num_seqs, chunk + max_num_seqs + slack_tokens, patience)
        most = max(entry.layout.most_pages(MAX_TOKENS - 1) for entry in self.retentions)
        self.manager = CacheManager(
            self.retentions,
            total_pages=most + slack_pages,
            max_sequences=max_num_seqs,
            prefix_caching=caching,
            host_pages=host_pages,
            state_pages=state_pages,
            disk=disk,
        )
        self.disk = disk
        self.scheduler = Scheduler(
            self.manager, self.limits, passes_apart=lambda rows: len(rows) <= apart
        )
        self.apart, self.postponed = apart, False
        self.device = Device(self.manager, page)
        self.tastes: dict[TokenSequence, int] = {} if drafts is None else drafts.tastes
        self.ended: list[TokenSequence] = []
        self.decoders: dict[int, list[TokenSequence]] = {}
        self.arrivals = 0
        self.accepted = 0  # drafts of the last step
        self.expected: list[TokenSequence] = []

    @property
    def alive(self) -> list[TokenSequence]:
        scheduler = self.scheduler
        return scheduler.running + scheduler.waiting + list(scheduler.fetching)

    def submit(
        self,
        prompt: Sequence[int],
        max_new: int,
        *,
        layout: int = 0,
        salt: str = "",
        taste: int = 0,
        arrival: int | None = None,
    ) -> TokenSequence:
        """Queue a sequence; every arrival leaves a number free for a sibling that may
        come later.
        """
        if arrival is None:
            arrival = self.arrivals = self.arrivals + 2
        limit = min(len(prompt) + max_new - 1, MAX_TOKENS - 1)
        sequence = sequence_of(
            str(arrival), arrival, self.retentions[layout], salt, tuple(prompt), limit
        )
        self.tastes[sequence] = taste
        self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: TokenSequence) -> None:
        self.scheduler.remove(sequence)
        self.ended.append(sequence)

    def fail(self, sequence: TokenSequence) -> None:
        """Its state is not sound: nobody holds or finds any of it afterwards."""
        pages = self.scheduler.quarantine(sequence)
        self.ended.append(sequence)
        assert not self.manager.ledger.references[pages].any()
        assert self.manager.new_tokens(sequence.keys, sequence.known_tokens) == sequence.known
        assert plan_fetch(self.manager, sequence.keys, sequence.known_tokens) is None

    def step(self) -> Step | None:
        self._ask_for_drafts()
        before, preemptions = (
            list(self.scheduler.running),
            {entry: entry.preemptions for entry in self.alive},
        )
        starts = {entry: entry.cache.computed_tokens for entry in before if entry.cache is not None}
        if self.disk is not None and not self.scheduler.running and not self.scheduler.waiting:
            self.disk.reading.run()  # the scheduler waits for it
        step = self.scheduler.schedule()
        self._check_queues(before, preemptions)
        kept = sum(entry.preemptions == preemptions[entry] for entry in before)
        added, self.accepted = kept + self.accepted, 0
        if step is None:
            assert self.expected or not self.alive, "nothing runs though somebody waits"
            return self.step() if self._settle() else None
        by_slot = {
            entry.cache.slot: entry for entry in self.scheduler.computing if entry.cache is not None
        }
        self._check_step(step, by_slot, starts, added)
        self._check_work_conserved(step, by_slot)
        self._settle()
        # What has ended meanwhile writes into pages that nobody has yet.
        alive = replace(
            step, rows=tuple(row for row in step.rows if by_slot[row.slot] not in self.ended)
        )
        self.device.run(alive, {slot: self._foresee(one) for slot, one in by_slot.items()})
        if any(row.drafts for row in step.rows):
            self._verify(alive, by_slot)
            return step
        self.scheduler.commit(step)
        self.expected = [by_slot[row.slot] for row in alive.rows if row.sample]
        for sequence in self.expected:
            sequence.expect()
        if not self.ahead:
            self._settle()
        return step

    def _ask_for_drafts(self) -> None:
        """For the next step, or not: then it may be scheduled ahead."""
        self.scheduler.drafts = None
        if self.drafts is not None:
            self.drafts.offered.clear()
            if self.drafts.rng.random() < 0.8:
                self._settle()
                self.scheduler.drafts = self.drafts

    def _drafts_of(self, sequence: TokenSequence) -> list[int]:
        return [] if self.drafts is None else self.drafts.offered.get(sequence, [])

    def _foresee(self, sequence: TokenSequence) -> TokenSequence:
        """`sequence` as it would be with all of its drafts."""
        drafts = self._drafts_of(sequence)
        tokens = np.concatenate([sequence.known_tokens, np.asarray(drafts, np.int64)])
        return replace(sequence, tokens=tokens, known=len(tokens))

    def _verify(self, step: Step, by_slot: dict[int, TokenSequence]) -> None:
        """The model accepts what equals its own tokens, and adds one."""
        sampled = [by_slot[row.slot] for row in step.rows if row.sample]
        taken = dict[TokenSequence, int]()
        for sequence in sampled:
            drafts, tokens = self._drafts_of(sequence), sequence.known_tokens.tolist()
            taken[sequence] = self._count_right(self.tastes[sequence], tokens, drafts)
            self.accepted += taken[sequence]
            self.scheduler.settle(sequence, drafts, taken[sequence])
        self.scheduler.commit(step)
        for sequence, accepted in taken.items():
            for _ in range(accepted + 1):
                if sequence not in self.ended:
                    sequence.expect()
                    self._sample(sequence)
        self._check_published(by_slot)

    def _count_right(self, taste: int, tokens: list[int], drafts: list[int]) -> int:
        right = 0
        while right < len(drafts) and drafts[right] == next_token(taste, tokens + drafts[:right]):
            right += 1
        assert self.drafts is not None
        self.drafts.accepted += right
        self.drafts.refused += len(drafts) - right
        return right

    def _check_published(self, by_slot: dict[int, TokenSequence]) -> None:
        """What others may find of a tail are entries of settled tokens."""
        for sequence in by_slot.values():
            cache = sequence.cache
            if cache is not None:
                end = len(cache.raw_nodes) * cache.layout.page_tokens
                done = cache.sealed_chunks * cache.layout.chunk_tokens + end
                self.device.check_raw(sequence, done)

    def _settle(self) -> bool:
        """The tokens of the last step arrive; False if there are none."""
        expected, self.expected = self.expected, []
        for sequence in expected:
            if sequence not in self.ended:
                self._sample(sequence)
        return bool(expected)

    def drain(self) -> None:
        """Everybody ends, and not too late: the first that runs moves on in every step."""
        # Twice: one that is due earlier and comes late may cost the first so far its place.
        # And once more where prompts let decode rows wait.
        steps = (4 if self.apart else 2) * sum(
            entry.limit + 2 * (entry.limit // self.manager.chunk_tokens) + 3 for entry in self.alive
        )
        for _ in range(steps):
            if self.step() is None:
                return
        assert not self.alive, "sequences go on for ever"

    def _sample(self, sequence: TokenSequence) -> None:
        taste = self.tastes[sequence]
        token = next_token(taste, sequence.known_tokens.tolist()[:-1])
        sequence.extend([token])
        if sequence.complete or (taste == 2 and token == 2):
            self.scheduler.remove(sequence)
            self.ended.append(sequence)

    def check_excess(self) -> None:
        """Who waits for a first turn is counted as the queue has it."""
        scheduler = self.scheduler
        fresh = sum(entry.cached_tokens is None for entry in scheduler.waiting)
        fresh += len(scheduler.fetching)
        free = self.limits.max_num_seqs - len(scheduler.running)
        assert scheduler.excess(2) == fresh + 2 - free

    def _check_queues(
        self, before: list[TokenSequence], preemptions: dict[TokenSequence, int]
    ) -> None:
        self.check_excess()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert sorted(entry.arrival_index for entry in self.alive) == sorted(
            entry.arrival_index for entry in preemptions
        )
        preempted = [entry for entry in before if entry.preemptions > preemptions[entry]]
        kept = [entry for entry in before if entry not in preempted]
        assert kept or not before, "the first was preempted"
        assert all(first.rank < last.rank for first in kept for last in preempted), (
            "not the last was preempted"
        )
        admitted = [entry for entry in running if entry not in kept]
        assert all(first.rank < later.rank for first in admitted for later in waiting), (
            "overtaken at admission"
        )
        assert len(running) <= self.limits.max_num_seqs

    def _check_step(
        self,
        step: Step,
        by_slot: dict[int, TokenSequence],
        starts: dict[TokenSequence, int],
        added: int,
    ) -> None:
        assert sum(len(row.tokens) for row in step.rows) <= self.limits.max_num_batched_tokens
        self._check_several(step, by_slot)
        assert all(
            (row.kind is RowKind.DECODE) == (at < step.decode_rows)
            for at, row in enumerate(step.rows)
        )
        served = [by_slot[row.slot] for row in step.rows]
        self._check_time_for_prompts(step, served[step.decode_rows :])
        waiting = self._check_postponed(step, served, starts)
        bound = -(-added // self.manager.chunk_tokens)
        most = bound if step.decode_rows or waiting else len(starts)
        sealed, held = self._check_filled(step, by_slot, starts, most)
        # Whoever was the first before goes on, unless newcomers who are due earlier take the step,
        # or chunks that decode has filled.
        working = next((entry for entry in starts if entry.cache and not entry.complete), served[0])
        passing = [
            entry
            for entry in served[step.decode_rows :]
            if entry not in starts and entry.rank < working.rank
        ]
        assert working in served or passing or sealed or working in waiting, (
            "the first stands still"
        )
        self._check_rows(step, by_slot, starts)
        skipped = [
            entry
            for entry in starts
            if entry.cache and not entry.complete
            if entry not in served and entry not in waiting and entry not in held
        ]
        prefilled = [entry for entry in served[step.decode_rows :] if entry not in sealed]
        assert all(one.rank < other.rank for one in prefilled for other in skipped), (
            "overtaken within a step"
        )
        decoders = served[: step.decode_rows]
        assert self.decoders.setdefault(step.epoch, decoders) == decoders, (
            "one epoch, two sets of decoding rows"
        )

    def _check_rows(
        self, step: Step, by_slot: dict[int, TokenSequence], starts: dict[TokenSequence, int]
    ) -> None:
        """Each row is of its sequence's tokens, within one chunk, and samples behind the last."""
        size = self.manager.chunk_tokens
        for row in step.rows:
            sequence, known = by_slot[row.slot], len(row.tokens) - row.drafts
            end = row.start + known
            assert row.request_id == sequence.request_id and row.retention is sequence.retention
            if row.drafts:
                self._check_drafts(row, sequence)
            assert row.tokens[:known].tolist() == sequence.tokens[row.start : end].tolist()
            preceding = sequence.tokens[max(0, row.start - PRECEDING_TOKENS) : row.start].tolist()
            assert row.preceding.tolist() == ([] if row.kind is RowKind.DECODE else preceding)
            assert row.start // size == (end - 1) // size, "a row leaves its chunk"
            if row.kind is RowKind.SEAL:
                assert row.start % size == 0 and len(row.tokens) == size
            assert row.kind is not RowKind.DECODE or (known == 1 and row.sample)
            # A chunk that decode filled is computed once more to be sealed, perhaps when its
            # sequence has ended; its last token has given its sample.
            again = starts.get(sequence) == end and sequence.preemptions == 0
            resealed = row.kind is RowKind.SEAL and (
                again or sequence not in self.scheduler.running
            )
            assert row.sample == (end == sequence.known and not resealed)
            assert row.drafts or row.pending == (sequence.pending and end == sequence.known)
            assert row.kind is RowKind.DECODE or not row.pending

    def _check_filled(
        self,
        step: Step,
        by_slot: dict[int, TokenSequence],
        starts: dict[TokenSequence, int],
        most: int,
    ) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """Of the sequences with a chunk that decode has filled, those of the step and those held.

        They come before prompts. While others decode, a step takes `most` such chunks, as many as
        the batch fills in a step on average with the drafts that were accepted last, so that a row
        that decodes never waits for those of all others, and never more chunks wait.
        """
        size = self.manager.chunk_tokens
        ends = [(by_slot[row.slot], row.start + len(row.tokens)) for row in step.rows]
        taken = [
            one
            for row, (one, end) in zip(step.rows, ends, strict=True)
            if row.kind is RowKind.SEAL and starts.get(one) == end
        ]
        held = [
            one
            for one, start in starts.items()
            if one.cache and one.cache.raw_tokens == size and one.cache.computed_tokens == start
            if not one.complete and one not in taken
        ]
        assert len(taken) <= most, "too many chunks let rows that decode wait"
        assert all(one.rank < other.rank for one in taken for other in held)
        left = self.limits.max_num_batched_tokens - step.decode_rows - size * len(taken)
        assert not held or len(taken) == most or left < size, "a chunk waits for nothing"
        return taken, held

    def _check_postponed(
        self, step: Step, served: Sequence[TokenSequence], starts: dict[TokenSequence, int]
    ) -> list[TokenSequence]:
        """The decoding sequences that let prompts pass: all of them, and never twice in a row."""
        size = self.manager.chunk_tokens
        decoding = [
            entry
            for entry, start in starts.items()
            if entry.cache and not entry.complete and entry.known - start == 1
            if entry.cache.raw_tokens < size and entry not in served
        ]
        ends_prompt = any(row.sample for row in step.rows) and not step.decode_rows
        postponed = bool(decoding) and ends_prompt and self.scheduler.passes_apart(step.rows)
        assert not (postponed and self.postponed), "a sequence waits for two steps of prompts"
        self.postponed = postponed
        return decoding if postponed else []

    def _check_drafts(self, row: Row, sequence: TokenSequence) -> None:
        """A row with drafts: of its sequence, in its chunk, of tokens that may be needed."""
        assert self.drafts is not None
        drafts, size = self._drafts_of(sequence), self.manager.chunk_tokens
        last = row.start + row.drafts
        assert row.kind is RowKind.DECODE and row.sample and row.start == sequence.known - 1
        assert row.start // size == last // size, "a draft leaves the chunk"
        assert last < sequence.limit, "a draft is beyond the limit"
        known = [0] * len(drafts) if self.drafts.on_device else drafts
        assert row.tokens[1:].tolist() == known and row.pending == self.drafts.on_device

    def _check_time_for_prompts(self, step: Step, prefilled: list[TokenSequence]) -> None:
        """A step that computes a prompt has no drafts."""
        drafted = any(row.drafts for row in step.rows)
        prompts = any(not sequence.read_tokens for sequence in prefilled)
        assert not drafted or not prompts, "drafts beside a prompt"

    def _check_several(self, step: Step, by_slot: dict[int, TokenSequence]) -> None:
        """Rows of one sequence follow on each other: chunks, then perhaps a tail."""
        last = dict[int, Row]()
        for row in step.rows:
            before = last.get(row.slot)
            if before is not None:
                assert before.kind is RowKind.SEAL and row.start == before.start + len(
                    before.tokens
                )
                assert row.kind is not RowKind.DECODE
                assert not row.retention.one_chunk_a_step
            last[row.slot] = row

    def _check_work_conserved(self, step: Step, by_slot: dict[int, TokenSequence]) -> None:
        """Whoever waits at the head waits for a reason: a seat, tokens, copies, pages, or a chunk
        it will find.
        """
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if not waiting or len(running) == self.limits.max_num_seqs:
            return
        if any(isinstance(move, PageMove) and move.inward for move in step.moves):
            return
        head = waiting[0]
        if any(
            self._lacks_space(step, row, by_slot[row.slot])
            for row in {row.slot: row for row in step.rows}.values()
        ):
            return
        if len({row.slot for row in step.rows}) == len(
            [entry for entry in running if not entry.complete]
        ):
            # States that the step loads had their pages until it was scheduled.
            loaded = sum(len(load.pages) for load in step.loads if load.pages is not None)
            full = (
                head.retention.layout.count_promised_pages(head.known, head.limit)
                > self.manager.spare_pages - loaded
            )
            assert (
                full
                or head.pending
                or any(self._begins_like(head, row, by_slot[row.slot]) for row in step.rows)
            )

    def _lacks_space(self, step: Step, last: Row, sequence: TokenSequence) -> bool:
        """Whether there was no space in `step` for what follows on the `last` row of a sequence."""
        left = self.limits.max_num_batched_tokens - sum(len(row.tokens) for row in step.rows)
        rest = sequence.known - last.start - len(last.tokens)
        return (
            last.kind is RowKind.SEAL and rest > 1 and min(rest, self.manager.chunk_tokens) > left
        )

    def _begins_like(self, head: TokenSequence, row: Row, other: TokenSequence) -> bool:
        """Whether `row` seals a chunk of `other` that `head` has too."""
        end = row.start + len(row.tokens)
        return (
            row.kind is RowKind.SEAL
            and self.manager.prefix_caching
            and (head.retention, head.keys.salt) == (other.retention, other.keys.salt)
            and head.known_tokens[:end].tolist() == other.known_tokens[:end].tolist()
        )
