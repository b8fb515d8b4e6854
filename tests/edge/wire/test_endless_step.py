"""A step of the engine that does not end, as when a device hangs."""

from __future__ import annotations

import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tangram.link.linked_engine import LinkedEngine
from tangram.metrics import EngineStats

from .conftest import CHAT, USER, chat_body, free_port, healthy, run_fake_server, wait_until
from .fake_engine import FakeEngine

SILENT = chat_body(max_tokens=None, messages=[USER | {"content": "silent"}])
SCRIPT = """
import sys, threading
from tangram.link import supervisor
from tests.edge.wire.fake_engine import FakeEngine, serve_fake
class Hanging(FakeEngine):
    def stop(self):
        threading.Event().wait()
supervisor.LAST_STEP_S = 1
serve_fake(Hanging(), int(sys.argv[1]))
"""


def test_a_step_that_does_not_end_is_no_health_until_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    linked = LinkedEngine(engine, most_step_s=0.6)
    with (
        run_fake_server(engine=engine, linked=linked) as server,
        server.http() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        time.sleep(1)
        assert healthy(server.url), "who has nothing to do hangs not"
        # The fake's steps are never counted
        held = pool.submit(client.post, CHAT, json=SILENT, timeout=2.5)
        wait_until(lambda: not healthy(server.url), "it is healthy for ever")
        assert client.get("/ready").status_code == 503
        assert [
            record.getMessage()
            for record in caplog.records
            if "has not ended" in record.getMessage()
        ]
        assert isinstance(held.exception(), httpx.ReadTimeout)
        wait_until(lambda: healthy(server.url), "it is never healthy again")


class BusyEngine(FakeEngine):
    """Another step has ended whenever it is asked."""

    def stats(self) -> EngineStats:
        return replace(super().stats(), steps=time.monotonic_ns())


def test_steps_that_end_are_health_however_many() -> None:
    engine = BusyEngine()
    linked = LinkedEngine(engine, most_step_s=0.3)
    with run_fake_server(engine=engine, linked=linked) as server, server.http() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=SILENT, timeout=1)
        assert healthy(server.url)


def test_the_process_ends_without_an_engine_that_does_not(python: list[str]) -> None:
    port = free_port()
    url, root = f"http://127.0.0.1:{port}", Path(__file__).parents[3]
    command = [*python, "-c", SCRIPT, str(port)]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: healthy(url), "the server is not healthy", timeout_s=30)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=15) == 1
            assert "ends without it" in (process.stderr.read() if process.stderr else "")
        finally:
            process.kill()
