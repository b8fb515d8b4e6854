"""The real server with the embedded model, over the wire: reuse, streaming, hanging up, and what
can never fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from .conftest import CHAT, scrape, wait_until

MODEL = "smollm2"
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 8192
DOCUMENT = (
    Path(__file__).parents[3].joinpath("tangram", "web", "static", "demo_document.md").read_text()
)


@pytest.fixture
def client(server_url: str) -> Iterator[Any]:
    """The official client; untyped, because its own types know nothing of our usage fields."""
    with openai.OpenAI(
        base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture
def http(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=60) as client:
        yield client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def long_text(words: int) -> str:
    return " ".join(DOCUMENT.split()[:words])


def chat(client: Any, messages: list[dict[str, str]], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)


def pages_held(http: httpx.Client) -> float:
    return scrape(http)["tangram_kv_pages", "held"]


def test_a_second_turn_reuses_the_first_and_holds_less_than_a_full_cache(client: Any) -> None:
    history = [user(long_text(500) + "\n\nWhat is this about?")]
    first = chat(client, history, max_tokens=8)
    history += [
        {"role": "assistant", "content": first.choices[0].message.content},
        user("And who is in it?"),
    ]
    second = chat(client, history, max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens > CHUNK_TOKENS
    assert cached >= first.usage.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    assert cached < second.usage.prompt_tokens
    assert 0 < second.usage.kv_bytes < second.usage.kv_bytes_uncompressed


def test_an_answer_does_not_depend_on_a_cache_hit_or_on_streaming(client: Any) -> None:
    messages = [user(long_text(450) + "\n\nContinue the story.")]
    cold = chat(client, messages, max_tokens=10, extra_body={"cache_salt": "nobody else's"})
    warm = chat(client, messages, max_tokens=10, extra_body={"cache_salt": "nobody else's"})
    *chunks, last = chat(
        client,
        messages,
        max_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": "somebody else's"},
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens > 0
    assert last.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].message.content == warm.choices[0].message.content == streamed
    assert cold.usage.completion_tokens == last.usage.completion_tokens


def test_keeping_everything_costs_what_an_uncompressed_cache_costs(client: Any) -> None:
    messages = [user(long_text(500))]
    full = chat(
        client, messages, max_tokens=4, extra_body={"kv_retention": 1.0, "ignore_eos": True}
    ).usage
    half = chat(client, messages, max_tokens=4, extra_body={"ignore_eos": True}).usage
    assert full.kv_bytes >= full.kv_bytes_uncompressed
    assert half.kv_bytes < 0.8 * full.kv_bytes
    assert half.kv_bytes_uncompressed == full.kv_bytes_uncompressed


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_returns_the_pages(http: httpx.Client, stream: bool) -> None:
    wait_until(lambda: pages_held(http) == 0, "an earlier request still holds pages", timeout_s=60)
    body = {
        "model": MODEL,
        "messages": [user("Count to ten thousand.")],
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        with http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert pages_held(http) > 0
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body, timeout=1.0)
    wait_until(
        lambda: pages_held(http) == 0, "the abandoned request still holds pages", timeout_s=30
    )
    assert scrape(http)["tangram_requests_running", ""] == 0


def test_what_can_never_fit_is_refused_with_both_numbers(http: httpx.Client) -> None:
    prompt = [5] * (CONTEXT_TOKENS + 1)
    response = http.post(
        "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 10}
    )
    assert response.status_code == 400
    numbers = {int(number) for number in re.findall(r"\d+", response.json()["error"]["message"])}
    assert CONTEXT_TOKENS in numbers
    assert numbers & {len(prompt), len(prompt) + 10}


def test_token_ids_the_model_does_not_have_are_refused(http: httpx.Client) -> None:
    for token in (10**6, -1):
        response = http.post(
            "/v1/completions", json={"model": MODEL, "prompt": [token], "max_tokens": 1}
        )
        assert response.status_code == 400, token


def test_many_at_once_answer_as_one_alone(client: Any) -> None:
    prompts = [long_text(40 * size) for size in range(1, 4)]
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    alone = [
        client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in prompts
    ]
    together = client.completions.create(prompt=prompts, **fields)
    assert [choice.text for choice in together.choices] == alone


def test_logprobs_of_the_real_model_are_ordered_and_include_the_choice(client: Any) -> None:
    content = (
        chat(client, [user("Say hi.")], max_tokens=3, logprobs=True, top_logprobs=3)
        .choices[0]
        .logprobs.content
    )
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])
        assert bytes(entry.bytes).decode() == entry.token


def test_a_stop_string_ends_the_answer_before_it(client: Any) -> None:
    messages = [user("Write two sentences about the sea.")]
    whole = chat(client, messages, max_tokens=16).choices[0].message.content
    stop = whole.split()[3]
    answer = chat(client, messages, max_tokens=16, stop=stop).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == whole[: whole.index(stop)]


def test_the_same_seed_gives_the_same_answer(client: Any) -> None:
    fields = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "seed": 7,
        "temperature": 1.0,
        "max_tokens": 8,
    }
    texts = {client.completions.create(**fields).choices[0].text for _ in range(2)}
    others = {
        client.completions.create(**fields | {"seed": seed}).choices[0].text for seed in (8, 9)
    }
    assert len(texts) == 1
    assert others != texts


def test_the_models_sampling_holds_where_a_request_states_nothing(
    client: Any, http: httpx.Client
) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    held = card["default_sampling"]
    assert (held["temperature"], held["top_p"]) != (1.0, 1.0)
    question: dict[str, Any] = {
        "model": MODEL,
        "messages": [user("What is the capital of France?")],
        "max_tokens": 24,
        "seed": 5,
    }
    bare = client.chat.completions.create(**question)
    null = client.chat.completions.create(**question, temperature=None, top_p=None)
    values = {"temperature": held["temperature"], "top_p": held["top_p"]}
    stated = client.chat.completions.create(**question, **values)
    hot = client.chat.completions.create(**question, temperature=2.0, top_p=1.0)
    answers = [each.choices[0].message.content for each in (bare, null, stated, hot)]
    assert answers[0] == answers[1] == answers[2] != answers[3]
    assert "Paris" in answers[0]


def test_tools_can_be_tried(client: Any) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    history: list[Any] = [user("What is the weather in Paris?")]
    asked = chat(
        client,
        history,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    (call,) = asked.choices[0].message.tool_calls
    assert asked.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )
    history += [
        asked.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    told = chat(client, history, tools=[tool], tool_choice="auto", max_tokens=40)
    assert told.choices[0].message.content


def test_a_ratio_without_a_profile_is_served_without_a_restart(client: Any) -> None:
    """The server has a profile of 0.5; its shares, and those that ship, make others."""
    question = [user(long_text(900))]
    fields = {"max_tokens": 4}
    kept = {
        ratio: chat(client, question, extra_body={"kv_retention": ratio}, **fields).usage.kv_bytes
        for ratio in (0.2, 0.3, 0.5)
    }
    assert kept[0.2] < kept[0.3] < kept[0.5]
    with pytest.raises(openai.BadRequestError, match=r"kv_retention is 0\.31, .*0\.05.*calibrate"):
        chat(client, question, extra_body={"kv_retention": 0.31}, **fields)


@pytest.fixture
def messages(server_url: str) -> Iterator[Any]:
    """The endpoint by Anthropic's client; greedy, which its newest parameters do not name."""
    with anthropic.Anthropic(base_url=server_url, api_key="none", max_retries=0) as client:

        def ask(kind: str, **fields: Any) -> Any:
            greedy = {} if kind == "count_tokens" else {"extra_body": {"temperature": 0}}
            return getattr(client.messages, kind)(model=MODEL, **greedy, **fields)

        yield ask


