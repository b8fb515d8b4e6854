"""How a server process ends, and how many it lets in."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from .conftest import CHAT, USER, chat_body, free_port, healthy, stream_data, wait_until

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from tests.wire.fake_engine import FakeEngine, serve_fake
engine = FakeEngine()
serve_fake(engine, int(sys.argv[1]))
print("stopped", engine.stopped, "aborted", len(engine.aborted))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_cleanly_in_the_middle_of_a_stream(
    python: list[str], number: signal.Signals
) -> None:
    port = free_port()
    url, root = f"http://127.0.0.1:{port}", Path(__file__).parents[2]
    command = [*python, "-c", SCRIPT, str(port)]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_until(lambda: healthy(url), "the server is not healthy", timeout_s=30)
            body = chat_body(stream=True, max_tokens=None, messages=[USER | {"content": "endless"}])
            with (
                httpx.Client(base_url=url) as client,
                client.stream("POST", CHAT, json=body) as response,
            ):
                assert response.status_code == 200
                process.send_signal(number)
                *_, error, done = stream_data(response)
            output, log = process.communicate(timeout=15)
        finally:
            process.kill()
    assert (process.returncode, output.splitlines()[-1]) == (0, "stopped True aborted 1"), log
    again = "Ctrl-C" if number == signal.SIGINT else "a signal"
    assert f"waiting up to 0.5 s for an answer, {again} again ends the process" in log
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    assert "Traceback" not in log


def test_more_connect_than_a_shell_lets_open_files() -> None:
    port = free_port()
    url, root = f"http://127.0.0.1:{port}", Path(__file__).parents[2]
    command = [
        "bash",
        "-c",
        'ulimit -Sn 128; exec "$@"',
        "bash",
        sys.executable,
        "-c",
        SCRIPT,
        str(port),
    ]
    with (
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process,
        ExitStack() as connections,
    ):
        try:
            wait_until(lambda: healthy(url), "the server is not healthy", timeout_s=30)
            for _ in range(200):
                connections.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            assert healthy(url)
        finally:
            process.kill()
