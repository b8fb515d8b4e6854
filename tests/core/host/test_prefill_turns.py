"""Whose turn it is: short prompts before long ones, for a while, and one prompt after the other."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.cache.step import RowKind
from tests.core.host.device_double import geometry, layout
from tests.core.host.scheduled_device import ScheduledDevice


def order_of_ends(patience: int, lengths: list[int]) -> list[int]:
    """In which order prompts of `lengths` tokens, one a step and all there at once, get their only
    token.
    """
    service = ScheduledDevice(
        [layout(4)], slack_pages=1000, max_num_seqs=1, caching=False, patience=patience
    )
    for token, length in enumerate(lengths):
        service.submit([token % 5] * length, 1)
    service.drain()
    return [entry.prompt_tokens for entry in service.ended]


def test_short_prompts_pass_long_ones_unless_there_is_no_patience() -> None:
    assert order_of_ends(16, [40, 9, 24, 8]) == [8, 9, 24, 40]
    assert order_of_ends(0, [40, 9, 24, 8]) == [40, 9, 24, 8]


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_a_long_prompt_is_passed_for_so_many_times_its_tokens_and_no_longer(patience: int) -> None:
    service = ScheduledDevice(
        [layout(4)], slack_pages=1000, max_num_seqs=1, caching=False, patience=patience
    )
    long, passed = service.submit([1] * 40, 1), 0
    while long not in service.scheduler.running:
        service.submit([2] * 8, 1)
        service.step()
        passed = service.scheduler.counters.computed_tokens
    assert passed - 16 <= patience * 40 <= passed + patience * 8


def test_what_the_cache_has_counts_for_nothing_when_it_is_decided_who_is_short() -> None:
    service = ScheduledDevice([layout(4)], slack_pages=1000, max_num_seqs=1)
    service.submit([1] * 40, 1)
    service.drain()
    middle, long = service.submit([2] * 16, 1), service.submit([1] * 40, 1)
    service.drain()
    assert service.ended[1:] == [long, middle]


def test_a_chunk_that_does_not_fit_beside_the_others_waits_whole() -> None:
    service = ScheduledDevice([layout(2)], slack_pages=1000, max_num_seqs=4, slack_tokens=3)
    service.submit([1] * 8, 9)
    service.submit([2] * 8, 9)
    steps = [service.step(), service.step()]
    shapes = [
        [(row.kind, row.start, len(row.tokens)) for row in step.rows]
        for step in steps
        if step is not None
    ]
    assert shapes == [[(RowKind.SEAL, 0, 8)], [(RowKind.DECODE, 8, 1), (RowKind.SEAL, 0, 8)]]


def first_step(**options: Any) -> list[tuple[str, str, int, bool]]:
    """Rows of the first step of a prompt of 20 tokens and one of 29, in chunks of 8."""
    service = ScheduledDevice(
        [layout(2, **options.pop("layout", {}))], slack_pages=1000, max_num_seqs=2, **options
    )
    for length in (20, 29):
        service.submit([length] * length, 3)
    step = service.step()
    return (
        [(row.request_id, row.kind.value, row.start, row.sample) for row in step.rows]
        if step
        else []
    )


def test_a_step_goes_to_one_prompt_after_the_other() -> None:
    one_chunk = [("2", "seal", 0, False), ("4", "seal", 0, False)]
    whole = [("2", "seal", 0, False), ("2", "seal", 8, False), ("2", "tail", 16, True)]
    other = [
        ("4", "seal", 0, False),
        ("4", "seal", 8, False),
        ("4", "seal", 16, False),
        ("4", "tail", 24, True),
    ]
    both = [*whole[:2], *other[:3], whole[2], other[3]]
    assert first_step(slack_tokens=40) == both, "whole chunks lie end to end"
    assert first_step(slack_tokens=14) == [*whole]
    assert first_step(slack_tokens=6) == whole[:2]
    assert first_step(slack_tokens=40, one_chunk_a_step=frozenset([0])) == one_chunk
    sliding = geometry(2, 2, (None, 11))
    assert first_step(slack_tokens=40, layout={"model": sliding}) == both


def test_a_short_prompt_does_not_wait_until_a_long_one_under_way_is_through() -> None:
    service = ScheduledDevice([layout(4)], slack_pages=1000, max_num_seqs=2)
    long = service.submit([1] * 40, 1)
    service.step()
    short = service.submit([2] * 8, 1)
    service.step()
    assert service.ended == [short] and long.cache is not None
