"""What waits in the queue, and what cannot leave or enter it: it takes little, and ends alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tangram.engine import completion
from tangram.limits import MAX_SAMPLES

from .conftest import wait_until
from .test_trials_load import raw_request
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
    return sum(type(found) is torch.Tensor and found.shape == (VOCABULARY,) for found in gc.get_objects())


def test_completions_that_wait_are_counted_and_hold_nothing_of_the_size_of_the_vocabulary(server: TinyServer) -> None:
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
    assert f"{3 * MAX_SAMPLES - PLACES} completions wait" in refused.json()["error"]["message"]
    for connection in held:
        connection.close()
    wait_until(lambda: server.engine.stats().waiting == 0, "somebody still waits")
    server.check_baseline()


def fail(*args: object, **kwargs: object) -> None:
    raise MemoryError("there is none")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", ["queue", "books", "sampler", "text"])
def test_a_request_that_cannot_begin_ends_alone(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch, place: str, ahead: bool
) -> None:
    odd, prompts = numbers(45, 11), [numbers(70, step) for step in (13, 17, 19)]
    expected = [server.complete(prompt, max_tokens=40) for prompt in prompts]

    def failing(owner: object, name: str, is_odd: Any) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            return (fail if is_odd(*args, **kwargs) else original)(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    def of_odd(*args: Any, prompt_token_ids: Any, **kwargs: Any) -> bool:
        return list(prompt_token_ids) == odd

    monkeypatch.setattr(server.engine, "ahead", ahead)
    if place == "queue":
        failing(server.engine._scheduler, "add", lambda sequence: list(sequence.tokens[: len(odd)]) == odd)
    elif place == "books":
        failing(completion, "sequence_of", lambda *args: list(args[4]) == odd)
    else:
        failing(completion, {"sampler": "SampleRow", "text": "TextStream"}[place], of_odd)
    with ThreadPoolExecutor(3) as pool, server.http() as client:
        others = pool.map(lambda prompt: server.complete(prompt, max_tokens=40), prompts)
        response = client.post(COMPLETIONS, json=body(odd, n=3))
        assert list(others) == expected
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "server_error")
    assert "the log has the reason" in error["message"]
    server.check_baseline()
