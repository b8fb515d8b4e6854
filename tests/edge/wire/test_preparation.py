"""What happens to requests before the engine has them, and to events that nobody takes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tangram.errors import OverloadError
from tangram.link.linked_engine import LinkedEngine
from tangram.serve import preparation, receiving
from tangram.serve.answers.bridge import EventStream, Limits
from tangram.serve.chat.chat_writer import ChatWriter
from tangram.serve.chat.completion_writer import CompletionWriter
from tangram.serve.observability.exposition import ServerMetrics
from tangram.serve.observability.record import Generation
from tangram.serve.preparation import WorkThreads
from tangram.serve.responses.responses_writer import ResponsesWriter
from tangram.serve.transport.api_errors import ApiError
from tangram.types import Request, SamplingParams
from tests.mentions import assert_refused, mentioning, mentions

from .conftest import CHAT, COMPLETIONS, MODEL, EngineServer, chat_body, run_fake_server, wait_until
from .fake_engine import CONTEXT_TOKENS, FakeEngine

RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    COMPLETIONS: {"model": MODEL, "prompt": "say it"},
    RESPONSES: {"model": MODEL, "input": "say it"},
    "/tokenize": {"prompt": "say it"},
    "/detokenize": {"tokens": [97]},
}


class TokenizerBarrier:
    """Where the work of the tokenizer waits until it may go on. `begun` counts it."""

    def __init__(self) -> None:
        self.begun, self.open = 0, threading.Event()

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("tokenizer"):
                self.begun += 1
                assert self.open.wait(20)
            return work(*arguments)

        return waiting


@contextmanager
def hold_tokenizer(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TokenizerBarrier]:
    """Nothing is tokenized, or made into text, until the gate is open."""
    gate, codec = TokenizerBarrier(), server.engine.codec
    monkeypatch.setattr(codec, "encode_chat", gate.before(lambda parts, salt: (97,)))
    for name in ("encode", "verbatim"):
        monkeypatch.setattr(codec, name, gate.before(getattr(codec, name)))
    try:
        yield gate
    finally:
        gate.open.set()


@pytest.mark.parametrize("path", BODIES)
def test_who_is_prepared_counts_as_waiting(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        run_fake_server(max_queue=2) as server,
        hold_tokenizer(server, monkeypatch) as gate,
        ThreadPoolExecutor(2) as pool,
        server.http() as client,
    ):
        prepared = list[int]()
        monkeypatch.setattr(WorkThreads, "run", note(prepared, WorkThreads.run))
        held = [pool.submit(client.post, CHAT, json=chat_body()) for _ in range(2)]
        # Each is rendered first.
        wait_until(lambda: len(prepared) == 4 and gate.begun == 1, "nothing is tokenized")
        refused = client.post(path, json=BODIES[path])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
        assert client.get("/health").status_code == 200
        gate.open.set()
        assert [each.result().status_code for each in held] == [200, 200]
        assert client.post(path, json=BODIES[path]).status_code == 200


def test_who_waits_in_the_engines_queue_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        run_fake_server(max_queue=5) as server,
        hold_tokenizer(server, monkeypatch) as gate,
        ThreadPoolExecutor(1) as pool,
        server.http() as client,
    ):
        held = pool.submit(client.post, CHAT, json=chat_body())
        wait_until(lambda: gate.begun == 1, "nothing is tokenized")
        server.engine.waiting = 4
        wait_until(lambda: server.linked.waiting == 4, "the engine does not tell")
        assert client.post(CHAT, json=chat_body()).status_code == 429
        gate.open.set()
        assert held.result().status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("large", [False, True])
def test_nothing_is_prepared_for_who_finds_the_queue_full(
    fake_server: EngineServer, path: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body is not even parsed; the connection serves the next request."""

    def refuse(coming: int) -> None:
        raise OverloadError("the queue is full", 7)

    parsed, tokenized = list[int](), list[int]()
    monkeypatch.setattr(receiving, "parse", note(parsed, receiving.parse))
    codec = fake_server.engine.codec
    for name in ("encode", "render_chat"):
        monkeypatch.setattr(codec, name, note(tokenized, getattr(codec, name)))
    content = json.dumps(BODIES[path]).encode() + b" " * (70_000 if large else 0)
    headers = {"Content-Type": "application/json"}
    with fake_server.http() as client:
        with monkeypatch.context() as full:
            full.setattr(fake_server.engine, "check_queue", refuse)
            # The engine tells of its queue after a step.
            wait_until(
                lambda: client.post(path, content=content, headers=headers).status_code == 429,
                "nobody hears that the queue is full",
            )
            parsed.clear()
            tokenized.clear()
            refused = client.post(path, content=content, headers=headers)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
            assert (len(parsed), len(tokenized)) == (0 if large else 1, 0)
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        (before,) = connections(client)
        wait_until(
            lambda: client.post(path, content=content, headers=headers).status_code == 200,
            "nobody hears that it is not full any more",
        )
        assert connections(client) == [before]


