"""What the log tells of a server that works, and that it tells nothing of one that does not."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.engine.loop import Engine
from tangram.serve import activity
from tangram.serve.activity import Activity, has_worked
from tangram.serve.observability.logs import JsonFormatter

from .conftest import wait_until
from .fake_engine import FakeEngine
from .tiny import numbers, run_tiny_server, tiny_folder


def test_two_readings_make_a_line() -> None:
    before = FakeEngine().stats()
    now = replace(
        before,
        running=3,
        waiting=1,
        steps=before.steps + 9,
        prompt_tokens=before.prompt_tokens + 400,
        cached_tokens=before.cached_tokens + 100,
        generated_tokens=before.generated_tokens + 50,
        computed_prompt_tokens=before.computed_prompt_tokens + 300,
        pages_held=250,
        pages_cached=20,
    )
    told = Activity.between(before, now, 10.0)
    assert str(told) == (
        "running 3, waiting 1 · prompt 30.0 and generated 5.0 tokens/s · KV pages 25.0% held, "
        "2.0% cached"
        " · 25% of new prompts reused"
    )
    assert "reused" not in str(
        Activity.between(before, replace(now, prompt_tokens=before.prompt_tokens), 10.0)
    )


def test_an_idle_engine_makes_none() -> None:
    stats = FakeEngine().stats()
    assert not has_worked(stats, stats)
    assert has_worked(stats, replace(stats, waiting=1))
    assert has_worked(stats, replace(stats, steps=stats.steps + 1))


@contextmanager
def told_of(engine: Engine) -> Iterator[None]:
    """The activity of an engine, which the process of a server's engine tells."""

    async def tell() -> None:
        telling = asyncio.create_task(activity.tell_activity(engine.stats))
        await asyncio.to_thread(ended.wait)
        telling.cancel()

    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(tell()))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_server_tells_what_it_does_and_then_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activity, "EVERY_S", 0.2)
    caplog.set_level(logging.INFO, activity.__name__)
    with run_tiny_server(tiny_folder(tmp_path)) as server, told_of(server.engine):
        server.complete(numbers(100), max_tokens=30)
        server.complete(numbers(100), max_tokens=30)
        wait_until(
            lambda: sum(line["generated_tokens_per_s"] > 0 for line in lines(caplog)) > 0,
            "there is no line",
        )
        wait_until(lambda: server.engine.stats().running == 0, "it still runs")
        wait_until(lambda: says_nothing(caplog, 0.8), "an idle server is silent", timeout_s=30)
        # A late look, on a busy machine, counts as if it came in time
        assert 0 < read_generated(caplog) <= 60 * 1.3
    assert any((line["reused_share"] or 0) > 0 for line in lines(caplog))


def says_nothing(caplog: pytest.LogCaptureFixture, seconds: float) -> bool:
    told = len(lines(caplog))
    time.sleep(seconds)
    return len(lines(caplog)) == told


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, float]]:
    """The lines as JSON has them."""
    form = JsonFormatter()
    found = [
        json.loads(form.format(record))
        for record in caplog.records
        if record.name == activity.__name__
    ]
    assert all(line["message"].startswith("running ") for line in found)
    return found


def read_generated(caplog: pytest.LogCaptureFixture) -> float:
    return sum(line["generated_tokens_per_s"] for line in lines(caplog)) * activity.EVERY_S
