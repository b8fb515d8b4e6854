"""Whatever is drafted and refused: every sequence gets the tokens that it would have got, in its
turn, and no page is lost on the way.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tangram.cache.prefix import Link
from tangram.cache.step import Row, RowKind
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.types import Int64
from tests.core.host.device_double import geometry, kept_first, layout, layout_sets, recount
from tests.core.host.scheduled_device import MAX_TOKENS, DeviceDrafts, ScheduledDevice
from tests.core.host.test_scheduler import Traffic, prompt_of
from tests.examples import examples


def drafts_of(
    seed: int = 0, *, most: int = 6, sure: float = 0.8, on_device: bool = False
) -> DeviceDrafts:
    return DeviceDrafts(most, sure, on_device, random.Random(seed))


class DraftedTraffic(Traffic):
    """The traffic of the plain scheduler, where sequences are drafted for in most steps."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        layouts = data.draw(layout_sets(max_tokens=MAX_TOKENS))
        kept = data.draw(st.booleans())
        self.service = ScheduledDevice(
            layouts,
            slack_pages=data.draw(st.integers(0, 40)),
            max_num_seqs=data.draw(st.integers(1, 4)),
            slack_tokens=data.draw(st.integers(0, 20)),
            caching=data.draw(st.sampled_from([True, True, True, False])),
            ahead=data.draw(st.booleans()),
            host_pages=data.draw(st.sampled_from([0, 5, 30, 1000])),
            patience=data.draw(st.sampled_from([0, 1, 16])),
            apart=data.draw(st.sampled_from([0, 4])),
            kept=[kept_first(entry, str(at)) for at, entry in enumerate(layouts)] if kept else (),
            drafts=drafts_of(
                data.draw(st.integers(0, 99)),
                most=data.draw(st.integers(1, 9)),
                sure=data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
                on_device=data.draw(st.booleans()),
            ),
        )


TestDraftedTraffic = DraftedTraffic.TestCase
TestDraftedTraffic.settings = settings(
    max_examples=examples(200),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def crowd(seed: int, drafts: DeviceDrafts | None, **options: object) -> ScheduledDevice:
    """A service after a random day of traffic; with compressed, whole and window groups."""
    model = geometry(3, 2, (None, 11, None))
    layouts = [layout(2, model=model), layout(4, model=model)]
    given = {"slack_pages": 12, "max_num_seqs": 4, "slack_tokens": 8, "drafts": drafts} | options
    service, rng = ScheduledDevice(layouts, **given), random.Random(seed)  # type: ignore[arg-type]
    for _ in range(25):
        prompt = prompt_of(rng.randrange(2), rng.randrange(30), [rng.randrange(3)])
        taste, which = rng.randrange(3), rng.randrange(2)
        service.submit(prompt, rng.randrange(1, 16), layout=which, taste=taste)
        for _ in range(rng.randrange(4)):
            service.step()
            recount(service.manager)
    service.drain()
    service.manager.prefix.clear()
    recount(service.manager)
    assert service.manager.ledger.free == service.manager.ledger.total
    return service


def answers(service: ScheduledDevice) -> dict[str, list[int]]:
    return {entry.request_id: entry.known_tokens.tolist() for entry in service.ended}


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_without_drafts(seed: int) -> None:
    """Whether drafts are right or wrong, through preemption, evictions and host memory."""
    expected = answers(crowd(seed, None))
    preemptions = 0
    for sure in (0.0, 0.7, 1.0):
        for options in (
            {"slack_pages": 0, "max_num_seqs": 3},
            {"on_device": True, "ahead": True},
            {"host_pages": 60},
        ):
            on_device = bool(options.pop("on_device", False))
            drafts = drafts_of(seed, sure=sure, on_device=on_device)
            service = crowd(seed, drafts, **options)
            assert answers(service) == expected
            assert (drafts.accepted > 0) == (sure > 0.0) and (drafts.refused > 0) == (sure < 1.0)
            preemptions += service.scheduler.counters.preemptions
    assert preemptions > 0


def test_right_drafts_save_steps() -> None:
    def steps(drafts: DeviceDrafts | None) -> int:
        service = ScheduledDevice([layout(2)], slack_pages=100, max_num_seqs=2, drafts=drafts)
        service.submit([1] * 3, 40)
        service.drain()
        return service.scheduler.counters.steps

    assert steps(drafts_of(sure=1.0, most=8)) < 0.6 * steps(None)
    assert steps(drafts_of(sure=0.0, most=8)) == steps(None)


def end_of(row: Row) -> int:
    return row.start + len(row.tokens)


class Eager:
    """Right drafts, as many as may be."""

    on_device = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def offer(self, sequence: TokenSequence, most: int) -> Int64:
        self.asked.append(most)
        return np.ones(most, np.int64)


def test_an_accepted_run_that_fills_its_chunk_is_sealed_next() -> None:
    """Its last token, too, is where a sequence of the same tokens looks for it."""
    drafts = drafts_of(3, sure=1.0, most=8)
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=1, drafts=drafts)
    service.submit([1] * 5, 23)
    rows: list[list[Row]] = []
    while (step := service.step()) is not None:
        rows.append(list(step.rows))
    kinds = [[row.kind for row in step] for step in rows]
    ends = [end_of(row) for *_, row in rows if row.drafts]
    full = [at for at, (*_, row) in enumerate(rows) if row.drafts and end_of(row) % 8 == 0]
    assert max(ends) > 8 and full, "a run has filled a chunk"
    for at in full:
        assert kinds[at + 1][-1] is RowKind.SEAL
    plain = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=1)
    plain.submit([1] * 5, 23)
    plain.drain()
    published = [set(one.manager.prefix.nodes) for one in (service, plain)]
    assert published[0] == published[1]
    links = [node.link for node in service.manager.prefix.nodes.values()]
    assert links.count(Link.CHUNK) == 3 and links.count(Link.RAW) > 3


