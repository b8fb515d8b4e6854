"""Trials of a long prompt, on an engine whose steps are slow: who leaves while it is read, and who
comes meanwhile.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import wait_until
from .test_trials_load import pages_held, raw_request
from .tiny import TinyServer, body, numbers, run_tiny_server, tiny_folder

# 24 steps and more, each long enough for the server to see that a client has gone.
LONG = 3000
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
def server(quick_server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyServer]:
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
    server: TinyServer, stream: bool, reset: bool
) -> None:
    before = server.engine.stats()
    # Each another one, of which nothing is cached.
    connection = raw_request(
        server, body(numbers(LONG, 11 + 2 * stream + 4 * reset), stream=stream, max_tokens=900)
    )
    wait_until(lambda: server.engine.stats().steps > before.steps + 2, "the prompt is not read")
    hung_up_at = server.engine.stats().steps
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_until(lambda: pages_held(server) == 0, "the abandoned request still holds pages")
    after = server.engine.stats()
    assert after.generated_tokens == before.generated_tokens, "it was given tokens"
    # The step under way when the client hangs up is counted already; one more may begin before the
    # server sees it.
    assert after.steps - hung_up_at <= 1


def test_a_long_prompt_and_a_flow_of_short_ones_are_all_answered(
    server: TinyServer, alone: str
) -> None:
    """Short ones come one after the other and end before the long one, which ends although they
    never stop coming.
    """
    long, shorts = numbers(LONG, 19), [numbers(30, step) for step in (3, 5, 7)]
    with ThreadPoolExecutor(4) as pool:
        steps = server.engine.stats().steps
        answer = pool.submit(server.complete, long)
        wait_until(lambda: server.engine.stats().steps > steps, "the long prompt is not read")

        def ask_again(prompt: list[int]) -> list[float]:
            times_s = []
            while not answer.done():
                begin_s = time.monotonic()
                assert server.complete(prompt, max_tokens=2)
                times_s.append(time.monotonic() - begin_s)
            return times_s

        begin_s = time.monotonic()
        flows = list(pool.map(ask_again, shorts))
        assert answer.result(timeout=60) == alone
        long_s = time.monotonic() - begin_s
    for times_s in flows:
        assert len(times_s) >= 3, "the long prompt had the engine for itself"
        assert max(times_s) < long_s / 2, "a short one waited for the long one"
