"""What a server does when its terminal is closed: SIGHUP, from the kernel and from the shell."""

from __future__ import annotations

import signal
import time

import httpx

from .conftest import CHAT
from .test_process import FAKE, process, said, status_of


def test_running_answers_end_however_often_it_is_told() -> None:
    asked = said("endless", max_tokens=450, stream=True)
    with (
        process("-c", FAKE, "PORT", "20") as (url, server),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        with client.stream("POST", CHAT, json=asked) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(3):
                server.send_signal(signal.SIGHUP)
                time.sleep(0.05)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(timeout=15) == 0


def test_nohup_is_heeded() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN){FAKE}"
    with process("-c", ignoring, "PORT", "5") as (url, server):
        server.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert status_of(url, "/ready") == 200 and server.poll() is None