def test_drafts_end_with_the_chunk_and_with_the_answer() -> None:
    service = ScheduledDevice([layout(2)], slack_pages=1000, max_num_seqs=3, slack_tokens=100)
    service.submit([1] * 3, 3)
    service.step()
    service.scheduler.drafts = eager = Eager()
    step = service.scheduler.schedule()
    assert step is not None and eager.asked == [1], "of 3 tokens, one is drafted"
    service = ScheduledDevice([layout(2)], slack_pages=1000, max_num_seqs=3, slack_tokens=100)
    service.submit([1] * 3, 30)
    service.step()
    service.scheduler.drafts = eager = Eager()
    step = service.scheduler.schedule()
    assert step is not None and [(row.start, row.drafts) for row in step.rows] == [(3, 4)]
    assert eager.asked == [4], "the chunk ends at position 7"


def test_a_step_that_computes_a_prompt_has_no_drafts() -> None:
    """Also where the prompt is admitted in that step."""
    service = ScheduledDevice([layout(2)], slack_pages=1000, max_num_seqs=3, slack_tokens=100)
    service.submit([1] * 3, 30)
    service.step()
    service.submit([2] * 8, 5)
    service.scheduler.drafts = eager = Eager()
    step = service.scheduler.schedule()
    assert step is not None and not eager.asked
    assert [len(row.tokens) for row in step.rows] == [1, 8]


def test_a_chunk_that_is_computed_again_leaves_others_their_drafts() -> None:
    """Of many sequences one fills a chunk in most steps."""
    drafts = drafts_of(6, sure=1.0)
    service = ScheduledDevice([layout(1)], slack_pages=1000, max_num_seqs=8, drafts=drafts)
    for number in range(8):
        service.submit([number] * (3 + number), 40)
    both = 0
    while (step := service.step()) is not None:
        sealed = any(row.kind is RowKind.SEAL for row in step.rows)
        both += sealed and any(row.drafts for row in step.rows)
    assert both > 3


def test_several_sequences_of_one_request_part_at_their_first_difference() -> None:
    """They share the prompt; what one drafts is nothing to the others."""
    drafts = drafts_of(5, sure=0.8)
    service = ScheduledDevice(
        [layout(2)], slack_pages=40, max_num_seqs=3, slack_tokens=20, drafts=drafts
    )
    first = service.submit([1] * 13, 20, taste=0)
    while first.read_tokens == 0:
        service.step()
    for taste in (1, 2):
        arrival = first.arrival_index + taste
        service.submit([1] * 13, 20, taste=taste, arrival=arrival)
    while service.step() is not None:
        recount(service.manager)
    alone = ScheduledDevice([layout(2)], slack_pages=40, max_num_seqs=3)
    for taste in range(3):
        alone.submit([1] * 13, 20, taste=taste)
        alone.drain()
    found = sorted(entry.known_tokens.tolist() for entry in service.ended)
    assert found == sorted(entry.known_tokens.tolist() for entry in alone.ended)
