"""What waits in the queue, and what cannot leave or enter it: it takes little, and ends alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.engine import completion
from tangram.limits import MAX_SAMPLES
from tests.mentions import assert_refused, mentions

from .conftest import wait_until
from .test_load import raw_request
from .tiny import COMPLETIONS, TinyServer, body, numbers, run_tiny_server, tiny_folder

VOCABULARY = 5003  # nothing else has this size
PLACES = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"), VOCABULARY)
    with run_tiny_server(folder, max_queue=3 * MAX_SAMPLES - PLACES, max_num_seqs=PLACES) as server:
        yield server


def vocabularies() -> int:
    """How many tensors have a value for each token."""
    return sum(
        type(found) is torch.Tensor and found.shape == (VOCABULARY,) for found in gc.get_objects()
    )


def test_completions_that_wait_are_counted_and_hold_nothing_of_the_size_of_the_vocabulary(
    server: TinyServer,
) -> None:
    before = vocabularies()
    held = list[Any]()

    def ask(step: int, waiting: int) -> None:
        content = body(numbers(20, step), n=MAX_SAMPLES, presence_penalty=0.1, max_tokens=3000)
        held.append(raw_request(server, content))
        wait_until(lambda: server.engine.stats().waiting == waiting, "it is not taken in")

    ask(3, MAX_SAMPLES - PLACES)
    ask(5, MAX_SAMPLES - PLACES + 1)
    ask(7, MAX_SAMPLES - PLACES + 2)
    assert vocabularies() - before < 10 * PLACES
    with server.http() as client:
        refused = client.post(COMPLETIONS, json=body(numbers(9)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert mentions(refused.json()["error"]["message"], f"{3 * MAX_SAMPLES - PLACES} completions")
    for connection in held:
        connection.close()
    wait_until(lambda: server.engine.stats().waiting == 0, "somebody still waits")
    server.check_baseline()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TinyServer]:
    """Two may run and three wait."""
    with run_tiny_server(tiny_folder(tmp_path), max_queue=3, max_num_seqs=2) as server:
        yield server


def prompts(count: int) -> list[list[int]]:
    return [numbers(20, 11 + 2 * at) for at in range(count)]


@pytest.mark.parametrize("stream", [True, False])
def test_of_a_list_of_prompts_all_are_taken_or_none(small: TinyServer, stream: bool) -> None:
    held = [raw_request(small, body(numbers(20, 3), max_tokens=3000, n=2))]
    wait_until(lambda: small.engine.stats().running == 2, "two do not run")
    with small.http() as client, ThreadPoolExecutor(1) as pool:
        held += [raw_request(small, body(numbers(20, step), max_tokens=3000)) for step in (5, 7)]
        wait_until(lambda: small.engine.stats().waiting == 2, "two do not wait")
        # One more may wait: whoever comes then is taken with all that he brings.
        taken = pool.submit(client.post, COMPLETIONS, json=body(prompts(4), stream=stream))
        wait_until(lambda: small.engine.stats().waiting == 6, "it is not taken in")
        before = small.engine.stats()
        refused = client.post(COMPLETIONS, json=body(prompts(2), stream=stream))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert mentions(refused.json()["error"]["message"], "6 completions")
        assert small.engine.stats().waiting == before.waiting
        for connection in held:
            connection.close()
        assert taken.result().status_code == 200
        assert taken.result().text.count('"index":') >= 4
    small.check_baseline()


def test_what_is_wrong_with_the_last_prompt_is_seen_before_the_first_is_begun(
    small: TinyServer,
) -> None:
    with small.http() as client:
        refused = client.post(COMPLETIONS, json=body([*prompts(4), [10**6]]))
    assert_refused(refused, "prompt")
    assert (small.engine.stats().steps, small.engine.busy) == (0, False)


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(
    ("fields", "param"),
    [(body(prompts(6)), "prompt"), (body(prompts(3), n=2), "prompt"), (body(numbers(9), n=6), "n")],
    ids=["prompts", "prompts and choices", "choices"],
)
def test_what_could_never_run_and_wait_is_not_told_to_come_again(
    small: TinyServer, fields: dict[str, Any], param: str, busy: bool
) -> None:
    held = [raw_request(small, body(numbers(20, 3), max_tokens=3000, n=5))] if busy else []
    wait_until(lambda: small.engine.stats().waiting == 3 * busy, "the queue is not full")
    with small.http() as client:
        refused = client.post(COMPLETIONS, json=fields)
        assert_refused(refused, param, "6 2 3")
        for connection in held:
            connection.close()
        wait_until(lambda: not small.engine.busy, "somebody still runs or waits")
        wait_until(
            lambda: client.post(COMPLETIONS, json=body(prompts(1))).status_code == 200,
            "nobody hears that the queue is empty",
        )
        fits = client.post(COMPLETIONS, json=body(prompts(5)))
        assert (fits.status_code, len(fits.json()["choices"])) == (200, 5)
    small.check_baseline()


def fail(*args: object, **kwargs: object) -> None:
    raise MemoryError("there is none")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", ["queue", "books", "sampler", "stops"])
def test_a_request_that_cannot_begin_ends_alone(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch, place: str, ahead: bool
) -> None:
    odd, prompts = numbers(45, 11), [numbers(70, step) for step in (13, 17, 19)]
    expected = [server.complete(prompt, max_tokens=40) for prompt in prompts]

    def failing(owner: object, name: str, is_odd: Any) -> None:
        original = getattr(owner, name)

        def call_with(*args: Any, **kwargs: Any) -> Any:
            return (fail if is_odd(*args, **kwargs) else original)(*args, **kwargs)

        monkeypatch.setattr(owner, name, call_with)

    def of_odd(*args: Any, prompt_token_ids: Any, **kwargs: Any) -> bool:
        return list(prompt_token_ids) == odd

    monkeypatch.setattr(server.engine, "ahead", ahead)
    if place == "queue":
        failing(
            server.engine._scheduler,
            "add",
            lambda sequence: list(sequence.tokens[: len(odd)]) == odd,
        )
    elif place == "books":
        failing(completion, "sequence_of", lambda *args, **_: list(args[4]) == odd)
    else:
        failing(completion, {"sampler": "SampleRow", "stops": "TextStream"}[place], of_odd)
    with ThreadPoolExecutor(3) as pool, server.http() as client:
        others = pool.map(lambda prompt: server.complete(prompt, max_tokens=40), prompts)
        response = client.post(COMPLETIONS, json=body(odd, n=3, stop="\ufffe"))
        assert list(others) == expected
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "server_error")
    assert mentions(error["message"], "log")
    server.check_baseline()
