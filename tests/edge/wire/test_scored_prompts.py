"""Log-probabilities of prompts, as evaluations ask for them: `echo` with `logprobs`, and vLLM's
`prompt_logprobs`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tangram.model.load import load_model

from .conftest import CHAT, run_real_server, stream_data
from .tiny import COMPLETIONS, TinyServer, body, numbers, run_tiny_server, tiny_folder

TEXT = (
    Path(__file__).parents[3].joinpath("tangram", "web", "static", "demo_document.md").read_text()
)
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    with run_tiny_server(tiny_folder(tmp_path_factory.mktemp("scored"))) as server:
        yield server


@pytest.fixture
def client(server: TinyServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def real_client(python: list[str]) -> Iterator[httpx.Client]:
    """To the embedded model, behind two API processes."""
    options = ("--dtype", "float32", "--api-processes", "2", "--kv-cache-gib", "1")
    with (
        run_real_server(*options, python=python) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> Any:
    response = client.post(COMPLETIONS, json=body(prompt, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def test_an_echoed_prompt_and_its_answer_have_log_probabilities(client: httpx.Client) -> None:
    prompt = numbers(50, 7)
    fields = {"echo": True, "logprobs": 3, "max_tokens": 5}
    (choice,) = complete(client, prompt, **fields)["choices"]
    plain = complete(client, prompt, logprobs=3, max_tokens=5)["choices"][0]
    found = choice["logprobs"]
    assert [len(found[key]) for key in KEYS] == [55] * 4
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(3 <= len(top) <= 4 for top in found["top_logprobs"][1:])
    answered = plain["logprobs"]
    assert found["tokens"][50:] == answered["tokens"], "the answer is what it is alone"
    assert found["token_logprobs"][50:] == pytest.approx(answered["token_logprobs"], abs=1e-4)
    lengths = accumulate(map(len, found["tokens"]), initial=0)
    assert found["text_offset"] == list(lengths)[:-1]
    for token, value, top in zip(*(found[key][1:] for key in KEYS[:3]), strict=True):
        assert top[token] == value


def test_each_prompt_and_each_choice_has_its_own(client: httpx.Client) -> None:
    prompts = [numbers(40, 7), numbers(9, 3), [5]]
    answer = complete(
        client, prompts, n=2, echo=True, logprobs=1, prompt_logprobs=2, temperature=1, seed=1
    )
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice, prompt in zip(answer["choices"], [p for p in prompts for _ in "ab"], strict=True):
        echoed = choice["logprobs"]["token_logprobs"][: len(prompt)]
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 8
        first, *entries = choice["prompt_logprobs"]
        assert first is None and echoed[0] is None
        known = [entry[str(token)] for entry, token in zip(entries, prompt[1:], strict=True)]
        assert [entry["logprob"] for entry in known] == echoed[1:]
        for entry in entries:
            assert {1, 2} <= {each["rank"] for each in entry.values()}
            assert all(each["decoded_token"] for each in entry.values())


@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "logprobs": 0}])
def test_a_stream_has_the_echoed_prompt_first(client: httpx.Client, fields: dict[str, Any]) -> None:
    prompt = numbers(70, 11)
    whole = complete(client, prompt, n=2, **fields)["choices"]
    streamed = [{key: [] for key in (*KEYS, "text")} for _ in whole]
    with client.stream(
        "POST", COMPLETIONS, json=body(prompt, n=2, stream=True, **fields)
    ) as response:
        for data in stream_data(response)[:-1]:
            (choice,) = json.loads(data)["choices"]
            into = streamed[choice["index"]]
            into["text"].append(choice["text"])
            for key in KEYS if choice["logprobs"] else ():
                into[key] += choice["logprobs"][key]
    for choice, parts in zip(whole, streamed, strict=True):
        assert "".join(parts.pop("text")) == choice["text"]
        assert parts == (choice["logprobs"] or {key: [] for key in KEYS})


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_token_need_be_generated(client: httpx.Client, fields: dict[str, Any]) -> None:
    prompt = numbers(45, 7)
    answer = complete(client, prompt, max_tokens=0, logprobs=1, **fields)
    (choice,) = answer["choices"]
    echoed = 45 if "echo" in fields else 0
    assert len(choice["logprobs"]["tokens"]) == echoed
    assert bool(choice["text"]) == bool(echoed)
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert len(choice.get("prompt_logprobs", [0] * 45)) == 45


def test_a_chat_has_those_of_its_prompt_beside_the_choices(real_client: httpx.Client) -> None:
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hi."}]}
    plain = real_client.post(CHAT, json=asked | {"max_tokens": 3, "temperature": 0}).json()
    scored = real_client.post(
        CHAT, json=asked | {"max_tokens": 3, "temperature": 0, "n": 2, "prompt_logprobs": 1}
    ).json()
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    assert scored["prompt_logprobs"][0] is None and "prompt_logprobs" not in plain
    for choice in scored["choices"]:
        assert choice["message"] == plain["choices"][0]["message"]
    alone = real_client.post(CHAT, json=asked | {"max_tokens": 0, "prompt_logprobs": 1}).json()
    assert alone["choices"][0]["message"]["content"] == ""
    assert alone["prompt_logprobs"] == scored["prompt_logprobs"]


@cache
def score(tokens: tuple[int, ...]) -> list[float]:
    """By Transformers."""
    loaded = load_model("smollm2", dtype="float32")
    loaded.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([tokens])).logits[0, :-1].float()
    losses = nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return (-losses).tolist()


def test_the_perplexity_of_a_text_is_that_of_transformers(real_client: httpx.Client) -> None:
    """At ρ 1.0, whether or not the text is in the cache, asked as lm-evaluation-harness asks."""
    asked = {"model": "smollm2", "prompt": TEXT[:3500], "kv_retention": 1.0, "temperature": 0}
    tokens = real_client.post("/tokenize", json={"prompt": TEXT[:3500]}).json()["tokens"]
    assert len(tokens) > 600, "more than a chunk"
    expected = score(tuple(tokens))
    perplexity = math.exp(-sum(expected) / len(expected))
    evaluation = {"max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    for _ in range(2):
        response = real_client.post(COMPLETIONS, json=asked | evaluation).json()
        found = response["choices"][0]["logprobs"]["token_logprobs"]
        assert found[0] is None and len(found) == len(tokens) + 1
        assert found[1:-1] == pytest.approx(expected, abs=5e-3)
        mean = sum(found[1:-1]) / len(expected)
        assert math.exp(-mean) == pytest.approx(perplexity, rel=1e-3)
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        plain = real_client.post(COMPLETIONS, json=asked | {"max_tokens": 1}).json()
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= 512
        text = response["choices"][0]["text"]
        assert text == TEXT[:3500] + plain["choices"][0]["text"]
        named = response["choices"][0]["logprobs"]
        for token, offset in zip(named["tokens"], named["text_offset"], strict=True):
            assert text.startswith(token, offset)


def test_a_compressed_prompt_has_the_state_that_serves(real_client: httpx.Client) -> None:
    """At ρ 0.5 the first chunk is as it is uncompressed; what comes behind it differs."""
    asked = {"model": "smollm2", "prompt": TEXT[:3500], "max_tokens": 0, "prompt_logprobs": 0}
    found = []
    for ratio in (1.0, 0.5):
        answer = real_client.post(COMPLETIONS, json=asked | {"kv_retention": ratio}).json()
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        found.append([next(iter(entry.values()))["logprob"] for entry in entries])
    whole, compressed = found
    assert compressed[:512] == pytest.approx(whole[:512], abs=1e-4)
    assert compressed[512:] != pytest.approx(whole[512:], abs=1e-2)
    ratio = sum(compressed) / sum(whole)
    assert 0.95 < ratio < 1.2, "and not much"


def test_the_server_is_as_before(server: TinyServer) -> None:
    server.check_baseline()