def test_a_message_is_the_chat_of_the_same_words(client: Any, messages: Any) -> None:
    asked = [user("Name three colours.")]
    told = {"system": "Be brief.", "messages": asked}
    answer = messages("create", max_tokens=24, **told)
    with messages("stream", max_tokens=24, **told) as stream:
        streamed = stream.get_final_message()
    in_chat = chat(client, [{"role": "system", "content": "Be brief."}, *asked], max_tokens=24)
    choice, used = in_chat.choices[0], in_chat.usage
    for message in (answer, streamed):
        assert message.content[0].text == choice.message.content
        assert (
            message.stop_reason
            == {"length": "max_tokens", "stop": "end_turn"}[choice.finish_reason]
        )
        counted = message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert (counted, message.usage.output_tokens) == (
            used.prompt_tokens,
            used.completion_tokens,
        )
    assert messages("count_tokens", **told).input_tokens == used.prompt_tokens


def test_a_stop_sequence_is_named_by_whole_answers_and_streams(messages: Any) -> None:
    asked = [user("Count from one to ten.")]
    text = messages("create", max_tokens=40, messages=asked).content[0].text
    first, second = text[5:8], text[20:22]
    sequences = [second, first, "never"]
    at, found = min((text.index(stop), stop) for stop in (first, second))
    whole = messages("create", max_tokens=40, messages=asked, stop_sequences=sequences)
    with messages("stream", max_tokens=40, messages=asked, stop_sequences=sequences) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", found)
        assert "".join(block.text for block in message.content) == text[:at]


def test_a_turn_of_messages_reads_what_an_earlier_one_has_cached(messages: Any) -> None:
    asked: list[Any] = [user(long_text(900))]
    first = messages("create", max_tokens=8, messages=asked)
    asked += [{"role": "assistant", "content": first.content}, user("And then?")]
    second = messages("create", max_tokens=4, messages=asked)
    assert second.usage.cache_read_input_tokens >= CHUNK_TOKENS
    total = second.usage.input_tokens + second.usage.cache_read_input_tokens
    assert messages("count_tokens", messages=asked).input_tokens == total