def note(calls: list[int], work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, of which each call adds to `calls`."""

    def noting(*arguments: Any) -> Any:
        calls.append(1)
        return work(*arguments)

    return noting


def connections(client: httpx.Client) -> list[Any]:
    """Those that `client` keeps open."""
    return list(client._transport._pool.connections)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", BODIES)
def test_who_has_hung_up_is_not_tokenized(
    fake_server: EngineServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        hold_tokenizer(fake_server, monkeypatch) as gate,
        ThreadPoolExecutor(1) as pool,
        fake_server.http() as client,
    ):
        held = pool.submit(client.post, CHAT, json=chat_body())
        wait_until(lambda: gate.begun == 1, "nothing is tokenized")
        with pytest.raises(httpx.ReadTimeout), fake_server.http() as leaving:
            leaving.post(
                path,
                json=BODIES[path] | {"stream": True} if "v1" in path else BODIES[path],
                timeout=0.2,
            )
        time.sleep(0.1)
        gate.open.set()
        assert held.result().status_code == 200
        assert client.post(CHAT, json=chat_body()).status_code == 200
        assert len(fake_server.engine.submitted) == gate.begun == 2


def test_whose_schema_is_slow_and_who_leaves_takes_no_time_from_others(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_MOST_COMPILING_S", 0.6)
    compiling = fake_server.engine.grammars.compile
    begun: list[str] = []

    def slow(source: str, field: str) -> Any:
        begun.append(source)
        if len(begun) == 1:
            time.sleep(1.2)
        return compiling(source, field)

    monkeypatch.setattr(fake_server.engine.grammars, "compile", slow)
    asked = chat_body(response_format={"type": "json_object"})
    with fake_server.http() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=asked, timeout=0.2)
        assert len(begun) == 1
        assert client.post(CHAT, json=asked).status_code == 200


class Compiler:
    """The server's grammars, of which none is made until it is `open`. `begun` has their sources,
    `asked` counts: of a known one both ends of the link ask.
    """

    def __init__(self, server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.asked, self.open = list[str](), 0, threading.Event()
        grammars = server.engine.grammars
        self._known, self._compile = grammars.look_up, grammars.compile
        monkeypatch.setattr(grammars, "look_up", self.look_up)
        monkeypatch.setattr(grammars, "compile", self.compile)

    def look_up(self, source: str, field: str) -> Any:
        self.asked += 1
        return self._known(source, field)

    def compile(self, source: str, field: str) -> Any:
        self.begun.append(source)
        assert self.open.wait(20)
        return self._compile(source, field)


def of_value(value: object) -> dict[str, Any]:
    """A request whose grammar is that of one value."""
    wish = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"const": value}}}
    return chat_body(response_format=wish)


MOST_QUEUE = 3


@pytest.mark.parametrize(
    ("max_queue", "held"),
    [(MOST_QUEUE, MOST_QUEUE), (1000, preparation._MOST_NEW_GRAMMARS)],
    ids=["queue", "grammars"],
)
def test_who_waits_for_new_grammars_keeps_nobody_else_out(
    max_queue: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile ones take seconds each: the next new one is sent away, others do not notice."""
    with run_fake_server(max_queue=max_queue) as server, server.http() as client:
        assert client.post(CHAT, json=of_value("known")).status_code == 200
        compiler = Compiler(server, monkeypatch)
        with ThreadPoolExecutor(held + 1) as pool:
            waiting = [
                pool.submit(client.post, CHAT, json=of_value(number)) for number in range(held)
            ]
            wait_until(lambda: compiler.asked == held, "they do not wait")
            refused = client.post(CHAT, json=of_value("one more"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "grammar_queue_full",
            )
            assert int(refused.headers["Retry-After"]) >= 1
            assert mentions(refused.json()["error"]["message"], f"{held} grammars")
            for asked in (chat_body(), of_value("known")):
                assert client.post(CHAT, json=asked).status_code == 200
            if max_queue > held:  # who asks for what is on its way already makes no more work
                waiting.append(pool.submit(client.post, CHAT, json=of_value(0)))
                wait_until(lambda: compiler.asked == held + 4, "it does not wait")
            assert not any(each.done() for each in waiting)
            compiler.open.set()
            assert {each.result().status_code for each in waiting} == {200}
        assert len(compiler.begun) == held
        assert client.post(CHAT, json=of_value("one more")).status_code == 200


def test_a_new_grammar_is_made_for_those_who_still_wait_for_it(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(fake_server, monkeypatch)
    with ThreadPoolExecutor(3) as pool, fake_server.http() as client:
        held = pool.submit(client.post, CHAT, json=of_value("held"))
        wait_until(lambda: compiler.asked == 1, "nobody asks")
        leaving = [
            pool.submit(client.post, CHAT, json=of_value(value), timeout=0.5)
            for value in ("shared", "nobody's")
        ]
        wait_until(lambda: compiler.asked == 3, "they do not wait")
        staying = pool.submit(client.post, CHAT, json=of_value("shared"))
        for each in leaving:
            with pytest.raises(httpx.ReadTimeout):
                each.result()
        wait_until(lambda: compiler.asked == 4, "it does not wait")
        time.sleep(0.1)
        compiler.open.set()
        assert [held.result().status_code, staying.result().status_code] == [200, 200]
    assert len(compiler.begun) == 2 and "nobody's" not in "".join(compiler.begun)


@pytest.mark.serial
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("late", [False, True])
def test_the_clock_of_a_request_runs_before_it_is_queued(
    path: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is tokenized only just in time, the rest is for the answer."""
    with (
        run_fake_server(request_timeout_s=1.0) as server,
        hold_tokenizer(server, monkeypatch) as gate,
        server.http() as client,
    ):
        if late and path in (CHAT, COMPLETIONS, RESPONSES):
            monkeypatch.setattr(server.engine, "_advance", lambda job: False)
            opening = threading.Timer(0.7, gate.open.set)
            opening.start()
        begin_s = time.monotonic()
        response = client.post(path, json=BODIES[path])
        assert 0.9 < time.monotonic() - begin_s < 1.6
        assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")
        assert "1.0 s" in response.json()["error"]["message"]


def test_text_of_tokens_is_made_beside_the_others_and_within_the_context(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [97] * (CONTEXT_TOKENS + 1)
    asked = {
        "/detokenize": {"tokens": tokens},
        COMPLETIONS: {"model": MODEL, "prompt": tokens, "echo": True},
    }
    with fake_server.http() as client, ThreadPoolExecutor(2) as pool:
        for (path, body), field in zip(asked.items(), ("tokens", "prompt"), strict=True):
            facts = f"{CONTEXT_TOKENS + 1} {CONTEXT_TOKENS} max_model_len"
            assert_refused(client.post(path, json=body), field, facts)
        with hold_tokenizer(fake_server, monkeypatch) as gate:
            bodies = [
                asked["/detokenize"] | {"tokens": [97]},
                asked[COMPLETIONS] | {"prompt": [97]},
            ]
            held = [
                pool.submit(client.post, path, json=body)
                for path, body in zip(asked, bodies, strict=True)
            ]
            time.sleep(0.2)
            assert client.get("/health", timeout=2).status_code == 200, "the server stands still"
            gate.open.set()
            assert [each.result().status_code for each in held] == [200, 200]
            assert gate.begun == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_large_answer_is_made_beside_the_others(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads = list[str]()
    for writer in (ChatWriter, CompletionWriter, ResponsesWriter):
        write = writer.write_whole

        def note_call(self: Any, usage: Any, write: Any = write) -> Any:
            threads.append(threading.current_thread().name)
            return write(self, usage)

        monkeypatch.setattr(writer, "write_whole", note_call)
    with fake_server.http() as client:
        assert client.post(path, json=BODIES[path]).status_code == 200
    assert threads and all(name.startswith("asyncio") for name in threads), (
        "on the thread of all streams"
    )


@pytest.mark.parametrize(("n", "most"), [(1, 512), (4, 2048), (128, 4096)])
def test_events_that_nobody_takes_are_bounded_and_end_with_an_error(n: int, most: int) -> None:
    """As many as 128 completions have with 512 each would be a hundred megabytes."""
    engine = FakeEngine()

    async def reader() -> None:
        prompt = tuple(map(ord, "endless"))
        asked = Request("a", prompt, SamplingParams(n=n, max_tokens=None))
        generation = Generation("a", [asked], stream=True)
        linked = LinkedEngine(engine)
        await linked.start()
        metrics = ServerMetrics(linked.stats)
        stream = await EventStream.open(linked, generation, metrics, Limits())
        await asyncio.wait_for(stream.overrun.wait(), 20)
        await asyncio.to_thread(wait_until, lambda: engine.stats().running == 0, "they still run")
        # A few more are given between the last that is kept and its end.
        assert most <= engine.stats().generated_tokens <= most + 1000 * (n if n == 1 else 8)
        with pytest.raises(ApiError, match=mentioning("faster")):
            stream.take()
        await linked.stop()

    asyncio.run(reader())
