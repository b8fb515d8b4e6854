"""Trials of the server's process: signals under load, an engine that dies, a kill.

Somebody must start it again, so what counts is that clients hear of it, how it ends, and that the
next start works.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.text.template_process import MOST_S
from tests.mentions import assert_refused, mentions

from .conftest import (
    CHAT,
    MODEL,
    USER,
    chat_body,
    free_port,
    healthy,
    scrape,
    stream_data,
    wait_until,
)
from .tiny import COMPLETIONS, body, numbers, tiny_folder

ROOT = Path(__file__).parents[3]
FAKE = """
import sys
from tests.edge.wire.fake_engine import FakeEngine, serve_fake
serve_fake(FakeEngine(), int(sys.argv[1]), float(sys.argv[2]))
"""
# The command, with an engine whose device gives up at the 40th step.
DYING = """
import sys
from tangram.cli import app
from tangram.engine.passes.runner import Runner
run, steps = Runner.run, []
def failing(self, *args):
    steps.append(1)
    if len(steps) > 40:
        raise RuntimeError("CUDA error: unspecified launch failure")
    return run(self, *args)
Runner.run = failing
app(sys.argv[1:])
"""


@contextmanager
def process(
    *command: str, python: Sequence[str] = (sys.executable,), start_s: float = 60, **variables: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of `python command PORT`, healthy, and its address."""
    port = free_port()
    arguments = [*python, *(argument.replace("PORT", str(port)) for argument in command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with subprocess.Popen(
        arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: server.poll() is not None or healthy(url),
                "the server is not healthy",
                start_s,
            )
            yield url, server
        finally:
            server.kill()


def fake(python: list[str], grace_s: float) -> Any:
    return process("-c", FAKE, "PORT", str(grace_s), python=python)


def said(prompt: str, **fields: Any) -> dict[str, Any]:
    return chat_body(messages=[USER | {"content": prompt}]) | fields


def log_of(server: subprocess.Popen[str]) -> str:
    """All that it has written, without line breaks."""
    assert server.stderr is not None
    return " ".join(server.stderr.read().split())


def status_of(url: str, path: str) -> int:
    return httpx.get(url + path, timeout=30).status_code


def count_accepted(client: httpx.Client) -> float:
    """The completions that run or have ended."""
    found = scrape(client)
    ended = [value for (name, _), value in found.items() if name == "tangram_completions_total"]
    return found["tangram_requests_running", ""] + sum(ended)


def test_sigterm_lets_running_answers_end_and_refuses_new_ones(python: list[str]) -> None:
    with (
        fake(python, 120) as (url, server),
        httpx.Client(base_url=url, timeout=30) as client,
        ThreadPoolExecutor(9) as pool,
    ):
        assert status_of(url, "/ready") == 200
        # A token takes a millisecond and more.
        asked = said("endless", max_tokens=450, model=MODEL)
        running = [pool.submit(client.post, CHAT, json=asked) for _ in range(4)]
        streams = [pool.submit(client.post, CHAT, json=asked | {"stream": True}) for _ in range(4)]
        wait_until(lambda: count_accepted(client) == 8, "it has not accepted all")
        with client.stream(
            "POST", CHAT, json=said("endless", max_tokens=480, stream=True)
        ) as first:
            lines = first.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: status_of(url, "/ready") == 503, "it is still ready")
            refused = httpx.post(url + CHAT, json=said("hello"))
            assert (
                refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
            )
            assert [line for line in lines if line][-1] == "data: [DONE]"
        for answer in running:
            assert answer.result().json()["usage"]["completion_tokens"] == 450
        for stream in streams:
            *_, last, done = stream_data(stream.result())
            assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
        assert server.wait(timeout=60) == 0, "it waits for its grace to be over"


def test_sigterm_ends_an_idle_server_at_once(python: list[str]) -> None:
    with fake(python, 600) as (_, server):
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=10) == 0


def test_a_second_sigterm_ends_the_process_at_once(python: list[str]) -> None:
    asked = said("endless", max_tokens=None, stream=True)
    with fake(python, 600) as (url, server), httpx.Client(base_url=url) as client:
        with (
            pytest.raises(httpx.RemoteProtocolError),
            client.stream("POST", CHAT, json=asked) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: status_of(url, "/ready") == 503, "it is still ready")
            server.send_signal(signal.SIGTERM)
            list(lines)
        assert server.wait(timeout=60) == 128 + signal.SIGTERM


def test_half_a_body_does_not_put_off_the_end(python: list[str]) -> None:
    with fake(python, 1) as (url, server), closing(half_a_request(url)) as connection:
        time.sleep(0.3)
        connection.settimeout(20)
        server.send_signal(signal.SIGTERM)
        answer = connection.makefile("rb").read()
        assert server.wait(timeout=20) == 0
        assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer
        assert "Traceback" not in log_of(server)


