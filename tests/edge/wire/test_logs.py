"""The log as JSON: every line an object, a line a request under the id that was answered, nothing
private in any.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tangram.serve.observability.logs import LOST_TOKENS, JsonFormatter, LogLines, LossLog
from tangram.serve.observability.record import Generation, Record
from tangram.types import Event, LossReason, LostPrefix, Request, SamplingParams, Usage
from tests.mentions import mentions

from .conftest import (
    CHAT,
    MODEL,
    REAL_START_S,
    EngineServer,
    chat_body,
    free_port,
    healthy,
    stream_data,
    wait_until,
)
from .test_process import ROOT, options
from .tiny import body, numbers, tiny_folder

SECRET, KEY = "the colour of my house is vermilion", "sk-do-not-tell"


class Lines(logging.Handler):
    """What the server's loggers say, as it would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    @property
    def requests(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text]
        return [line for line in lines if line["logger"] == "tangram.requests"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("tangram")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


class FullLog(io.StringIO):
    """A log on a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_without_space_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Not once a request, with a traceback each."""
    handler = LogLines(FullLog())
    for number in range(3):
        handler.handle(logging.LogRecord("a", logging.INFO, "a.py", 1, "%d", (number,), None))
    (said,) = capsys.readouterr().err.splitlines()
    assert mentions(said, "log lost space")


def test_a_line_a_request_says_what_the_answer_was(fake_server: EngineServer, lines: Lines) -> None:
    with fake_server.http() as client:
        body = chat_body(max_tokens=5, kv_retention=0.5, kv_scorer="tova")
        response = client.post(CHAT, json=body)
        wait_until(lambda: len(lines.requests) == 1, "there is no line")
    (line,), usage = lines.requests, response.json()["usage"]
    expected = {
        "level": "info",
        "message": f"POST {CHAT}: 200",
        "request_id": response.headers["x-request-id"],
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "response_id": response.json()["id"],
        "stream": False,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": 0,
        "completion_tokens": 5,
        "kv_retention": 0.5,
        "kv_scorer": "tova",
        "finish_reasons": ["length"],
        "kv_bytes": usage["kv_bytes"],
        "lost_tokens": 0,
        "lost_reason": None,
        "failure": None,
    }
    assert {name: line.get(name) for name in expected} == expected
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["duration_s"] < 10


def test_a_response_in_the_background_has_its_line_once_it_has_ended(
    fake_server: EngineServer, lines: Lines
) -> None:
    body = {"model": MODEL, "background": True, "input": "abc"}
    with fake_server.http() as client:
        ids = [client.post("/v1/responses", json=body).json()["id"]]
        ids += [client.post("/v1/responses", json=body | {"input": "endless"}).json()["id"]]
        wait_until(lambda: bool(lines.requests), "there is no line")
        client.post(f"/v1/responses/{ids[1]}/cancel")
        wait_until(lambda: len(lines.requests) == 3, "there are not three lines")
    ended, cancelled = (line for line in lines.requests if "response_id" in line)
    assert [ended["response_id"], cancelled["response_id"]] == ids
    assert (ended["prompt_tokens"], ended["completion_tokens"]) == (9, 9)
    assert ended["finish_reasons"] == ["stop"] and ended["failure"] is None
    assert 0 <= ended["queue_s"] <= ended["first_token_s"] <= ended["duration_s"] < 10
    assert cancelled["completion_tokens"] > 0 and cancelled["failure"] == 409


def test_a_large_loss_has_a_line_without_texts_and_not_one_a_request(lines: Lines) -> None:
    """Rates of losses are in the metrics."""
    log, known = LossLog(), tuple(range(24))
    for number, tokens in enumerate((LOST_TOKENS, 61_204, 50_000)):
        generation = Generation(
            f"a{number}", [Request("a", (1, 2), SamplingParams())], stream=False
        )
        lost = LostPrefix(LossReason.DIVERGED, tokens, 41, known)
        usage = Usage(2, 0, 0, 0, 0)
        generation.note(0, Event("a", 0, (), (), usage, lost=lost), 0.0)
        log(Record(f"req-{number}", "POST", CHAT, {}, 0.0, 0, generation=generation))
    (line,) = map(json.loads, lines.text)
    assert line["request_id"] == "req-1" and line["level"] == "info"
    assert mentions(line["message"], "61,204 again token 41 explain_reuse")


def test_what_never_reached_the_engine_has_a_line_too(
    locked_server: EngineServer, lines: Lines
) -> None:
    with locked_server.http() as client:
        ids = [client.post(CHAT, json=chat_body()).headers["x-request-id"]]
        client.headers["Authorization"] = "Bearer sesame"
        ids += [client.post(CHAT, json=chat_body(oops=1)).headers["x-request-id"]]
        ids += [client.get("/" + "x" * 300).headers["x-request-id"]]
        ids += [client.get("/health").headers["x-request-id"]]
        wait_until(lambda: len(lines.requests) == 4, "there are not four lines")
    assert [line["request_id"] for line in lines.requests] == ids
    assert [line["status"] for line in lines.requests] == [401, 400, 404, 200]
    assert [line["level"] for line in lines.requests] == ["info", "info", "info", "debug"]
    assert all("prompt_tokens" not in line for line in lines.requests)
    assert len(lines.requests[2]["path"]) == 200


def test_a_failure_half_way_and_a_client_that_hangs_up(
    fake_server: EngineServer, lines: Lines
) -> None:
    asked = chat_body(stream=True, max_tokens=None)
    with fake_server.http() as client:
        stream_data(
            client.post(CHAT, json=asked | {"messages": [{"role": "user", "content": "broken"}]})
        )
        endless = asked | {"messages": [{"role": "user", "content": "endless"}]}
        with client.stream("POST", CHAT, json=endless) as response:
            next(response.iter_lines())
        wait_until(lambda: len(lines.requests) == 2, "there are not two lines")
    failed, left = lines.requests
    assert failed["status"] == 200 and failed["failure"] == 500 and failed["completion_tokens"] == 2
    assert left["finish_reasons"] == ["abort"] and left["completion_tokens"] >= 1


def test_the_engine_knows_a_request_by_the_id_that_is_answered(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        one = client.post(CHAT, json=chat_body()).headers["x-request-id"]
        many = client.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]}).headers[
            "x-request-id"
        ]
    assert [request.request_id for request in fake_server.engine.submitted] == [
        one,
        f"{many}-0",
        f"{many}-1",
    ]


