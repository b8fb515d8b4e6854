"""Load, faults, and who leaves or comes meanwhile: each leaves the server healthy and its pages
back at the baseline.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tangram.engine.passes.forward_pass import PlannedStep
from tangram.serve.options import ServerOptions
from tests.small_engines import check_books

from .conftest import stream_data, wait_until
from .tiny import CHUNK, COMPLETIONS, TinyServer, body, numbers, run_tiny_server, tiny_folder

LONG = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TinyServer]:
    with run_tiny_server(folder, {"pending_events": 64}, max_queue=100) as server:
        yield server


@pytest.fixture(autouse=True)
def baseline(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").check_baseline()


def raw_request(
    server: TinyServer, content: dict[str, Any], receive_bytes: int | None = None
) -> socket.socket:
    """A connection that has sent a completion request and read nothing."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    data = json.dumps(content).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(data)}"
    )
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


def pages_held(server: TinyServer) -> int:
    return server.engine.stats().pages_held


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("reset", [True, False])
def test_a_disconnect_ends_the_work(
    server: TinyServer, stream: bool, phase: str, reset: bool
) -> None:
    prompt = numbers(LONG, 11 + 2 * stream) if phase == "prefill" else numbers(20)
    generated = server.engine.stats().generated_tokens
    connection = raw_request(server, body(prompt, stream=stream, max_tokens=900))
    wait_until(lambda: pages_held(server) > 0, "the request did not begin")
    if phase == "decode":
        wait_until(
            lambda: server.engine.stats().generated_tokens > generated + 5, "nothing was decoded"
        )
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_until(lambda: pages_held(server) == 0, "the abandoned request still holds pages")
    assert server.engine.stats().generated_tokens < generated + 900, "it was computed to its end"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_pages_of_an_abandoned_request_are_free_one_step_later(
    folder: Path, stream: bool, reset: bool
) -> None:
    with run_tiny_server(folder) as server:
        engine, step = server.engine, server.engine.step
        engine.step = lambda: (time.sleep(0.2), step())[1]  # type: ignore[method-assign]
        connection = raw_request(server, body(numbers(20), stream=stream, max_tokens=3000))
        wait_until(lambda: pages_held(server) > 0, "the request did not begin")
        before = engine.stats().steps
        wait_until(lambda: engine.stats().steps > before, "there are no steps")
        hung_up_at = engine.stats().steps
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        wait_until(lambda: pages_held(server) == 0, "the abandoned request still holds pages")
        # The step under way when the client hangs up, and no other.
        assert engine.stats().steps - hung_up_at <= 1
        engine.step = step  # type: ignore[method-assign]
        server.check_baseline()


def test_a_reader_that_does_not_read_is_given_up(server: TinyServer) -> None:
    fields: dict[str, Any] = {"stream": True, "n": 4, "logprobs": 20, "max_tokens": 2500}
    with closing(
        raw_request(server, body(numbers(20), **fields), receive_bytes=2048)
    ) as connection:
        generated = server.engine.stats().generated_tokens
        wait_until(lambda: pages_held(server) > 0, "the request did not begin")
        wait_until(lambda: pages_held(server) == 0, "it is served on and on", timeout_s=60)
        assert server.engine.stats().generated_tokens - generated < 10_000, "all of it was computed"
        received = bytearray()
        connection.settimeout(20)
        while part := connection.recv(1 << 16):
            received += part
        assert received and b"[DONE]" not in received


def test_who_reads_slowly_but_reads_gets_everything(server: TinyServer) -> None:
    with closing(
        raw_request(server, body(numbers(20), stream=True, max_tokens=60), 2048)
    ) as connection:
        received = bytearray()
        while b"[DONE]" not in received:
            part = connection.recv(512)
            assert part
            received += part
            time.sleep(0.005)
    assert received.count(b'"text"') == 60


def test_ten_times_as_many_requests_as_places_are_all_answered(server: TinyServer) -> None:
    expected = {step: server.complete(numbers(40, step)) for step in (3, 5, 7)}
    steps = [3, 5, 7] * 14
    with ThreadPoolExecutor(len(steps)) as pool:
        answers = list(pool.map(lambda step: server.complete(numbers(40, step)), steps))
    assert answers == [expected[step] for step in steps]


