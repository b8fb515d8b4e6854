"""Processes of a server that end, hang or are killed: who is told, and who goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tangram.link.api_processes import WORKER
from tests.mentions import mentions

from .conftest import CHAT, USER, chat_body, free_port, healthy, scrape, wait_until

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, logging, sys, threading
logging.basicConfig(level=logging.INFO)
from tests.edge.wire.fake_engine import FakeEngine, serve_fake
engine = FakeEngine()
# As large as a real tokenizer: an API process gets it when it has imported all.
engine.codec.told.append({"ballast": "x" * (4 << 20)})
def obey():
    for line in sys.stdin:
        if line.strip() == "die":
            engine.die()
threading.Thread(target=obey, daemon=True).start()
serve_fake(engine, int(sys.argv[1]), **json.loads(sys.argv[2]))
print("stopped", engine.stopped, "aborted", len(engine.aborted))
"""
ENDLESS = chat_body(stream=True, max_tokens=None, messages=[USER | {"content": "endless"}])


def is_api_process(process: psutil.Process) -> bool:
    try:
        return WORKER in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


class ServerOfProcesses:
    """A server of the engine without a model, in processes of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    @property
    def children(self) -> list[psutil.Process]:
        """Its API processes."""
        return [one for one in psutil.Process(self.process.pid).children() if is_api_process(one)]

    def die(self) -> None:
        """Have its engine die."""
        assert self.process.stdin is not None
        self.process.stdin.write("die\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Its code, what it has printed, and its log."""
        output, log = self.process.communicate(timeout=20)
        return self.process.returncode, output, log


@contextmanager
def run_server(grace_s: float = 0.5, **options: float) -> Iterator[ServerOfProcesses]:
    """With `options` of `serve_fake`."""
    port, given = free_port(), json.dumps({"shutdown_grace_s": grace_s} | options)
    command = [sys.executable, "-c", SCRIPT, str(port), given]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        server = ServerOfProcesses(process, f"http://127.0.0.1:{port}")
        try:
            wait_until(lambda: healthy(server.url), "the server is not healthy", timeout_s=60)
            yield server
        finally:
            process.kill()


def test_an_api_process_has_no_torch_and_no_second_end_of_its_link() -> None:
    with run_server() as server:
        (child,) = server.children
        mapped = Path(f"/proc/{child.pid}/maps").read_text()
        libraries = {line.split()[-1] for line in mapped.splitlines()}
        assert not [path for path in libraries if "torch" in path]
        # With a second one, nobody would see that it closes the first.
        opened = list[str]()
        for each in Path(f"/proc/{child.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has been closed meanwhile
                opened.append(str(each.readlink()))
        sockets = [each for each in opened if each.startswith("socket:")]
        assert sockets and len(sockets) == len(set(sockets))


def test_a_killed_api_process_is_replaced_and_leaves_nothing_behind() -> None:
    with run_server() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("POST", CHAT, json=ENDLESS) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            (child,) = server.children
            child.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        wait_until(
            lambda: healthy(server.url) and server.children != [child], "no other one", timeout_s=60
        )
        with httpx.Client(base_url=server.url, timeout=30) as other:
            answer = other.post(CHAT, json=chat_body()).json()
            assert answer["choices"][0]["message"]["content"]
            counted = scrape(other)
        assert counted["tangram_requests_running", ""] == 0
        # What the killed one has counted stays.
        assert counted["tangram_completions_total", "stop"] >= 1
        server.process.send_signal(signal.SIGTERM)
        code, output, log = server.end()
    assert (code, output.strip()) == (0, "stopped True aborted 1")
    assert mentions(log, "signal 9") and "Traceback" not in log


def begin(moment: str, server: ServerOfProcesses, opened: ExitStack) -> None:
    """Bring the server to a moment at which one of its processes may be killed."""
    match moment:
        case "half a body has come":
            host, port = server.url.removeprefix("http://").split(":")
            connection = opened.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                'Content-Length: 100\r\n\r\n{"model"'.encode()
            )
        case "an answer that is sent whole is under way":
            pool = opened.enter_context(ThreadPoolExecutor(1))
            pool.submit(httpx.post, f"{server.url}{CHAT}", json=ENDLESS | {"stream": False})
            with httpx.Client(base_url=server.url, timeout=30) as client:
                wait_until(
                    lambda: scrape(client)["tangram_requests_running", ""] == 1, "nothing runs"
                )
        case "another one has just been killed":
            (child,) = server.children
            child.kill()
            wait_until(lambda: server.children not in ([], [child]), "no other one", timeout_s=60)
        case "the server ends":
            stream = httpx.stream("POST", f"{server.url}{CHAT}", json=ENDLESS, timeout=30)
            lines = opened.enter_context(stream).iter_lines()
            opened.callback(lambda: lines)  # without it the client hangs up
            assert next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)