@pytest.mark.parametrize("place", ["message", "field", "path", "query", "header", "key"])
def test_no_line_has_a_prompt_an_answer_or_a_key(
    locked_server: EngineServer, lines: Lines, place: str
) -> None:
    told = chat_body(messages=[{"role": "user", "content": SECRET}])
    with locked_server.http() as client:
        client.headers["Authorization"] = "Bearer sesame"
        match place:
            case "message":
                client.post(CHAT, json=told)
                stream_data(client.post(CHAT, json=told | {"stream": True}))
            case "field":
                client.post(CHAT, json=chat_body(stop=[SECRET, 3], user=SECRET))
            case "path":
                client.get("/v1/models", params={"q": KEY})
            case "query":
                client.post(CHAT, params={"key": KEY}, json=told)
            case "header":
                client.post(CHAT, json=told, headers={"x-secret": KEY, "traceparent": KEY})
            case "key":
                client.post(CHAT, json=told, headers={"Authorization": f"Bearer {KEY}"})
        wait_until(lambda: bool(lines.requests), "there is no line")
    written = "".join(lines.text)
    for private in (SECRET, SECRET[::-1], KEY, "sesame"):
        assert private not in written


def test_an_exception_stays_one_line(lines: Lines) -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        logging.getLogger("tangram.x").exception(
            "it broke:\n%s", "here", extra={"request_id": "req-1"}
        )
    (line,) = lines.text
    assert "\n" not in line
    parsed = json.loads(line)
    assert (
        parsed["request_id"] == "req-1"
        and "line two" in parsed["exception"]
        and parsed["level"] == "error"
    )


@contextmanager
def start(
    python: list[str], folder: Path, port: int, *more: str
) -> Iterator[subprocess.Popen[str]]:
    """A server, which is ended also where a test fails."""
    command = [
        text.replace("PORT", str(port)) for text in options(folder, "--log-format", "json", *more)
    ]
    with subprocess.Popen(
        [*python, "-m", "tangram", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_servers_whole_life_is_lines_of_json(python: list[str], tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    more = ("--kv-retention", "1.0", "--api-key", KEY)
    with start(python, tiny_folder(tmp_path), port, *more) as server:
        wait_until(
            lambda: server.poll() is not None or healthy(url),
            "the server is not healthy",
            REAL_START_S,
        )
        head = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(
            f"{url}/v1/completions", json=body(numbers(70)), headers=head, timeout=30
        )
        server.send_signal(signal.SIGTERM)
        written, errors = server.communicate(timeout=30)
    parsed = [json.loads(line) for line in written.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in parsed)
    assert any("tokens fit" in line["message"] for line in parsed), (
        "the start is logged in the same form"
    )
    (request,) = [line for line in parsed if line["logger"] == "tangram.requests"]
    assert (
        request["request_id"] == answer.headers["x-request-id"]
        and request["completion_tokens"] == 8
    )
    assert KEY not in written + errors


def test_a_start_that_fails_says_why_in_a_line_of_json(python: list[str], tmp_path: Path) -> None:
    with start(
        python,
        tiny_folder(tmp_path),
        free_port(),
        "--kv-retention",
        "0.5",
        "--profile",
        "nowhere.json",
    ) as server:
        written, errors = server.communicate(timeout=60)
    assert server.returncode == 2 and "nowhere.json" not in errors, "it is told twice"
    *_, last = [json.loads(line) for line in written.splitlines()]
    assert last["level"] == "critical" and "nowhere.json" in last["message"]
