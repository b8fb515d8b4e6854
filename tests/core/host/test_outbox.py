"""Events of a step go out together, after the statistics that no longer contain who has ended."""

from __future__ import annotations

import pytest

from tangram.engine.outbox import Outbox
from tangram.types import Event, FinishReason, Request, SamplingParams, Usage


def make_event(request_id: str, reason: FinishReason | None = None) -> Event:
    return Event(request_id, 0, (7,), (), Usage(1, 1, 0, 0, 0), reason)


class Listeners:
    """Those who hear, in order, what was published and what they were told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, FinishReason | None]] = []
        self.outbox = Outbox(lambda: self.heard.append(("published", None)))

    def put(self, name: str, reason: FinishReason | None = None, *, deaf: bool = False) -> None:
        def hear(event: Event) -> None:
            if deaf:
                raise RuntimeError("this client hears nothing")
            self.heard.append((event.request_id, event.finish_reason))

        request = Request(name, (1,), SamplingParams(), hear)
        self.outbox.put(request, make_event(name, reason))


def test_statistics_are_read_once_for_all_that_end_in_a_step() -> None:
    listeners = Listeners()
    names = [f"request-{number}" for number in range(256)]
    for name in names:
        listeners.put(name, FinishReason.LENGTH)
    assert not listeners.heard, "nobody is told before `send`"
    listeners.outbox.send()
    assert listeners.heard[0] == ("published", None)
    assert listeners.heard[1:] == [(name, FinishReason.LENGTH) for name in names]
    listeners.outbox.send()
    assert len(listeners.heard) == 257, "nobody is told twice"


def test_tokens_alone_publish_nothing() -> None:
    listeners = Listeners()
    listeners.put("one")
    listeners.outbox.send()
    assert listeners.heard == [("one", None)]


def test_a_client_that_fails_to_hear_keeps_nothing_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listeners = Listeners()
    listeners.put("before")
    listeners.put("deaf", deaf=True)
    listeners.put("after", FinishReason.STOP)
    listeners.outbox.send()
    assert [name for name, _ in listeners.heard] == ["published", "before", "after"]
    assert "request deaf" in caplog.text
