"""What a client of the OpenAI API gets back when all goes well, over an engine without a model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tangram.engine.text.codec import TokenText
from tangram.serve.chat.chunks import Content
from tangram.serve.chat.completion_writer import CompletionWriter
from tangram.types import TokenLogprob

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, scrape, stream_data


def test_chat_answer_and_usage(fake_server: EngineServer) -> None:
    answer = fake_server.chat(max_tokens=200)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.content == "ti yas>resu<"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 12, 24)
    assert usage.model_extra == {"kv_bytes": 4 * 24, "kv_bytes_uncompressed": 8 * 24}


def test_second_turn_reports_reused_tokens(fake_server: EngineServer) -> None:
    first = fake_server.chat()
    history = [USER, {"role": "assistant", "content": first.choices[0].message.content}, USER]
    second = fake_server.chat(messages=history)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens


def test_stream_says_the_same_as_the_whole_answer(fake_server: EngineServer) -> None:
    whole = fake_server.chat()
    *chunks, last = fake_server.chat(stream=True, stream_options={"include_usage": True})
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (
        len(chunks) - 1
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.model_extra == whole.usage.model_extra
    assert {chunk.id for chunk in chunks} == {last.id}


def test_a_stream_tells_what_each_choice_has_used_so_far(fake_server: EngineServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = fake_server.chat(stream=True, n=2, stream_options=options)
    for index in (0, 1):
        used = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        counts = [usage.completion_tokens for usage in used]
        assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens / 2
        assert {usage.prompt_tokens for usage in used} == {last.usage.prompt_tokens}
    assert all(
        chunk.usage is None
        for chunk in fake_server.chat(
            stream=True, stream_options={**options, "include_usage": False}
        )
    )


def test_stream_on_the_wire(fake_server: EngineServer) -> None:
    body = chat_body(stream=True, max_tokens=3)
    with fake_server.http() as client, client.stream("POST", CHAT, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *data, done = stream_data(response)
    assert done == "[DONE]"
    chunks = [json.loads(item) for item in data]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in chunk for chunk in chunks)


def test_n_gives_n_choices_and_counts_the_prompt_once(fake_server: EngineServer) -> None:
    answer = fake_server.chat(n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 6)
    stream = fake_server.chat(n=3, max_tokens=2, stream=True)
    roles = [
        chunk.choices[0].index for chunk in stream if chunk.choices[0].delta.role == "assistant"
    ]
    assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("abc", ["cba"]),
        (["abc", "de"], ["cba", "ed"]),
        ([97, 98], ["ba"]),
        ([[97, 98], [99]], ["ba", "c"]),
    ],
)
def test_all_prompt_forms(fake_server: EngineServer, prompt: Any, answers: list[str]) -> None:
    whole = fake_server.complete(prompt=prompt)
    assert [choice.text for choice in whole.choices] == answers
    assert [choice.index for choice in whole.choices] == list(range(len(answers)))
    assert whole.usage.prompt_tokens == sum(map(len, answers))
    texts = [""] * len(answers)
    for chunk in fake_server.complete(prompt=prompt, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == answers


def test_two_prompts_with_n_keep_their_order(fake_server: EngineServer) -> None:
    answer = fake_server.complete(prompt=["abc", "de"], n=2)
    assert [choice.text for choice in answer.choices] == ["cba", "cba", "ed", "ed"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)


def test_content_parts_and_the_developer_role(fake_server: EngineServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    fake_server.chat(
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    )
    prompt = "".join(map(chr, fake_server.engine.submitted[0].prompt_token_ids))
    assert prompt == "<system>be brief<user>one\ntwo"


def test_text_beyond_ascii_arrives_whole(fake_server: EngineServer) -> None:
    assert fake_server.complete(prompt="🐈é\n\u2028x").choices[0].text == "x\u2028\né🐈"
    stream = fake_server.complete(prompt="🐈é\n\u2028x", stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["x", "\u2028", "\n", "é", "🐈"]


def test_chat_logprobs(fake_server: EngineServer) -> None:
    fields = {
        "messages": [USER | {"content": "a!"}],
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    content = fake_server.chat(**fields).choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
        ("!", -9999.0, [33]),
        ("a", -0.5, [97]),
    ]
    assert [(top.token, top.logprob) for top in content[1].top_logprobs] == [
        ("x", 0.0),
        ("y", -1.0),
    ]
    chunks = [chunk.choices[0] for chunk in fake_server.chat(**fields, stream=True)]
    assert [
        entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content
    ] == content
    assert fake_server.chat().choices[0].logprobs is None


def test_completion_logprobs(fake_server: EngineServer) -> None:
    logprobs = fake_server.complete(prompt="abc", logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["c", "b", "a"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [{"x": 0.0, letter: -0.5} for letter in "cba"]
    assert logprobs.text_offset == [0, 1, 2]
    stream = fake_server.complete(prompt="abc", logprobs=1, stream=True)
    assert [chunk.choices[0].logprobs.text_offset for chunk in stream] == [[0], [1], [2]]
    sampled_only = fake_server.complete(prompt="abc", logprobs=0).choices[0].logprobs
    assert sampled_only.top_logprobs == [{letter: -0.5} for letter in "cba"]
    assert fake_server.complete(prompt="abc").choices[0].logprobs is None


def test_models(fake_server: EngineServer) -> None:
    client = fake_server.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra == {
        "max_model_len": 512,
        "default_sampling": {
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": None,
        },
    }
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_metrics(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        client.post(CHAT, json=chat_body(n=2, max_tokens=4))
        client.post(CHAT, json=chat_body(oops=1))
        client.get("/nowhere")
        for number in range(2):
            client.get(f"/v1/responses/{number}")
        values = scrape(client)
    expected = {
        ("tangram_http_requests_total", f"{CHAT},200"): 1,
        ("tangram_http_requests_total", f"{CHAT},400"): 1,
        ("tangram_http_requests_total", "other,404"): 1,
        ("tangram_http_requests_total", "/v1/responses/{id},404"): 2,
        ("tangram_completions_total", "length"): 2,
        ("tangram_time_to_first_token_seconds_count", ""): 2,
        ("tangram_inter_token_latency_seconds_count", ""): 6,
        ("tangram_completion_duration_seconds_count", ""): 2,
        ("tangram_prompt_tokens_total", ""): 11,
        ("tangram_cached_prompt_tokens_total", ""): 5,
        ("tangram_generated_tokens_total", ""): 8,
        ("tangram_preemptions_total", ""): 3,
        ("tangram_restored_tokens_total", ""): 4,
        ("tangram_host_bytes_out_total", ""): 640,
        ("tangram_host_bytes_in_total", ""): 320,
        ("tangram_dropped_spans_total", ""): 6,
        ("tangram_host_pages_total", ""): 50,
        ("tangram_host_pages_used", ""): 20,
        ("tangram_lost_prompt_tokens_total", "diverged"): 70,
        ("tangram_lost_prompt_tokens_total", "evicted"): 30,
        ("tangram_kv_pages", "held"): 0,
        ("tangram_kv_pages", "cached"): 7,
        ("tangram_kv_pages", "free"): 993,
        ("tangram_kv_retained_tokens", ""): 10,
        ("tangram_kv_represented_tokens", ""): 20,
        ("tangram_requests_running", ""): 0,
        ("tangram_requests_waiting", ""): 0,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert 0 < values["tangram_time_to_first_token_seconds_sum", ""] < 5


def test_two_servers_in_one_process_have_their_own_metrics(
    fake_server: EngineServer, locked_server: EngineServer
) -> None:
    fake_server.chat()
    with locked_server.http() as client:
        client.headers["Authorization"] = "Bearer sesame"
        assert ("tangram_completions_total", "stop") not in scrape(client)


def test_alternatives_of_equal_text_all_have_their_place() -> None:
    class CharacterCodec:
        def token_text(self, token_id: int) -> TokenText:
            return TokenText("\ufffd" if token_id < 5 else chr(token_id), bytes([token_id]))

    writer = CompletionWriter(CharacterCodec(), {}, logprobs=1)  # type: ignore[arg-type]
    top = ((1, -0.1), (65, -0.5), (2, -1.0), (3, -2.0))
    content = Content("\ufffd", logprobs=[TokenLogprob(4, -9.0, top)])
    found = writer.write_delta(0, content)["logprobs"]["top_logprobs"]
    expected = {
        "\ufffd": -0.1,
        "A": -0.5,
        "token_id:2": -1.0,
        "token_id:3": -2.0,
        "token_id:4": -9.0,
    }
    assert found == [expected]