def test_who_is_being_answered_has_a_place_in_every_step_at_ten_times_the_load(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which bounds the time between its tokens by the longest step there is, however many wait.

    With a chunk that it has filled, a sequence may wait for those that the rest of the batch has
    filled in the same step, one after the other.
    """
    steps: list[tuple[set[str], int]] = []
    run = server.engine._runner.run

    def watch_load(planned: PlannedStep, *rest: Any) -> Any:
        rows = planned.step.rows
        steps.append(({row.request_id for row in rows}, sum(len(row.tokens) for row in rows)))
        return run(planned, *rest)

    monkeypatch.setattr(server.engine._runner, "run", watch_load)
    with ThreadPoolExecutor(41) as pool:
        running = pool.submit(server.complete, numbers(40, 9), max_tokens=600)
        wait_until(lambda: len(steps) > 20, "it is not being answered")
        others = [pool.submit(server.complete, numbers(90 + at, 11)) for at in range(40)]
        assert running.result() and all(other.result() for other in others)
    (mine,) = steps[0][0]
    places = [number for number, (requests, _) in enumerate(steps) if mine in requests]
    longest = max(later - earlier - 1 for earlier, later in pairwise(places))
    assert len(places) >= 600 and longest < server.engine.config.max_num_seqs
    assert places[-1] - len(places) < 600 // CHUNK, "others came first more than once a chunk"
    assert sum(len(requests) > 1 for requests, _ in steps[: len(places)]) > 20, "there was no load"
    assert max(tokens for _, tokens in steps) <= server.engine.config.max_num_batched_tokens


def test_more_than_the_queue_holds_are_told_when_to_come_back(folder: Path) -> None:
    with run_tiny_server(folder, max_queue=3, max_num_seqs=2) as server:
        held = [
            raw_request(server, body(numbers(20, step), max_tokens=3000)) for step in range(3, 5)
        ]
        wait_until(lambda: server.engine.stats().running == 2, "two did not begin")
        held += [
            raw_request(server, body(numbers(20, step), max_tokens=3000)) for step in range(5, 8)
        ]
        wait_until(lambda: server.engine.stats().waiting == 3, "three do not wait")
        with server.http() as client:
            for stream in (False, True):
                refused = client.post(COMPLETIONS, json=body(numbers(9), stream=stream))
                assert refused.status_code == 429
                assert int(refused.headers["Retry-After"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
                assert refused.json()["error"]["code"] == "queue_full"
            assert client.get("/health").status_code == 200
        for connection in held:
            connection.close()
        server.check_baseline()


@pytest.mark.parametrize("place", ["running", "waiting"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_ended(folder: Path, place: str, stream: bool) -> None:
    with (
        run_tiny_server(
            folder, {"options": ServerOptions(request_timeout_s=1.0)}, max_num_seqs=1
        ) as server,
        server.http() as client,
    ):
        if place == "waiting":
            connection = raw_request(server, body(numbers(20, 3), max_tokens=3500))
            wait_until(lambda: server.engine.stats().running == 1, "the first does not run")
        response = client.post(COMPLETIONS, json=body(numbers(20), max_tokens=3900, stream=stream))
        if stream:
            error = json.loads(stream_data(response)[-2])["error"]
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["type"] == "timeout_error" and "1.0 s" in error["message"]
        if place == "waiting":
            connection.close()
        server.check_baseline()


def test_a_compressed_request_that_was_preempted_answers_as_if_alone(folder: Path) -> None:
    fields: dict[str, Any] = {"max_tokens": 150}
    prompts = [numbers(100, step) for step in (3, 5, 7, 9)]
    with run_tiny_server(folder) as server:
        expected = [server.complete(prompt, **fields) for prompt in prompts]
        layout = server.engine.layout
    pages = layout.most_pages(250) * 2
    gib = (pages + 0.5) * layout.page_bytes(4) / 2**30
    with run_tiny_server(folder, kv_cache_gib=gib, max_model_len=256) as server:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: server.complete(prompt, **fields), prompts))
        assert server.engine.stats().preemptions > 0
        assert answers == expected
        server.check_baseline()


@pytest.mark.parametrize("stream", [True, False])
def test_nan_ends_one_request_and_no_other(server: TinyServer, stream: bool) -> None:
    bad, prompts = 299, [numbers(70, step) for step in (13, 17, 19)]
    poisoned = [*numbers(50, 23 + stream), bad, *numbers(20, 3)]
    expected = [server.complete(prompt, max_tokens=20) for prompt in prompts]
    sound = server.complete(poisoned)
    server.engine.clear_cache()

    def hook(
        module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        return torch.where((inputs[0] == bad)[..., None], torch.nan, output)

    handle = server.engine._loaded.model.get_input_embeddings().register_forward_hook(hook)
    try:
        with ThreadPoolExecutor(4) as pool, server.http() as client:
            others = pool.map(lambda prompt: server.complete(prompt, max_tokens=20), prompts)
            response = client.post(COMPLETIONS, json=body(poisoned, stream=stream))
            assert list(others) == expected
    finally:
        handle.remove()
    if stream:
        error = json.loads(stream_data(response)[0])["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["type"] == "server_error" and "NaN" in error["message"]
    cached = server.engine.stats().cached_tokens
    assert server.complete(poisoned) == sound
    assert server.engine.stats().cached_tokens == cached, "its prefix was found again"


def test_an_engine_that_dies_leaves_nobody_waiting(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_tiny_server(folder, max_num_seqs=1) as server, server.http() as client:
        content = body(numbers(20), max_tokens=3000)
        answers: dict[str, httpx.Response] = {}

        def ask(name: str, **fields: Any) -> None:
            answers[name] = client.post(COMPLETIONS, json=content | fields)

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("running", "waiting")]
        threads.append(threading.Thread(target=ask, args=("stream",), kwargs={"stream": True}))
        for thread in threads:
            thread.start()
        wait_until(lambda: server.engine.stats().waiting == 2, "two do not wait")

        def broken(*args: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        server.engine._runner.run = broken  # type: ignore[method-assign]
        for thread in threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), "somebody waits for ever"
        assert (answers["running"].status_code, answers["waiting"].status_code) == (500, 500)
        last = stream_data(answers["stream"])[-2]
        assert json.loads(last)["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 503
        assert client.post(COMPLETIONS, json=content).status_code == 503
        assert "CUDA" not in answers["running"].text + last, "the client need not know"
        check_books(server.engine)
        assert pages_held(server) == 0


def test_forked_conversations_answer_as_if_alone(server: TinyServer) -> None:
    history = numbers(3 * CHUNK + 5, 29)
    forks = [[*history, *numbers(12, step)] for step in (3, 5, 7, 9)]
    alone = [server.complete(fork, cache_salt=f"alone {at}") for at, fork in enumerate(forks)]
    server.complete(history)
    cached = server.engine.stats().cached_tokens
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(server.complete, forks)) == alone
    assert server.engine.stats().cached_tokens >= cached + 4 * 3 * CHUNK


@pytest.mark.parametrize("other", [{"cache_salt": "another"}, {"kv_retention": 1.0}])
def test_the_same_prefix_with_another_salt_or_retention_shares_nothing(
    server: TinyServer, other: dict[str, Any]
) -> None:
    prompt = numbers(4 * CHUNK, 31)
    server.complete(prompt)
    with server.http() as client:
        usages = [
            client.post(COMPLETIONS, json=body(prompt, **fields)).json()["usage"]
            for fields in ({}, other, other)
        ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] >= 3 * CHUNK and cached[1] == 0 and cached[2] >= 3 * CHUNK
    server.engine.clear_cache()


STEP_S = 0.2


@pytest.fixture(scope="module")
def quick_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    with run_tiny_server(
        tiny_folder(tmp_path_factory.mktemp("tiny")), max_num_batched_tokens=128
    ) as server:
        yield server


@pytest.fixture(scope="module")
def alone(quick_server: TinyServer) -> str:
    """The answer to the long prompt when nothing else runs."""
    return quick_server.complete(numbers(LONG, 19), cache_salt="alone")


@pytest.fixture
def slow_server(quick_server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyServer]:
    with monkeypatch.context() as patch:
        run = quick_server.engine._runner.run

        def slow(*args: Any) -> Any:
            time.sleep(STEP_S)
            return run(*args)

        patch.setattr(quick_server.engine._runner, "run", slow)
        yield quick_server
    quick_server.check_baseline()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_who_leaves_while_the_prompt_is_read_is_given_nothing(
    slow_server: TinyServer, stream: bool, reset: bool
) -> None:
    before = slow_server.engine.stats()
    # Each another one, of which nothing is cached.
    connection = raw_request(
        slow_server, body(numbers(LONG, 11 + 2 * stream + 4 * reset), stream=stream, max_tokens=900)
    )
    wait_until(
        lambda: slow_server.engine.stats().steps > before.steps + 2, "the prompt is not read"
    )
    hung_up_at = slow_server.engine.stats().steps
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_until(lambda: pages_held(slow_server) == 0, "the abandoned request still holds pages")
    after = slow_server.engine.stats()
    assert after.generated_tokens == before.generated_tokens, "it was given tokens"
    # The step under way when the client hangs up is counted already; one more may begin before the
    # server sees it.
    assert after.steps - hung_up_at <= 1


def test_a_long_prompt_and_a_flow_of_short_ones_are_all_answered(
    slow_server: TinyServer, alone: str
) -> None:
    """Short ones come one after the other and end before the long one, which ends although they
    never stop coming.
    """
    long, shorts = numbers(LONG, 19), [numbers(30, step) for step in (3, 5, 7)]
    with ThreadPoolExecutor(4) as pool:
        steps = slow_server.engine.stats().steps
        answer = pool.submit(slow_server.complete, long)
        wait_until(lambda: slow_server.engine.stats().steps > steps, "the long prompt is not read")

        def ask_again(prompt: list[int]) -> list[float]:
            times_s = []
            while not answer.done():
                begin_s = time.monotonic()
                assert slow_server.complete(prompt, max_tokens=2)
                times_s.append(time.monotonic() - begin_s)
            return times_s

        begin_s = time.monotonic()
        flows = list(pool.map(ask_again, shorts))
        assert answer.result(timeout=60) == alone
        long_s = time.monotonic() - begin_s
    for times_s in flows:
        assert len(times_s) >= 3, "the long prompt had the engine for itself"
        assert max(times_s) < long_s / 2, "a short one waited for the long one"
