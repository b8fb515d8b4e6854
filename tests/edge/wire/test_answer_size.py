"""Whole answers are in memory until they are written: how many log-probabilities one
may ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.bare_tokenizer import load_tokenizer
from tangram.serve.answers import answer_size
from tests.mentions import assert_refused

from .conftest import CHAT, COMPLETIONS, MODEL, USER, stream_data
from .tiny import TinyServer, run_tiny_server, tiny_folder

EOS = 2
AT_ONCE_AT_AN_END = {str(EOS): 100}
CHAT_20 = {"logprobs": True, "top_logprobs": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A random model with the embedded model's tokenizer, which both endpoints need."""
    tokenizer = load_tokenizer("smollm2")
    folder = tiny_folder(tmp_path_factory.mktemp("size"), vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder)
    with run_tiny_server(folder, kv_cache_gib=0.1) as server:
        yield server


@pytest.fixture
def client(server: TinyServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def body(path: str, **fields: Any) -> dict[str, Any]:
    """What its first token ends."""
    prompt: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": [5]}
    return {"model": MODEL, "temperature": 0, "logit_bias": AT_ONCE_AT_AN_END, **prompt, **fields}


@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        (CHAT, {"n": 128, "max_tokens": 66, **CHAT_20}, 128 * 66 * 21),
        (CHAT, {"n": 128, "max_completion_tokens": 66, **CHAT_20}, 128 * 66 * 21),
        (CHAT, {"n": 128, **CHAT_20}, None),
        (CHAT, {"n": 44, "max_tokens": 4000, "logprobs": True}, 44 * 4000),
        (COMPLETIONS, {"n": 128, "max_tokens": 66, "logprobs": 20}, 128 * 66 * 21),
        (COMPLETIONS, {"n": 3, "max_tokens": 4000, "logprobs": 20}, 3 * 4000 * 21),
        (COMPLETIONS, {"prompt": [[5]] * 1024, "logprobs": 10}, 1024 * 16 * 11),
        (
            COMPLETIONS,
            {"prompt": [[5], [5] * 96], "n": 2, "max_tokens": 4000, "logprobs": 20},
            2 * 8000 * 21,
        ),
    ],
)
def test_more_than_fit_into_memory_are_refused_before_any_work(
    server: TinyServer, client: httpx.Client, path: str, fields: dict[str, Any], asked: int | None
) -> None:
    steps = server.engine.stats().steps
    response = client.post(path, json=body(path, **fields))
    assert_refused(response, "logprobs", f"{answer_size.MAX_WHOLE_LOGPROBS} stream {asked or ''}")
    assert (server.engine.stats().steps, server.engine.stats().waiting) == (steps, 0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 4000, "logprobs": True, "top_logprobs": 5}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
        (CHAT, {"n": 128}),
        (COMPLETIONS, {"n": 128, "max_tokens": 65, "logprobs": 20}),
        (COMPLETIONS, {"prompt": [[5]] * 8, "n": 8, "logprobs": 5}),
    ],
)
def test_what_fits_is_answered(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    response = client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    wanted = len(fields.get("prompt", [0])) * fields.get("n", 1)
    assert len(response.json()["choices"]) == wanted


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_has_no_such_bound(client: httpx.Client, path: str) -> None:
    wish = CHAT_20 if path == CHAT else {"logprobs": 20}
    with client.stream(
        "POST", path, json=body(path, n=4, max_tokens=4000, stream=True, **wish)
    ) as response:
        assert response.status_code == 200
        *chunks, end = stream_data(response)
    reasons = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks]
    assert (reasons.count("stop"), end) == (4, "[DONE]")


def test_an_answer_at_the_bound_has_as_many_as_it_says(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_size, "MAX_WHOLE_LOGPROBS", 2 * 3 * 10 * 5)
    fields = {"prompt": [[5], [7]], "n": 3, "logprobs": 4, "logit_bias": {}, "ignore_eos": True}
    answer = client.post(COMPLETIONS, json=body(COMPLETIONS, **fields, max_tokens=10)).json()
    assert sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"]) == 2 * 3 * 10
    refused = client.post(COMPLETIONS, json=body(COMPLETIONS, **fields, max_tokens=11))
    assert_refused(refused, "logprobs")


def test_a_prompt_that_never_fits_is_still_told_so(client: httpx.Client) -> None:
    response = client.post(
        COMPLETIONS, json=body(COMPLETIONS, prompt=[5] * 5000, n=128, max_tokens=1000, logprobs=20)
    )
    assert_refused(response, "prompt")
