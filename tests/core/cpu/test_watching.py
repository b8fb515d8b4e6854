"""What observers of an engine are told: every step, and sequences from their queue to their end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from transformers import PretrainedConfig

from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tangram.watch import (
    ChunkPlace,
    ChunkStored,
    LinkDropped,
    News,
    PageState,
    PoolReading,
    Readings,
    SequenceChange,
    SequenceState,
    StepDone,
)
from tests.core.cpu.test_purity import TINY, C, LonePrompts
from tests.small_engines import drain, run, small_engine

WAITING, RUNNING = SequenceState.WAITING, SequenceState.RUNNING
FIRST, ENDED = SequenceState.FIRST_TOKEN, SequenceState.ENDED
ANSWER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [tuple(3 + (i * k) % 9 for i in range(60 + k)) for k in range(1, 6)]


class Diary:
    """All that an engine tells, with the pool at each time."""

    def __init__(self, engine: Engine) -> None:
        self.news: list[News] = []
        self.pools: list[PoolReading] = []
        self.watched = engine.watch(self)

    def observe(self, news: News, readings: Readings) -> None:
        self.news.append(news)
        self.pools.append(readings.pool())

    @property
    def steps(self) -> list[StepDone]:
        return [news.step for news in self.news if news.step is not None]

    @property
    def changes(self) -> dict[tuple[str, int], list[SequenceChange]]:
        found = defaultdict[tuple[str, int], list[SequenceChange]](list)
        for news in self.news:
            for change in news.changes:
                found[change.reading.request_id, change.reading.index].append(change)
        return found


@pytest.fixture(scope="module")
def world(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> LonePrompts:
    return LonePrompts(adopt_tiny(TINY), tmp_path_factory.mktemp("profiles"), "keydiff")


def states(changes: list[SequenceChange]) -> list[SequenceState]:
    return [change.state for change in changes]


def test_a_crowd_is_told_of_as_it_is_counted(world: LonePrompts) -> None:
    """A pool that is too small for all: some are preempted, and wait and run again."""
    layout = world.engine().admission.retentions[0].layout
    pages = layout.most_pages(110) + layout.most_pages(100) // 2
    engine = world.engine(kv_cache_gib=pages * layout.page_bytes(4) / 2**30, max_model_len=110)
    diary, events = Diary(engine), dict[str, list[Event]]()
    for number, prompt in enumerate(PROMPTS):
        events[str(number)] = []
        engine.submit(Request(str(number), prompt, ANSWER, events[str(number)].append))
    drain(engine)
    engine.step()
    stats, steps = engine.stats(), diary.steps
    assert stats.preemptions > 0
    assert [step.number for step in steps] == list(range(1, stats.steps + 1))
    assert sum(step.chunks for step in steps) == stats.sealed_chunks
    computed = sum(step.decode_tokens + step.tail_tokens + step.chunks * C for step in steps)
    assert computed == engine._scheduler.counters.computed_tokens
    assert all(step.seconds > 0 for step in steps)
    assert diary.news[-1].idle and diary.news[-1].step is None
    found, again = diary.changes, 0
    for name, own in events.items():
        course = states(found[name, 0])
        assert (course[0], course[1], course[-1]) == (WAITING, RUNNING, ENDED)
        assert course.count(FIRST) == 1
        waits = course.count(WAITING)
        assert waits == course.count(RUNNING)
        again += waits - 1
        last = found[name, 0][-1].reading
        assert last.usage == own[-1].usage, "what is shown is what the client was told"
        answer = [token for event in own for token in event.token_ids]
        assert last.tokens.tolist() == [*PROMPTS[int(name)], *answer]
        assert len(last.chunk_keys) == last.sealed_chunks
    assert again == stats.preemptions


def test_every_map_of_pages_equals_the_books(world: LonePrompts) -> None:
    engine = world.engine(max_num_seqs=3)
    diary = Diary(engine)
    run(engine, PROMPTS, ANSWER)
    shared = 0
    for pool in diary.pools:
        held = [pool.states == state for state in (PageState.RAW, PageState.SEALED)]
        shared = max(shared, int((pool.states == PageState.SHARED).sum()))
        assert ((pool.holders >= 0) == (held[0] | held[1] | (pool.states == 4))).all()
        assert len(pool.sequences) <= 3
    engine.step()
    stats, last = engine.stats(), diary.pools[-1]
    assert (last.states == PageState.CACHED).sum() == stats.pages_cached
    assert (last.states == PageState.FREE).sum() == stats.pages_free
    assert last.promised == 0 and (last.holders == -1).all()


def test_whoever_follows_the_links_knows_which_chunks_are_cached(world: LonePrompts) -> None:
    """Over a pool that is too small, with host memory behind it, and after all is forgotten."""
    layout = world.engine().admission.retentions[0].layout
    pages = layout.most_pages(110) + layout.most_pages(100) // 2
    engine = world.engine(
        kv_cache_gib=pages * layout.page_bytes(4) / 2**30, max_model_len=110, kv_offload_gib=0.001
    )
    diary = Diary(engine)
    run(engine, [*PROMPTS, *PROMPTS[:2]], ANSWER)

    def follow() -> dict[ChunkPlace, set[bytes]]:
        there = {place: set[bytes]() for place in (ChunkPlace.DEVICE, ChunkPlace.HOST)}
        for link in [link for news in diary.news for link in news.links]:
            if isinstance(link, LinkDropped):
                there[link.place].remove(link.key)
            elif isinstance(link, ChunkStored):
                assert link.kv_retention == world.engine().config.kv_retention
                assert len(link.tokens) == C
                there[ChunkPlace.DEVICE].add(link.key)
            else:
                there[ChunkPlace.HOST].add(link.key)
        return there

    there = follow()
    assert all(there.values())
    for place, keys in there.items():
        others = there[ChunkPlace.DEVICE] if place is ChunkPlace.HOST else set[bytes]()
        found = [use.place for use in diary.watched.uses(sorted(keys - others))]
        assert set(found) == {place}
    engine.clear_cache()
    engine.step()
    assert not any(follow().values())


def test_an_answer_of_one_token_lives_a_whole_life(world: LonePrompts) -> None:
    engine = world.engine()
    diary = Diary(engine)
    run(engine, [PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=1))
    assert states(diary.changes["0", 0]) == [WAITING, RUNNING, FIRST, ENDED]
    assert len(diary.changes["0", 0][-1].reading.tokens) == len(PROMPTS[0]) + 1


def test_a_sequence_is_told_of_before_its_first_step_runs(world: LonePrompts) -> None:
    engine = world.engine()
    diary = Diary(engine)
    told_first: list[bool] = []
    compute = engine._runner.run

    def watch_and_run(*args: object, **options: object) -> object:
        told_first.append(RUNNING in states(diary.changes["0", 0]))
        return compute(*args, **options)

    engine._runner.run = watch_and_run
    run(engine, [PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=2))
    assert told_first[0]


def test_completions_of_a_request_and_aborted_ones(world: LonePrompts) -> None:
    engine = world.engine()
    diary, events = Diary(engine), list[Event]()
    several = SamplingParams(temperature=1.0, max_tokens=30, n=3, seed=1, ignore_eos=True)
    engine.submit(Request("many", PROMPTS[0], several, events.append))
    for _ in range(5):
        engine.step()
    engine.abort("many")
    drain(engine)
    engine.step()
    found = diary.changes
    assert set(found) == {("many", index) for index in range(3)}
    assert all(states(changes)[-1] is ENDED for changes in found.values())
    assert found["many", 2][-1].reading.usage.cached_tokens >= C


def test_requests_that_end_before_their_first_token_are_forgotten(world: LonePrompts) -> None:
    engine = world.engine(max_num_batched_tokens=C + 8)
    diary, events = Diary(engine), list[Event]()
    engine.submit(Request("0", PROMPTS[0], ANSWER, events.append))
    engine.step()
    engine.abort("0")
    engine.step()
    assert states(diary.changes["0", 0]) == [WAITING, RUNNING, ENDED]
    assert not diary.watched._tokenless


def test_drafts_are_counted_by_step(world: LonePrompts) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    engine = small_engine(world.loaded, speculative_config=drafts)
    diary = Diary(engine)
    run(engine, [tuple([5, 6, 7, 8] * 12)], ANSWER)
    stats = engine.stats().speculation
    assert stats is not None and stats.drafted > 0
    assert sum(step.drafted for step in diary.steps) == stats.drafted
    assert sum(step.accepted for step in diary.steps) == stats.accepted
    last = diary.changes["0", 0][-1].reading.usage.drafted
    assert last is not None and last.accepted + last.rejected == stats.drafted


def test_moved_pages_are_counted(world: LonePrompts) -> None:
    layout = world.engine().admission.retentions[0].layout
    pages = layout.most_pages(110) * 1.2
    gib = pages * layout.page_bytes(4) / 2**30
    engine = world.engine(kv_cache_gib=gib, max_model_len=110, kv_offload_gib=0.01)
    diary = Diary(engine)
    for _ in range(2):
        for prompt in PROMPTS:
            run(engine, [prompt], ANSWER)
    stats = engine.stats()
    assert stats.restored_tokens > 0
    moved = sum(step.moves for step in diary.steps) * stats.page_bytes
    assert moved == stats.host_bytes_in + stats.host_bytes_out
    assert diary.pools[-1].host_used == stats.host_pages_used > 0


def test_the_shape_says_what_is_served(world: LonePrompts) -> None:
    shape = Diary(world.engine()).watched.shape
    assert [entry.kv_retention for entry in shape.retentions] == [0.5, 1.0]
    assert shape.retentions[0].scorer == "keydiff" and shape.retentions[1].scorer is None
    assert (shape.retentions[1].budgets == C).all()
    assert 0 < shape.retentions[0].budgets.mean() < C
    assert (shape.layers, shape.kv_heads, shape.recorded) == (2, 3, False)
    assert shape.kv_token_bytes == world.engine().stats().kv_token_bytes


def test_an_observer_that_fails_is_told_nothing_more_and_answers_go_on(
    world: LonePrompts, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        told = 0

        def observe(self, news: News, readings: Readings) -> None:
            self.told += 1
            raise ValueError("no space")

    engine, broken = world.engine(), Broken()
    engine.watch(broken)
    diary = Diary(engine)
    answers = run(engine, PROMPTS[:2], ANSWER)
    assert answers == [world.alone(prompt)[0] for prompt in PROMPTS[:2]]
    assert broken.told == 1 and len(diary.steps) == engine.stats().steps
    assert "observer" in caplog.text
