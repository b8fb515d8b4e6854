"""The endpoints below /v1/kv and the page's files: what they show, and to whom."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema_rs
import numpy as np
import pytest

from tangram.serve.options import Visibility
from tangram.watch import News, PageState, PoolReading, StepDone
from tangram.web.collector import READ_EVERY_S, Collector
from tangram.web.desk import MOST_WATCHERS
from tangram.web.history import History, Line
from tangram.web.watchers import PING_S, Watcher
from tests.edge.wire.conftest import (
    CHAT,
    USER,
    EngineServer,
    chat_body,
    run_page_server,
    wait_until,
)
from tests.edge.wire.watched_engine import CHOSEN, CHUNK, HEADS, LAYERS

EVENTS = "/v1/kv/events"
SESAME, POPPY = ({"Authorization": f"Bearer {key}"} for key in ("sesame", "poppy"))
OURS = ("/v1/kv/model", "/v1/kv/pool", "/v1/kv/history")
FILES = ("/", "/learn", "/page/index.html")
ENDLESS = chat_body(stream=True, max_tokens=None, messages=[USER | {"content": "endless"}])


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    with run_page_server() as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[EngineServer]:
    with run_page_server("sesame", "poppy") as found:
        yield found


class Stream:
    """A stream of events, read one by one."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()

    def next(self, *kinds: str) -> tuple[str, Any]:
        """The next event of one of `kinds`, or of any."""
        while True:
            kind = self._field("event")
            data = json.loads(self._field("data"))
            if not kinds or kind in kinds:
                return kind, data

    def _field(self, name: str) -> str:
        return next(line for line in self._lines if line.startswith(name))[len(name) + 2 :]


@contextmanager
def watching(server: EngineServer, headers: dict[str, str] | None = None) -> Iterator[Stream]:
    with server.http() as client, client.stream("GET", EVENTS, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)


def ask(
    server: EngineServer, content: str, headers: dict[str, str] | None = None, **fields: Any
) -> Any:
    with server.http() as client:
        body = chat_body(messages=[USER | {"content": content}], **fields)
        response = client.post(CHAT, json=body, headers=headers)
        return response.json() | {"request_id": response.headers["x-request-id"]}