def half_a_request(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    return connection


def test_idle_connections_beyond_the_limit_of_files_cost_nobody_anything() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))\n" + FAKE
    with process("-c", limited, "PORT", "1") as (url, server), ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        for number in range(600):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            if number % 100 == 99:
                assert status_of(url, "/health") == 200
        server.terminate()
        assert server.wait(timeout=20) == 0
        log = log_of(server)
        assert "(400) allows" in log and "Traceback" not in log


def test_a_limit_of_files_that_is_too_low_is_said() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n" + FAKE
    done = subprocess.run(
        [sys.executable, "-c", limited, "1", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "raise `ulimit -n`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ([], {"TANGRAM_API_KEY": ""}, "TANGRAM_API_KEY"),
        ([], {"TANGRAM_API_KEY": "  "}, "TANGRAM_API_KEY"),
        (["--api-key", b"\xff"], {}, "not UTF-8"),
        (["--served-model-name", b"\xff"], {}, "served_model_name"),
        (["--served-model-name", ""], {}, "served_model_name ''"),
    ],
)
def test_keys_and_names_that_would_open_or_break_the_server(
    python: list[str],
    folder: Path,
    arguments: list[str | bytes],
    variables: dict[str, str],
    words: str,
) -> None:
    command = [*python, "-m", "tangram", *options(folder, name=None), *arguments]
    command[command.index("PORT")] = str(free_port())
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    assert mentions(done.stderr.decode(), words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def options(folder: Path, *more: str, name: str | None = MODEL) -> list[str]:
    named = [] if name is None else ["--served-model-name", name]
    return [
        "serve",
        str(folder),
        "--load-format",
        "dummy",
        *named,
        "--port",
        "PORT",
        "--chunk-tokens",
        "64",
        "--kv-cache-gib",
        "0.02",
        "--max-num-batched-tokens",
        "256",
        *more,
    ]


def test_where_the_model_lies_is_told_to_nobody(python: list[str], folder: Path) -> None:
    started = process(
        "-m",
        "tangram",
        *options(folder, "--kv-retention", "1.0", "--metrics-aliases", "vllm", name=None),
        python=python,
    )
    with started as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == folder.name
        answer = client.post(COMPLETIONS, json=body(numbers(9), model=folder.name))
        assert (answer.status_code, answer.json()["model"]) == (200, folder.name)
        other = client.post(COMPLETIONS, json=body(numbers(9), model=str(folder)))
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        unknown = client.get("/v1/models/gpt-4")
        assert mentions(unknown.json()["error"]["message"], f"{folder.name}")
        told = [client.get(path) for path in ("/v1/models", "/openapi.json", "/metrics")]
        assert not any(str(folder.parent) in response.text for response in (answer, unknown, *told))


def test_a_dying_engine_ends_the_process_and_nobody_waits_for_it(
    python: list[str], folder: Path
) -> None:
    server_options = options(folder, "--kv-retention", "1.0", "--max-num-seqs", "2")
    dying = process("-c", DYING, *server_options, python=python)
    with dying as (url, server), ThreadPoolExecutor(6) as pool:
        asked = body(numbers(20), max_tokens=2000)
        waiting: list[Future[httpx.Response]] = [
            pool.submit(
                httpx.post, url + COMPLETIONS, json=asked | {"stream": number % 2 == 0}, timeout=30
            )
            for number in range(6)
        ]
        answers = [each.result() for each in waiting]
        assert status_of(url, "/health") == 503
        assert server.wait(timeout=15) == 1
        for answer in answers:
            if answer.status_code == 200:
                assert json.loads(stream_data(answer)[-2])["error"]["type"] == "server_error"
            else:
                assert answer.status_code in (500, 503)
            assert "CUDA" not in answer.text
        assert "unspecified launch failure" in log_of(server)


def read_load(url: str) -> tuple[float, float]:
    """How many run and how many wait."""
    with httpx.Client(base_url=url) as client:
        found = scrape(client)
    return found["tangram_requests_running", ""], found["tangram_requests_waiting", ""]


def test_sigterm_under_load_lets_a_real_engine_end_what_it_has_taken(
    python: list[str], folder: Path
) -> None:
    """Those that wait for a place have been taken, too."""
    server_options = options(
        folder, "--kv-retention", "1.0", "--max-num-seqs", "4", "--shutdown-grace-s", "120"
    )
    started = process("-m", "tangram", *server_options, python=python)
    with started as (url, server), ThreadPoolExecutor(12) as pool:
        answers = [
            pool.submit(
                httpx.post,
                url + COMPLETIONS,
                timeout=120,
                json=body(numbers(20, 3 + number), max_tokens=500, stream=number % 2 == 0),
            )
            for number in range(12)
        ]
        wait_until(lambda: read_load(url) == (4, 8), "there is no load", 30)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(url, "/ready") == 503, "it is still ready")
        assert httpx.post(url + COMPLETIONS, json=body(numbers(9))).status_code == 503
        for number, answer in enumerate(answers):
            response = answer.result()
            assert response.status_code == 200
            if number % 2:
                assert response.json()["usage"]["completion_tokens"] == 500
            else:
                *chunks, last, done = stream_data(response)
                assert (len(chunks), done) == (499, "[DONE]")
                assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert server.wait(timeout=60) == 0, "it waits for its grace to be over"
        assert "Traceback" not in log_of(server)


