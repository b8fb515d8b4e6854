"""How a server process ends, and how many it lets in."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from tangram.serve.http import transport_options
from tangram.serve.process import Server
from tests.mentions import mentions

from .conftest import CHAT, USER, chat_body, free_port, healthy, stream_data, wait_until

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from tests.edge.wire.fake_engine import FakeEngine, serve_fake
engine = FakeEngine()
serve_fake(engine, int(sys.argv[1]))
print("stopped", engine.stopped, "aborted", len(engine.aborted))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_cleanly_in_the_middle_of_a_stream(
    python: list[str], number: signal.Signals
) -> None:
    port = free_port()
    url, root = f"http://127.0.0.1:{port}", Path(__file__).parents[3]
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
    assert mentions(log, f"0.5 {again} again")
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    assert "Traceback" not in log


class NoService:
    """What `Server` asks of a service."""

    engine, memory = SimpleNamespace(ended=False), SimpleNamespace(busy=False)

    def drain(self) -> None:
        """Nothing is queued."""

    async def stop(self) -> None:
        """Nothing runs."""


async def answer_without_end(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})
    while True:
        await send({"type": "http.response.body", "body": b" " * 65536, "more_body": True})


def test_who_reads_nothing_puts_off_the_end_by_no_second_grace() -> None:
    async def run() -> None:
        config = uvicorn.Config(answer_without_end, lifespan="off", **transport_options())
        service: Any = NoService()
        listener = socket.create_server(("127.0.0.1", 0))
        server = Server(config, service, 60, lambda: None, cut_after_s=1)
        serving = asyncio.create_task(server.serve([listener]))
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            async with asyncio.timeout(10):
                while not server.server_state.tasks:
                    await asyncio.sleep(0.01)
            begin_s = time.monotonic()
            server.drain(3.0)
            await asyncio.wait_for(serving, 20)
            assert 3 < time.monotonic() - begin_s < 6

    asyncio.run(run())


def test_more_connect_than_a_shell_lets_open_files() -> None:
    port = free_port()
    url, root = f"http://127.0.0.1:{port}", Path(__file__).parents[3]
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
