"""The bound of the queue."""

from __future__ import annotations

import pytest

from tangram.config import EngineConfig
from tangram.engine.intake import Intake
from tangram.engine.schedule.scheduler import Scheduler
from tangram.errors import ConfigError, OverloadError, RequestError
from tests.core.host.device_double import layout
from tests.core.host.scheduled_device import ScheduledDevice
from tests.mentions import mentioning


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def read_refusal(intake: Intake, waiting: int) -> OverloadError:
    with pytest.raises(OverloadError) as caught:
        intake.take(waiting, 1, "n")
    return caught.value


def test_the_queue_takes_in_as_many_as_it_may_hold_and_no_more() -> None:
    intake = Intake(3, places=2)
    intake.take(2, 5, "prompt")
    assert "max_queue is 3" in str(read_refusal(intake, 3))
    Intake(None, places=1).take(10**9, 10**9, "n")


@pytest.mark.parametrize("waiting", [0, 3])
def test_who_could_never_be_taken_in_is_not_told_to_come_again(waiting: int) -> None:
    with pytest.raises(RequestError, match=mentioning("prompt 6 2 3")) as caught:
        Intake(3, places=2).take(waiting, 6, "prompt")
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("starts_per_s", "expected_s"), [(1000.0, 1), (10.0, 4), (1.0, 40), (0.1, 60)]
)
def test_who_is_refused_hears_how_long_the_queue_takes(
    starts_per_s: float, expected_s: int
) -> None:
    clock = Clock()
    intake = Intake(40, 8, clock)
    for _ in range(200):
        intake.count_start()
        clock.now_s += 1 / starts_per_s
    assert read_refusal(intake, 40).retry_after_s == expected_s


def test_a_queue_that_stands_still_sends_people_away_for_longer() -> None:
    clock = Clock()
    intake = Intake(4, 8, clock)
    assert read_refusal(intake, 4).retry_after_s == 1
    for _ in range(10):
        intake.count_start()
        clock.now_s += 1
    before = read_refusal(intake, 4).retry_after_s
    clock.now_s += 30
    assert read_refusal(intake, 4).retry_after_s > before


def waiting(scheduler: Scheduler) -> list[int]:
    return [max(0, scheduler.excess(entering)) for entering in (0, 1, 5)]


def test_only_those_without_a_place_wait() -> None:
    service = ScheduledDevice([layout(2)], slack_pages=100, max_num_seqs=2)
    assert waiting(service.scheduler) == [0, 0, 3]
    for _ in range(3):
        service.submit([1, 2, 3], 5)
    assert waiting(service.scheduler) == [1, 2, 6]
    service.step()
    assert waiting(service.scheduler) == [1, 2, 6]
    service.drain()
    assert waiting(service.scheduler) == [0, 0, 3]


def test_a_preempted_request_does_not_count_as_waiting() -> None:
    service = ScheduledDevice([layout(4)], slack_pages=0, max_num_seqs=2)
    for start in (1, 2):
        service.submit([start] * 7, 30)
    while not service.scheduler.counters.preemptions:
        service.step()
    assert len(service.scheduler.waiting) == 1 and service.scheduler.excess(1) <= 0


def test_a_queue_for_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("max_queue 0")):
        EngineConfig(max_queue=0)