def test_a_request_shows_its_tokens_chunks_and_use(server: EngineServer) -> None:
    answer = ask(server, "say all of it: é")
    with server.http() as client:
        told = client.get(f"/v1/kv/requests/{answer['id']}").json()
        again = client.get(f"/v1/kv/requests/{answer['request_id']}?tokens_from=5").json()
    usage = answer["usage"]
    assert told["state"] == "ended" and told["kv_retention"] == 0.5
    assert told["prompt_tokens"] == usage["prompt_tokens"]
    assert told["output_tokens"] == usage["completion_tokens"]
    assert told["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert told["computed_tokens"] == told["prompt_tokens"] - told["cached_tokens"]
    for name in ("kv_bytes", "kv_bytes_uncompressed"):
        assert told[name] == usage[name]
    text = "".join(token["text"] for token in told["tokens"])
    assert text == "<user>say all of it: é" + answer["choices"][0]["message"]["content"]
    assert [token["id"] for token in told["tokens"]] == list(map(ord, text))
    assert again["tokens"] == told["tokens"][5:] and again["id"] == answer["id"]
    assert told["sealed_chunks"] == len(told["chunks"]) == len(text) // CHUNK
    assert told["raw"] == {"begin": told["sealed_chunks"] * CHUNK, "end": len(text)}
    assert told["chunks"][1] == {
        "index": 1,
        "begin": CHUNK,
        "end": 2 * CHUNK,
        "recorded": True,
        "drafts_recorded": False,
        "shared_by": 1,
        "in": "device",
    }
    times = told["times"]
    assert 0 < times["queued"] <= times["first_token"] <= times["ended"]


def test_kept_positions_are_bits_of_layers_heads_and_tokens(server: EngineServer) -> None:
    answer = ask(server, "something of a few chunks")
    with server.http() as client:
        told = client.get(f"/v1/kv/requests/{answer['id']}/kept?chunk=1").json()
        missing = client.get(f"/v1/kv/requests/{answer['id']}/kept?chunk=99")
    assert (told["chunk"], told["begin"], told["tokens"]) == (1, CHUNK, CHUNK)
    bits = np.unpackbits(np.frombuffer(b64decode(told["bits"]), np.uint8), bitorder="little")
    assert (bits.reshape(LAYERS, HEADS, CHUNK) == CHOSEN).all()
    assert told["draft_bits"] is None
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "no_such_chunk"


def test_a_lossless_request_tells_what_its_drafts_read(server: EngineServer) -> None:
    answer = ask(server, "something of a few chunks", kv_retention=1.0)
    with server.http() as client:
        told = client.get(f"/v1/kv/requests/{answer['id']}").json()
        kept = client.get(f"/v1/kv/requests/{answer['id']}/kept?chunk=1").json()
    assert all(chunk["recorded"] and chunk["drafts_recorded"] for chunk in told["chunks"])
    held, drafted = (
        np.unpackbits(np.frombuffer(b64decode(kept[name]), np.uint8), bitorder="little")
        for name in ("bits", "draft_bits")
    )
    assert held.all() and (drafted.reshape(LAYERS, HEADS, CHUNK) == CHOSEN).all()


def test_the_pool_numbers_conversations(server: EngineServer) -> None:
    with server.http() as client, client.stream("POST", CHAT, json=ENDLESS) as response:
        lines = response.iter_lines()  # once it is forgotten, the connection is closed
        next(lines)
        name = response.headers["x-request-id"]
        time.sleep(2 * READ_EVERY_S)  # the pool is read so often
        shown = client.get(f"/v1/kv/requests/{name}").json()
        told = client.get("/v1/kv/pool").json()
        answer = next(one for one in told["conversations"] if one["id"] == shown["id"])
    states = np.frombuffer(b64decode(told["states"]), np.uint8)
    owners = np.frombuffer(b64decode(told["owners"]), "<u2")
    assert len(states) == len(owners) == told["pages_total"]
    assert (states[:10] == 3).all() and (owners[:10] == answer["number"]).all()
    assert (owners[states == 0] == 0).all()
    assert (told["promised"], told["host_used"], told["host_total"]) == (12, 20, 50)
    assert shown["state"] == "running" and shown["conversation"] == answer["number"]
    assert shown["output_tokens"] > 0


def test_the_pool_is_told_before_anything_runs() -> None:
    with run_page_server() as server, server.http() as client:
        told = client.get("/v1/kv/pool").json()
    assert told["host_total"] == 50 and told["conversations"] == []
    assert not any(b64decode(told["states"]))


def test_events_come_within_a_tenth_of_a_second(server: EngineServer) -> None:
    late: list[float] = []
    body = ENDLESS | {"messages": [USER | {"content": "its own, and endless"}]}
    with watching(server) as stream:
        kind, hello = stream.next()
        assert kind == "hello" and len(hello["last_steps"]) <= 400
        begin_s = time.monotonic() - hello["at"]
        with server.http() as client, client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            came: dict[str, Any] = {}
            while len(late) < 200:
                kind, told = stream.next()
                came[kind] = told
                if kind == "step":
                    late.append(time.monotonic() - begin_s - told["at"])
    assert came["request"]["state"] == "running"
    assert {"changes", "host_used", "promised"} == came["pool"].keys()
    # The clocks are compared by way of `hello`, which takes some milliseconds itself.
    assert np.median(late) < 0.1, f"events were {np.median(late):.3f} s late"
    assert came["step"]["n"] > 0 and came["step"]["decode_rows"] == 1


def test_the_last_steps_are_told_first(server: EngineServer) -> None:
    ask(server, "a few steps")
    with watching(server) as stream:
        _, hello = stream.next("hello")
    numbers = [step["n"] for step in hello["last_steps"]]
    assert numbers and numbers == sorted(numbers)


# -- who sees what ---------------------------------------------------------------------------------


def test_another_key_sees_neither_request_nor_text(locked: EngineServer) -> None:
    with watching(locked, SESAME) as mine, watching(locked, POPPY) as theirs:
        answer = ask(locked, "the secret word is rosebud", SESAME)
        _, told = mine.next("request")
        assert told["id"] == answer["id"]
        ask(locked, "and this ends the test", POPPY)
        seen = []
        while not seen or seen[-1][1].get("state") != "ended":
            seen.append(theirs.next())
    text = json.dumps(seen)
    assert answer["id"] not in text and "rosebud" not in text
    assert any(kind == "step" for kind, _ in seen), "steps are everybody's"
    with locked.http() as client:
        for name in (answer["id"], answer["request_id"]):
            for path in (f"/v1/kv/requests/{name}", f"/v1/kv/requests/{name}/kept?chunk=0"):
                assert client.get(path, headers=SESAME).status_code == 200
                refused = client.get(path, headers=POPPY)
                never = client.get(path.replace(name, "chatcmpl-none"), headers=POPPY)
                assert refused.status_code == never.status_code == 404
                assert refused.json() == never.json(), "an id of another key says nothing"


def test_the_pool_names_only_own_conversations(locked: EngineServer) -> None:
    with (
        locked.http() as client,
        client.stream("POST", CHAT, json=ENDLESS, headers=SESAME) as response,
    ):
        lines = response.iter_lines()  # once it is forgotten, the connection is closed
        next(lines)
        time.sleep(2 * READ_EVERY_S)
        mine = client.get("/v1/kv/pool", headers=SESAME).json()["conversations"]
        theirs = client.get("/v1/kv/pool", headers=POPPY).json()["conversations"]
    assert any(entry["id"] for entry in mine)
    assert theirs and not any(entry["id"] or entry["request_id"] for entry in theirs)


@pytest.mark.parametrize("path", [*OURS, EVENTS, "/v1/kv/requests/chatcmpl-1"])
def test_data_need_a_key_and_files_do_not(path: str, locked: EngineServer) -> None:
    with locked.http() as client:
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        for file in FILES:
            assert client.get(file).status_code == 200
    for other in ("/page", "//", "/page%2f", "/v1/models", "/learn/", "//page/index.html"):
        assert raw_get(locked, other, "Host: localhost") == 401
    for other in ("/page/../v1/models", "/page/%2e%2e/v1/models", "/page//v1/models"):
        assert raw_get(locked, other, "Host: localhost") == 404


def raw_get(server: EngineServer, path: str, *headers: str) -> int:
    """The status for a request with exactly these headers."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        lines = [f"GET {path} HTTP/1.1", *headers, "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Host: 127.0.0.1:8000"], 200),
        (["Host: localhost"], 200),
        (["Host: LocalHost:80"], 200),
        (["Host: [::1]:8000"], 200),
        (["Host: chat.localhost"], 200),
        (["Host: 127.0.0.1:8000", "Origin: http://127.0.0.1:8000"], 200),
        (["Host: rebound.example"], 403),
        (["Host: 127.0.0.1.rebound.example"], 403),
        (["Host: localhost.rebound.example:80"], 403),
        (["Host: localhost@rebound.example"], 403),
        (["Host: 0.0.0.0"], 403),
        (["Host: 10.1.2.3"], 403),
        (["Host:"], 403),
        (["Host: 127.0.0.1:8000", "Origin: https://rebound.example"], 403),
        (["Host: 127.0.0.1:8000", "Origin: null"], 403),
    ],
)
def test_without_keys_the_host_must_be_ours(
    headers: list[str], status: int, server: EngineServer
) -> None:
    for path in (*OURS, *FILES):
        assert raw_get(server, path, *headers) == status


@pytest.mark.parametrize(
    ("visibility", "keys", "status"),
    [
        (Visibility.auto, (), 403),
        (Visibility.local, (), 403),
        (Visibility.local, ("sesame",), 403),
        (Visibility.open, (), 200),
        (Visibility.auto, ("sesame",), 200),
        (Visibility.open, ("sesame",), 200),
    ],
)
def test_clients_of_other_machines_see_it_if_it_is_open_or_they_have_a_key(
    visibility: Visibility, keys: tuple[str, ...], status: int
) -> None:
    """A proxy on this machine says for whom it asks; uvicorn believes it."""
    with run_page_server(*keys, visibility=visibility) as server, server.http() as client:
        far = {"X-Forwarded-For": "203.0.113.9", **(SESAME if keys else {})}
        for path in (*OURS, *FILES):
            assert client.get(path, headers=far).status_code == status
        assert client.get("/v1/models", headers=far).status_code == 200
        near = SESAME if keys else {}
        assert client.get("/v1/kv/pool", headers=near).status_code == 200


# -- files, limits, the end ------------------------------------------------------------------------


def test_files_load_nothing_from_elsewhere(server: EngineServer) -> None:
    with server.http() as client:
        for path in FILES:
            response = client.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/html")
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy and "http" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            tag = {"If-None-Match": response.headers["etag"]}
            assert client.get(path, headers=tag).status_code == 304
        for path in ("/page/", "/page/../api.py", "/page/%2e%2e/api.py", "/page/none.js"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("history?seconds=9", "seconds"),
        ("history?seconds=3601", "seconds"),
        ("history?seconds=x", "seconds"),
        ("requests/a?index=-1", "index"),
        ("requests/a?tokens_from=1e9", "tokens_from"),
        ("requests/a/kept", "chunk"),
    ],
)
def test_wrong_parameters_are_named(query: str, param: str, server: EngineServer) -> None:
    with server.http() as client:
        response = client.get(f"/v1/kv/{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_endpoints_are_described(server: EngineServer, locked: EngineServer) -> None:
    with server.http() as client:
        document = client.get("/openapi.json").json()
    paths = {path for path in document["paths"] if path.startswith("/v1/kv/")}
    request = "/v1/kv/requests/{id}"
    assert paths == {*OURS, EVENTS, request, f"{request}/kept"}
    for path in paths:
        assert {"400", "403"} <= document["paths"][path]["get"]["responses"].keys()
    assert "404" in document["paths"][request]["get"]["responses"]
    with locked.http() as client:
        described = client.get("/openapi.json", headers=SESAME).json()
    assert "401" in described["paths"][EVENTS]["get"]["responses"]


def schema_of(document: Any, path: str) -> Any:
    """The schema of the answer to GET `path`."""
    responses = document["paths"][path]["get"]["responses"]
    return responses["200"]["content"]["application/json"]["schema"]


@pytest.mark.parametrize("path", [*OURS, "/v1/kv/requests/{id}", "/v1/kv/requests/{id}/kept"])
def test_answers_have_the_fields_that_are_described(path: str, server: EngineServer) -> None:
    """All of them, each of its type, and no others."""
    answers = [ask(server, "of some chunks", kv_retention=ratio) for ratio in (0.5, 1.0)]
    with server.http() as client:
        document = client.get("/openapi.json").json()
        query = "?chunk=0" if path.endswith("kept") else ""
        found = [
            client.get(path.replace("{id}", answer["id"]) + query).json() for answer in answers
        ]
    schema = schema_of(document, path)
    for answer in found:
        jsonschema_rs.validate(schema, answer)
        assert answer.keys() == schema["properties"].keys() == set(schema["required"])
        for name in answer:
            with pytest.raises(jsonschema_rs.ValidationError):
                jsonschema_rs.validate(schema, answer | {name: {"another": "type"}})


def test_a_line_of_the_history_has_the_types_that_are_described(server: EngineServer) -> None:
    """The first comes after ten seconds, so one is made."""
    history = History(0.0)
    for now_s in (0.0, 10.0):
        history.sample(server.engine.stats(), now_s)
    answer = history.read(10)
    assert answer["at"] == [10.0] and answer["ttft_p50"] == [None]
    with server.http() as client:
        schema = schema_of(client.get("/openapi.json").json(), "/v1/kv/history")
    jsonschema_rs.validate(schema, answer)
    for name, values in answer.items():
        if isinstance(values, list):
            with pytest.raises(jsonschema_rs.ValidationError):
                jsonschema_rs.validate(schema, answer | {name: ["a word"]})


def test_the_fields_of_events_and_of_the_history_are_documented(server: EngineServer) -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    section = text.split("\n## The cache in detail\n")[1].split("\n## ")[0]
    told: dict[str, Any] = {}
    with (
        watching(server) as stream,
        server.http() as client,
        client.stream("POST", CHAT, json=ENDLESS) as response,
    ):
        lines = response.iter_lines()  # once it is forgotten, the connection is closed
        next(lines)
        while not {"step", "request", "pool"} <= told.keys():
            kind, told[kind] = stream.next()
    for kind in ("step", "request", "pool"):
        (line,) = re.findall(rf"^\| `{kind}` \|(.*)", section, re.MULTILINE)
        assert told[kind].keys() == set(re.findall(r"`(\w+)`", line))
    (history,) = re.findall(r"^The history has .*?\n\n", section, re.MULTILINE | re.DOTALL)
    assert {field.name for field in fields(Line)} == set(re.findall(r"`(\w+)`", history))


def test_watchers_are_bounded() -> None:
    with run_page_server() as server, server.http() as client:
        limits = httpx.Limits(max_connections=MOST_WATCHERS + 1)
        with httpx.Client(base_url=server.url, timeout=10, limits=limits) as many:
            open_ones = []
            for _ in range(MOST_WATCHERS):
                request = many.build_request("GET", EVENTS)
                open_ones.append(many.send(request, stream=True))
            refused = client.get(EVENTS)
            for response in open_ones:
                response.close()
        assert refused.status_code == 429

        def let_in() -> bool:
            with client.stream("GET", EVENTS) as response:
                return response.status_code == 200

        wait_until(let_in, "watchers that left still count")


def test_watchers_that_come_at_once_are_bounded_too() -> None:
    """The bound holds between the question and the first byte of the answer."""

    codes: list[int] = []
    most = 3 * MOST_WATCHERS

    async def ask(client: httpx.AsyncClient, answered: asyncio.Event) -> None:
        async with client.stream("GET", EVENTS) as response:
            codes.append(response.status_code)
            if len(codes) == most:
                answered.set()
            await answered.wait()

    async def ask_all(url: str) -> None:
        answered, limits = asyncio.Event(), httpx.Limits(max_connections=most)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(ask(client, answered) for _ in range(most)))

    with run_page_server() as server:
        asyncio.run(ask_all(server.url))
    assert Counter(codes) == {200: MOST_WATCHERS, 429: 2 * MOST_WATCHERS}


def test_a_page_that_no_conversation_was_seen_to_hold_has_no_owner() -> None:
    class Kept:
        def pool(self) -> PoolReading:
            """Two pages that were sealed and left between two readings."""
            states = np.array([PageState.CACHED, PageState.CACHED, PageState.FREE], np.uint8)
            return PoolReading(states, np.full(3, -1, np.int32), (), 0, 0, 0)

    async def read() -> list[dict[str, Any]]:
        collector, watcher = Collector(3), Watcher(None)
        collector.start()
        collector.enter(watcher)
        step = StepDone(1, time.monotonic(), 0.1, 0, 0, 1, 0, 0, 0, 0)
        collector.observe(News(step, (), idle=True), cast(Any, Kept()))
        collector.flush()
        collector.drain()
        return [
            json.loads(data)
            async for frames in watcher
            for data in re.findall(r"event: pool\ndata: (.*)", frames.decode())
        ]

    (told,) = asyncio.run(read())
    assert told["changes"] == [[0, PageState.CACHED, None], [1, PageState.CACHED, None]]


def test_streams_end_at_once_when_the_server_is_to_end() -> None:
    pages: list[Any] = []
    with run_page_server(change=pages.append) as server, watching(server) as stream:
        stream.next("hello")
        begin_s = time.monotonic()
        pages[0].drain()
        with pytest.raises(StopIteration):
            stream.next()
        assert time.monotonic() - begin_s < PING_S / 2, "it waits for the next ping"


def test_a_server_that_is_to_end_begins_no_stream() -> None:
    pages: list[Any] = []
    with run_page_server(change=pages.append) as server:
        pages[0].drain()
        with server.http() as client:
            assert client.get(EVENTS).text.startswith("event: hello")


def test_head_of_the_stream_ends(server: EngineServer) -> None:
    with server.http() as client:
        response = client.head(EVENTS)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")


def test_without_the_page_there_is_nothing(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        for path in (*FILES, *OURS):
            assert client.get(path).status_code == 404