def test_who_is_answered_as_a_whole_hears_of_a_kill_at_once(
    python: list[str], folder: Path
) -> None:
    started = process("-m", "tangram", *options(folder, "--kv-retention", "1.0"), python=python)
    with started as (url, server):
        with ThreadPoolExecutor(2) as pool:
            asked = [
                body(numbers(20, 3), max_tokens=3000),
                body(numbers(20, 5), max_tokens=3000, n=2),
            ]
            answers = [
                pool.submit(httpx.post, url + COMPLETIONS, json=each, timeout=60) for each in asked
            ]
            wait_until(lambda: read_load(url) == (3, 0), "they do not run", 30)
            server.kill()
            for answer in answers:
                told = answer.result()
                assert told.status_code == 503
                assert mentions(told.json()["error"]["message"], "engine stopped")
        assert server.wait(timeout=10) == -signal.SIGKILL


def test_after_a_kill_the_next_start_finds_the_cache_as_it_was(
    python: list[str], folder: Path, tmp_path: Path
) -> None:
    command, cache = ("-m", "tangram", *options(folder, "--kv-retention", "0.5")), str(tmp_path)
    first = process(*command, python=python, TANGRAM_CACHE=cache, start_s=120)
    with first as (url, server):
        expected = httpx.post(url + COMPLETIONS, json=body(numbers(200))).json()["choices"]
        with httpx.stream(
            "POST", url + COMPLETIONS, json=body(numbers(20), stream=True, max_tokens=3000)
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.kill()
            *_, error, _, done, _ = lines
        assert mentions(error, "engine stopped") and done == "data: [DONE]"
    (profile,) = tmp_path.glob("weights/*/profiles/*.json")
    written_ns = profile.stat().st_mtime_ns
    with process(*command, TANGRAM_CACHE=cache, start_s=120) as (url, server):
        assert httpx.post(url + COMPLETIONS, json=body(numbers(200))).json()["choices"] == expected
        assert healthy(url)
        wait_until(
            lambda: 'tangram_kv_pages{state="held"} 0.0' in httpx.get(url + "/metrics").text,
            "pages are held",
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=15) == 0
    assert profile.stat().st_mtime_ns == written_ns


def test_a_cache_folder_that_cannot_be_written_costs_the_cache_only(
    python: list[str], folder: Path, tmp_path: Path
) -> None:
    tmp_path.joinpath("file").write_text("not a folder")
    command, cache = (
        ("-m", "tangram", *options(folder, "--kv-retention", "0.5")),
        str(tmp_path / "file"),
    )
    started = process(*command, python=python, TANGRAM_CACHE=cache, start_s=120)
    with started as (url, server):
        assert httpx.post(url + COMPLETIONS, json=body(numbers(200))).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=15) == 0
        assert "could not be kept" in log_of(server)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def list_children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_template_that_never_ends_holds_up_no_other_request_and_not_the_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    """What renders it ends with the server, however that ends."""
    folder = tiny_folder(tmp_path, vocabulary=49152)
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = (
        f"{{% if messages[0].content == 'loop' %}}{LOOP}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    tokenizer.save_pretrained(folder)
    started = process("-m", "tangram", *options(folder, "--kv-retention", "1.0"), start_s=180)
    with started as (url, server), ThreadPoolExecutor(1) as pool:
        children = list_children(server.pid)
        assert len(children) == 3, "the API process, and what renders for it"
        looping = pool.submit(httpx.post, url + CHAT, json=said("loop"), timeout=60)
        slowest_s = 0.0
        while not looping.done():
            begin_s = time.monotonic()
            assert status_of(url, "/health") == 200
            assert httpx.post(url + CHAT, json=said("hi"), timeout=60).status_code == 200
            assert httpx.post(url + COMPLETIONS, json=body(numbers(9)), timeout=60).is_success
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
        assert_refused(looping.result(), "messages", "template 5 1024")
        assert slowest_s < MOST_S, "others have waited for it"
        looping = pool.submit(httpx.post, url + CHAT, json=said("loop"), timeout=60)
        children = list_children(server.pid)
        server.send_signal(number)
        assert server.wait(timeout=60) == (0 if number is signal.SIGTERM else -number)
        if number is signal.SIGTERM:
            assert looping.result().status_code in (400, 503)
        wait_until(lambda: not any(map(is_there, children)), "what renders goes on")


def is_there(pid: int) -> bool:
    """Whether the process lives; one that its parent has not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