MOMENTS = (
    "nothing runs",
    "half a body has come",
    "an answer that is sent whole is under way",
    "another one has just been killed",
    "the server ends",
)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_api_process_may_be_killed_while(moment: str) -> None:
    # Half a request that the killed one had not accepted is the next one's, for the whole grace.
    with run_server(grace_s=5) as server, ExitStack() as opened:
        begin(moment, server, opened)
        (child,) = server.children
        child.kill()
        if moment != "the server ends":
            wait_until(
                lambda: healthy(server.url) and child not in server.children, "no other one", 60
            )
            answer = httpx.post(f"{server.url}{CHAT}", json=chat_body(), timeout=30).json()
            assert answer["choices"][0]["message"]["content"]
            with httpx.Client(base_url=server.url, timeout=30) as client:
                assert scrape(client)["tangram_requests_running", ""] == 0
            server.process.send_signal(signal.SIGTERM)
        code, output, log = server.end()
        assert code == 0 and output.startswith("stopped True") and "Traceback" not in log


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_engine_process_may_be_killed_while(moment: str) -> None:
    with run_server(grace_s=20) as server, ExitStack() as opened:
        begin(moment, server, opened)
        below = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(below, timeout=15)
        assert not alive


def test_the_others_go_on_when_one_is_killed() -> None:
    with run_server(api_processes=2) as server:
        wait_until(lambda: len(server.children) == 2, "two processes")
        first, second = server.children
        os.kill(first.pid, signal.SIGSTOP)  # all that comes now goes to the second
        try:
            with (
                httpx.Client(base_url=server.url, timeout=30) as client,
                client.stream("POST", CHAT, json=ENDLESS) as response,
            ):
                lines = response.iter_lines()
                assert next(lines)
                first.kill()
                wait_until(lambda: len(server.children) == 2, "another one", timeout_s=60)
                for _ in range(100):
                    assert next(lines, None) is not None
            assert second in server.children
        finally:
            with suppress(psutil.NoSuchProcess):
                first.kill()


def test_an_api_process_that_hangs_is_replaced_and_does_not_put_off_the_end() -> None:
    # So little may wait that seconds of an endless answer are too much.
    options = {"api_processes": 2, "kill_after_s": 1.0, "most_unread_bytes": 1 << 20}
    with run_server(**options) as server:
        wait_until(lambda: len(server.children) == 2, "two processes")
        first, second = server.children
        first.suspend()  # all that comes now goes to the second
        with httpx.stream("POST", f"{server.url}{CHAT}", json=ENDLESS, timeout=30) as response:
            for _ in response.iter_lines():
                if first not in server.children:
                    break
        with httpx.Client(base_url=server.url, timeout=30) as client:
            wait_until(lambda: scrape(client)["tangram_requests_running", ""] == 0, "it runs")
        second.suspend()
        wait_until(lambda: healthy(server.url), "no other one", timeout_s=60)
        server.process.send_signal(signal.SIGTERM)
        code, output, log = server.end()
    assert code == 0 and output.startswith("stopped True") and "Traceback" not in log
    assert mentions(log, "reads killed aborted")
    assert "an API process does not end: it is killed" in log


def test_an_api_process_that_hangs_does_not_put_off_the_end_of_a_dead_engine() -> None:
    with run_server(grace_s=60, kill_after_s=1.0) as server:
        (child,) = server.children
        child.suspend()
        server.die()
        code, _, log = server.end()
    assert code == 1 and "EngineError" in log


def test_a_signal_while_api_processes_are_replaced_ends_the_server_and_starts_nobody() -> None:
    with run_server(grace_s=60, api_processes=2) as server:
        wait_until(lambda: len(server.children) == 2, "two processes")
        first, second = server.children
        first.kill()
        wait_until(lambda: len({*server.children} - {first, second}) == 1, "no other one")
        known = {*server.children}  # the new one imports, and has heard nothing yet
        second.kill()
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None:
            assert {*server.children} <= known, "one was started"
            time.sleep(0.05)
        code, output, log = server.end()
    assert code == 0 and output.startswith("stopped True") and "Traceback" not in log
    assert "it is killed" not in log, "it was not told"


def test_one_scrape_tells_of_all_processes() -> None:
    with run_server(api_processes=2) as server:
        for _ in range(20):  # each on a connection of its own
            httpx.post(f"{server.url}{CHAT}", json=chat_body(), timeout=30)
        told = []
        for _ in range(8):
            with httpx.Client(base_url=server.url, timeout=30) as client:
                told.append(scrape(client)["tangram_completions_total", "stop"])
        assert set(told) == {20}


def test_nothing_is_left_of_a_server_whose_engine_process_is_killed() -> None:
    with run_server(api_processes=2) as server:
        children = server.children
        with httpx.stream("POST", f"{server.url}{CHAT}", json=ENDLESS, timeout=30) as response:
            lines = response.iter_lines()  # kept: without it the client hangs up
            assert next(lines)
            server.process.kill()
            _, alive = psutil.wait_procs(children, timeout=15)
        assert not alive
        assert not healthy(server.url)


def test_an_engine_that_dies_ends_the_server_and_says_so() -> None:
    with run_server() as server, ThreadPoolExecutor(1) as pool:
        with httpx.stream("POST", f"{server.url}{CHAT}", json=ENDLESS, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines)
            server.die()
            said = pool.submit(lambda: [line for line in lines if line])
            *_, error, done = said.result(timeout=20)
        code, _, log = server.end()
    assert code == 1 and "EngineError" in log
    assert "stopped" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


def test_a_second_signal_ends_everything_at_once_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with run_server(grace_s=60) as server:
        children = server.children
        with httpx.stream("POST", f"{server.url}{CHAT}", json=ENDLESS, timeout=30) as response:
            lines = response.iter_lines()  # kept: without it the client hangs up
            assert next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=10) == 128 + signal.SIGTERM
            _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive and not list(tmp_path.iterdir())
