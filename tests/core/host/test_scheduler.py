"""Whatever is asked for in whatever order: every sequence ends, in its turn, and no page is lost on
the way.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram.cache.keys import ChunkKeys
from tangram.cache.manager import CacheManager
from tangram.cache.step import Row
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.errors import IntegrityError
from tests.core.host.device_double import (
    geometry,
    kept_first,
    layout,
    layout_sets,
    recount,
    retentions,
)
from tests.core.host.disk_double import DictStore, DiskDouble
from tests.core.host.scheduled_device import MAX_TOKENS, ScheduledDevice
from tests.examples import examples

PROMPTS = st.tuples(
    st.sampled_from([0, 1]), st.integers(0, 30), st.lists(st.integers(0, 2), max_size=6)
)


def prompt_of(stem: int, length: int, rest: list[int]) -> list[int]:
    """A prompt whose start it shares with others: `length` tokens of stem 0 or 1, then its own."""
    return [(at * (stem + 2)) % 5 for at in range(length)] + (rest or [1])


class Traffic(RuleBasedStateMachine):
    """Requests, turns that follow, forks, aborts and cleared caches, over a pool hardly larger than
    one sequence.
    """

    on_disk = False

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.store = DictStore(data.draw(st.sampled_from([3, 1000]))) if self.on_disk else None
        self.start = partial(
            ScheduledDevice,
            data.draw(layout_sets(max_tokens=MAX_TOKENS)),
            slack_pages=data.draw(st.integers(0, 40)),
            max_num_seqs=data.draw(st.integers(1, 4)),
            slack_tokens=data.draw(st.integers(0, 20)),
            caching=data.draw(st.sampled_from([True, True, True, False])),
            one_chunk_a_step=data.draw(st.sampled_from([frozenset(), frozenset(), frozenset([0])])),
            ahead=data.draw(st.booleans()),
            host_pages=data.draw(st.sampled_from([30, 1000] if self.on_disk else [0, 5, 30, 1000])),
            patience=data.draw(st.sampled_from([0, 1, 16])),
            apart=data.draw(st.sampled_from([0, 1, 4])),
            state_pages=0 if self.on_disk else data.draw(st.sampled_from([0, 0, 1, 4])),
        )
        self.service = self.start(disk=DiskDouble(self.store) if self.store else None)
        self.start = partial(self.start, kept=self.service.retentions)

    def number(self, sequence: TokenSequence) -> int:
        return self.service.retentions.index(sequence.retention)

    @rule(
        prompt=PROMPTS,
        max_new=st.integers(1, 16),
        layout=st.integers(0, 1),
        salt=st.sampled_from(["", "", "s"]),
        taste=st.integers(0, 1),
    )
    def submit(
        self, prompt: tuple[int, int, list[int]], max_new: int, layout: int, salt: str, taste: int
    ) -> None:
        self.service.submit(prompt_of(*prompt), max_new, layout=layout, salt=salt, taste=taste)

    @precondition(lambda self: self.service.ended)
    @rule(
        which=st.integers(0, 99),
        more=st.lists(st.integers(0, 2), max_size=5),
        max_new=st.integers(1, 16),
    )
    def follow(self, which: int, more: list[int], max_new: int) -> None:
        last = self.service.ended[which % len(self.service.ended)]
        prompt = [*last.known_tokens.tolist(), *more][: MAX_TOKENS - 2]
        self.service.submit(prompt, max_new, layout=self.number(last), salt=last.keys.salt)

    @precondition(lambda self: self.service.scheduler.running)
    @rule(which=st.integers(0, 99), taste=st.integers(0, 2), max_new=st.integers(1, 16))
    def fork(self, which: int, taste: int, max_new: int) -> None:
        running = self.service.scheduler.running
        one = running[which % len(running)]
        prompt = one.known_tokens[: MAX_TOKENS - 2].tolist()
        self.service.submit(
            prompt, max_new, layout=self.number(one), salt=one.keys.salt, taste=taste
        )

    @precondition(lambda self: self.service.scheduler.running)
    @rule(which=st.integers(0, 99), taste=st.integers(0, 2), max_new=st.integers(1, 16))
    def sibling(self, which: int, taste: int, max_new: int) -> None:
        """Another sample of a running request, which arrived with it and was held back."""
        running = self.service.scheduler.running
        one = running[which % len(running)]
        if (
            one.arrival_index + 1 not in {entry.arrival_index for entry in self.service.alive}
            and one.arrival_index % 2 == 0
        ):
            self.service.submit(
                one.tokens[: one.prompt_tokens].tolist(),
                max_new,
                layout=self.number(one),
                salt=one.keys.salt,
                taste=taste,
                arrival=one.arrival_index + 1,
            )

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.service.step()
            recount(self.service.manager)

    @precondition(lambda self: self.service.alive)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.service.abort(self.service.alive[which % len(self.service.alive)])

    @precondition(lambda self: self.service.alive)
    @rule(which=st.integers(0, 99))
    def fail(self, which: int) -> None:
        self.service.fail(self.service.alive[which % len(self.service.alive)])

    @rule()
    def clear(self) -> None:
        self.service.manager.prefix.clear()
        assert self.service.manager.host.used == 0

    @invariant()
    def books_add_up(self) -> None:
        recount(self.service.manager)
        self.service.check_excess()

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        self.service.drain()
        while self.service.step() is not None:  # chunks that were left open
            recount(self.service.manager)
        self.service.manager.prefix.clear()
        recount(self.service.manager)
        assert self.service.manager.ledger.free == self.service.manager.ledger.total


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=examples(200),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Restarts(Traffic):
    """The same over a disk that works beside the steps, and a process that is killed at times."""

    on_disk = True

    @rule(reads=st.integers(0, 2), writes=st.integers(0, 9), damaged=st.none() | st.integers(0, 99))
    def read_and_write(self, reads: int, writes: int, damaged: int | None) -> None:
        assert self.service.disk is not None and self.store is not None
        self.service.disk.reading.run(reads)
        self.service.disk.writing.run(writes)
        if damaged is not None:
            self.store.lose(damaged)

    @precondition(lambda self: self.service.scheduler.fetching)
    @rule()
    def lose_patience(self) -> None:
        for fetch in self.service.scheduler.fetching.values():
            fetch.deadline_s = 0.0

    @invariant()
    def reads_add_up(self) -> None:
        """What is being read is what somebody waits for, once."""
        if (disk := self.service.disk) is not None:
            wanted = Counter(
                read
                for fetch in self.service.scheduler.fetching.values()
                for read in fetch.reads.values()
            )
            assert all(read.users == users for read, users in wanted.items())
            assert disk.reading_pages == sum(read.pages for read in wanted)

    @rule(written=st.sampled_from([3, 1000]), busy=st.booleans())
    def restart(self, written: int, busy: bool) -> None:
        """What is not on disk is gone, what is there is found again."""
        assert self.service.disk is not None and self.store is not None
        if not busy:
            self.service.drain()
        self.service.disk.writing.run(written)
        known = self.service.ended + self.service.alive
        self.service = self.start(disk=DiskDouble(self.store))
        self.service.ended = known


TestRestarts = Restarts.TestCase
TestRestarts.settings = TestTraffic.settings


def crowd(seed: int, **options: object) -> ScheduledDevice:
    """A service with compressed, whole and sliding-window groups after a random day of traffic."""
    model = geometry(3, 2, (None, 11, None))
    layouts = [layout(2, model=model), layout(4, model=model)]
    service, rng = (
        ScheduledDevice(layouts, **({"slack_pages": 12, "max_num_seqs": 4} | options)),
        random.Random(seed),
    )  # type: ignore[arg-type]
    for _ in range(25):
        prompt = prompt_of(rng.randrange(2), rng.randrange(30), [rng.randrange(3)])
        service.submit(
            prompt, rng.randrange(1, 16), layout=rng.randrange(2), taste=rng.randrange(2)
        )
        for _ in range(rng.randrange(6)):
            service.step()
    service.drain()
    return service


def test_a_small_pool_under_load_preempts_evicts_and_hits() -> None:
    services = [crowd(seed) for seed in range(6)]
    assert all(len(service.ended) == 25 for service in services)
    counters = [service.scheduler.counters for service in services]
    assert sum(entry.preemptions for entry in counters) > 5
    assert sum(entry.cached_tokens for entry in counters) > 100
    assert sum(entry.sealed_chunks for entry in counters) > 100


def test_host_memory_keeps_what_a_small_pool_evicts() -> None:
    services = [
        (crowd(seed), crowd(seed, host_pages=60), crowd(seed, host_pages=1000)) for seed in range(6)
    ]
    without, some, much = zip(*services, strict=True)
    cached = [
        sum(each.scheduler.counters.cached_tokens for each in tried)
        for tried in (without, some, much)
    ]
    assert cached[0] < cached[1] < cached[2]
    assert sum(each.manager.host.restored_tokens for each in some) > 100
    assert sum(each.manager.host.dropped for each in some) > 100
    assert all(each.manager.host.dropped == 0 for each in much)


def test_who_waits_for_host_memory_lets_the_others_run() -> None:
    service = ScheduledDevice(
        [layout(2)], slack_pages=8, max_num_seqs=2, host_pages=1000, slack_tokens=100
    )
    for start in (1, 2, 3, 4):  # the first is evicted by the last
        service.submit([start] * 24, 1)
        service.drain()
    assert service.manager.host.pages_out > 0
    service.submit([9] * 3, 9)
    service.step()
    late = service.submit([1] * 24, 1)
    beside, joined = service.step(), service.step()
    assert beside is not None and joined is not None and late.cache is None
    assert (
        any(move.inward for move in beside.moves) and not beside.awaited and len(beside.rows) == 1
    )
    assert not any(move.inward for move in joined.moves) and [row.start for row in joined.rows] == [
        4,
        16,
    ]
    service.drain()
    alone = service.submit([2] * 24, 1)
    step = service.step()
    assert step is not None and step.awaited and step.rows[0].request_id == alone.request_id


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_seats_pages_or_the_cache(seed: int) -> None:
    def answers(**options: object) -> dict[str, list[int]]:
        return {
            entry.request_id: entry.known_tokens.tolist() for entry in crowd(seed, **options).ended
        }

    expected = answers(slack_pages=2000, max_num_seqs=25, slack_tokens=1000, caching=False)
    assert answers() == expected
    assert answers(slack_pages=0, max_num_seqs=2) == expected
    assert answers(ahead=True, slack_pages=0, max_num_seqs=2) == expected
    assert answers(host_pages=60) == answers(host_pages=2000) == expected


def test_generated_tokens_are_sealed_when_they_fill_their_chunk() -> None:
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=1)
    service.submit([1] * 6, 12)
    rows: list[Row] = []
    while (step := service.step()) is not None:
        rows += step.rows
    kinds = [(row.kind.value, row.start, len(row.tokens), row.sample) for row in rows]
    decode = [("decode", at, 1, True) for at in range(6, 17)]
    seal = [("seal", 0, 8, False)]
    assert kinds == [
        ("tail", 0, 6, True),
        *decode[:2],
        *seal,
        *decode[2:10],
        ("seal", 8, 8, False),
        *decode[10:],
    ]


def test_where_sealing_moves_nothing_a_sequence_goes_on_behind_a_chunk_it_filled() -> None:
    """The chunk is sealed when nothing else is to be computed, and only then found by others."""
    service = ScheduledDevice([layout(4)], slack_pages=1000, max_num_seqs=2)
    first = service.submit([1] * 6, 12)
    kinds = []
    while not first.complete:
        step = service.step()
        assert step is not None
        kinds += [row.kind.value for row in step.rows]
        recount(service.manager)
    assert kinds == ["tail", *["decode"] * 11]
    assert service.manager.new_tokens(first.keys, first.known_tokens) == 18
    second = service.submit([2] * 3, 2)
    rows: list[Row] = []
    while (step := service.step()) is not None:
        recount(service.manager)
        rows += step.rows
    kinds = [row.kind.value for row in rows]
    assert kinds == ["tail", "decode", "seal", "seal"] and second.complete
    assert [(row.start, row.sample) for row in rows[2:]] == [(0, False), (8, False)]
    assert service.manager.new_tokens(first.keys, first.known_tokens) == 2


def test_where_drafts_read_a_part_few_chunks_stay_open() -> None:
    """The second one that decode fills is one too many: then both are computed again."""
    kept = [kept_first(layout(2), "only")]
    service = ScheduledDevice([layout(4)], slack_pages=1000, max_num_seqs=2, kept=kept)
    sequence = service.submit([1] * 6, 22)
    rows: list[Row] = []
    while not sequence.complete:
        step = service.step()
        assert step is not None
        rows += step.rows
        recount(service.manager)
    kinds = [row.kind.value for row in rows]
    assert kinds == ["tail", *["decode"] * 10, "seal", "seal", *["decode"] * 11]
    assert [(row.start, row.sample) for row in rows[11:13]] == [(0, False), (8, False)]
    assert service.manager.new_tokens(sequence.keys, sequence.known_tokens) == 28 - 16
    while service.step() is not None:
        recount(service.manager)
    assert service.manager.new_tokens(sequence.keys, sequence.known_tokens) == 28 - 24


def test_more_chunks_stay_open_behind_more_sealed_ones() -> None:
    (retention,) = [kept_first(layout(2), "only")]
    cache = CacheManager([retention], total_pages=200, max_sequences=1, prefix_caching=False)
    seq = cache.admit(ChunkKeys(retention, ""), np.zeros(17 * 5, np.int64), 96)
    assert seq is not None

    def fill_chunk() -> bool:
        cache.grow(seq, 8)
        return cache.can_leave_open(seq)

    for _ in range(8):
        cache.seal(seq)
    for _ in range(2):
        assert fill_chunk()
        cache.leave_open(seq)
    assert not fill_chunk()
    cache.drop_open(seq)
    assert (seq.sealed_chunks, seq.computed_tokens, seq.held_pages) == (8, 64, 8 * 8)


@pytest.mark.parametrize("seats", [1, 2])
def test_every_chunk_that_was_left_open_is_sealed(seats: int) -> None:
    """Also where answers end together, their last tokens still on the device."""
    service = ScheduledDevice([layout(4)], slack_pages=1000, max_num_seqs=seats, ahead=True)
    ended = [service.submit([number] * 3, 20) for number in range(1, 2 * seats + 1)]
    while service.step() is not None:
        recount(service.manager)
    for sequence in ended:
        assert sequence.known == 23
        assert service.manager.new_tokens(sequence.keys, sequence.known_tokens) == 7


def test_chunks_that_are_rounded_when_they_are_sealed_do_not_stay_open() -> None:
    (retention,) = retentions(layout(4))
    manager = CacheManager(
        [retention], total_pages=100, max_sequences=1, prefix_caching=True, rounds_chunks=True
    )
    seq = manager.admit(ChunkKeys(retention, ""), np.zeros(1, np.int64), 20)
    assert seq is not None
    manager.grow(seq, 8)
    assert not manager.can_leave_open(seq)
    with pytest.raises(IntegrityError, match="no chunk that can stay open"):
        manager.leave_open(seq)
    manager.rounds_chunks = False
    manager.leave_open(seq)
    with pytest.raises(IntegrityError, match="behind an open one"):
        manager.seal(seq)


def test_what_comes_while_an_open_chunk_is_sealed_goes_first() -> None:
    service = ScheduledDevice([layout(4)], slack_pages=0, max_num_seqs=2)
    service.submit([1] * 6, 20)
    while service.alive:
        service.step()
    step = service.step()
    assert step is not None and [row.start for row in step.rows] == [0]
    service.submit([2] * 8, 70)  # it needs the pages that the sealed chunk's sequence holds
    kinds = []
    while service.alive:
        step = service.step()
        assert step is not None
        kinds.append([row.kind.value for row in step.rows])
        recount(service.manager)
    assert kinds[:2] == [["seal"], ["decode"]]
    service.scheduler.open_chunks.forget()
    assert service.step() is None
    assert not service.manager.sequences


def test_a_prompt_that_has_a_pass_of_its_own_does_not_wait_for_decode_rows() -> None:
    """Nor do these wait for more than one such step."""
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=4, apart=1)
    first = service.submit([1] * 3, 30)
    service.step()
    kinds = []
    for token in (2, 3, 4):
        service.submit([token] * 3, 30)
        step = service.step()
        assert step is not None
        kinds.append([row.kind.value for row in step.rows])
    assert kinds == [["tail"], ["decode", "decode", "tail"], ["tail"]]
    step = service.step()
    assert step is not None and [row.kind.value for row in step.rows] == ["decode"] * 4
    assert first.known == 6


def test_a_chunk_that_decode_filled_lets_no_decode_row_wait() -> None:
    """It is computed again for those who come later: nobody waits for a token of it."""
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=2, apart=1)
    service.submit([1] * 6, 12)
    service.submit([2] * 3, 12)
    kinds = []
    while (step := service.step()) is not None:
        kinds.append([row.kind.value for row in step.rows])
    assert ["decode", "seal"] in kinds and ["seal"] not in kinds[:-1]


def test_of_chunks_that_decode_fills_at_once_a_step_takes_one_while_others_decode() -> None:
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=4, slack_tokens=40)
    service.submit([1] * 3, 12)
    for token in (2, 3, 4):
        service.submit([token] * 6, 12)
    steps = []
    while (step := service.step()) is not None:
        kinds = [row.kind.value for row in step.rows]
        if "seal" in kinds:
            steps.append((kinds.count("decode"), [row.slot for row in step.rows][-1], kinds[-2:]))
    filled = [seal for seal in steps if seal[0]]
    assert [(decode, slot) for decode, slot, _ in filled[:3]] == [(1, 1), (2, 2), (3, 3)]
    assert all(kinds == ["decode", "seal"] for _, _, kinds in filled)


def test_chunks_that_decode_fills_are_sealed_together_where_nobody_waits() -> None:
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=3, slack_tokens=40)
    for token in (2, 3, 4):
        service.submit([token] * 6, 12)
    kinds = []
    while (step := service.step()) is not None:
        kinds.append([row.kind.value for row in step.rows])
    assert kinds.count(["seal"] * 3) == 2 and kinds.count(["tail"] * 3) == 1


def test_chunks_of_one_token_are_promised_one_by_one() -> None:
    service = ScheduledDevice([layout(1, chunk=1, page=1)], slack_pages=0, max_num_seqs=2)
    for token in (1, 2):
        service.submit([token], 40)
    while service.alive:
        service.step()
        recount(service.manager)
    assert [entry.known for entry in service.ended] == [41, 41]


def test_preemption_keeps_what_was_sampled_and_goes_to_the_head_of_the_queue() -> None:
    model = layout(4)
    service = ScheduledDevice([model], slack_pages=0, max_num_seqs=2, patience=0)
    first, second = service.submit([1] * 8, 39), service.submit([2] * 8, 39)
    third = service.submit([0], 1)
    while not second.preemptions:
        known = second.known
        service.step()
    assert second.known >= known and second.cache is None and first.cache is not None
    assert service.scheduler.waiting == [second, third]
    service.drain()
    assert service.ended == [first, third, second]
    assert first.preemptions == 0


def test_the_scheduler_needs_no_torch() -> None:
    code = (
        "import sys, tangram.engine.schedule.scheduler; sys.exit('torch' in sys.modules or "
        "'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
