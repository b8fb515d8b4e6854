"""Calls of tools in text that an engine made up: read alike from a stream and from a
whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tangram.engine.text.formats import TOOL_FORMATS
from tangram.types import CallStyle, ToolFormat

from .conftest import (
    CHAT,
    MODEL,
    USER,
    EngineServer,
    chat_body,
    join_calls,
    run_fake_server,
    stream_data,
)

TOOL = {"type": "function", "function": {"name": "f"}}
MARKED = ToolFormat("<c>", "</c>")
# JSON, or nearly, that names no function, or names it after arguments that no JSON can hold.
NO_CALLS = [
    "[]",
    '"f"',
    '{"name":[],"arguments":{}}',
    '{"name":{"f":1},"arguments":{}}',
    '{"name":"f","arguments":"{}"}',
    '{"name":"f","arguments":[{}]}',
    '{"arguments":{"a":1e999},"name":"f"}',
    '{"arguments":{"a":NaN},"name":"f"}',
    '{"arguments":{"a":"\\ud800"},"name":"f"}',
]


@pytest.fixture
def marked() -> Iterator[EngineServer]:
    """A server whose model answers what it is asked backwards, with short marks around calls."""
    with run_fake_server() as server:
        server.engine.codec.tool_format = MARKED
        yield server


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ('<c>{"name":"f","arguments":{}}</c>', None, 1),
        ('a <c>{"name":"f","arguments":{}}</c>', "a", 1),
        ('<c>{"name":"f","arguments":{"a":"\\ud800"}}</c>', None, 1),
        ('<c>{"arguments":{"a":1},"name":"f"}</c>', None, 1),
        ('<c>{"name":"g","arguments":{}}</c>', '<c>{"name":"g","arguments":{}}</c>', 0),
        ("nothing", "nothing", 0),
        *((f"<c>{said}</c>", f"<c>{said}</c>", 0) for said in NO_CALLS),
    ],
)
def test_streams_and_whole_answers_have_the_same_calls(
    marked: EngineServer, said: str, content: str | None, calls: int
) -> None:
    body = chat_body(
        messages=[{"role": "assistant", "content": said[::-1]}], tools=[TOOL], max_tokens=60
    )
    with marked.http() as http:
        (choice,) = http.post(CHAT, json=body).json()["choices"]
        with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            *chunks, end = stream_data(response)
    deltas = [json.loads(chunk)["choices"][0] for chunk in chunks]
    pieces = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    streamed = join_calls(pieces)
    text = "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert (choice["message"]["content"], text or None, end) == (content, content, "[DONE]")
    assert len(choice["message"].get("tool_calls", [])) == len(streamed) == calls
    assert [call["function"] for call in streamed] == [
        call["function"] for call in choice["message"].get("tool_calls", [])
    ]
    for call in streamed:
        json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False).encode()
    assert (
        choice["finish_reason"]
        == deltas[-1]["finish_reason"]
        == ("tool_calls" if calls else "stop")
    )


def test_a_form_without_marks_reads_text_that_names_no_function(marked: EngineServer) -> None:
    marked.engine.codec.tool_format = TOOL_FORMATS["llama3"]
    said = '{"name":[],"parameters":{}}'
    body = chat_body(
        messages=[{"role": "assistant", "content": said[::-1]}], tools=[TOOL], max_tokens=60
    )
    with marked.http() as http:
        assert http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == said
        with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            *chunks, end = stream_data(response)
    assert end == "[DONE]"
    assert (
        "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        == said
    )


@pytest.mark.parametrize(
    ("arguments", "status"), [('{"a": [1, "b', 200), ("{", 200), ('{"a" 1}', 400), ("[1", 400)]
)
def test_a_call_that_was_cut_goes_back_into_the_conversation(
    marked: EngineServer, arguments: str, status: int
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "the arguments are no JSON"}
    with marked.http() as http:
        answer = http.post(CHAT, json=chat_body(messages=[USER, said, result], tools=[TOOL]))
    assert answer.status_code == status, answer.text


SHORT = ToolFormat("<", ">", "$name$arguments", CallStyle.NAMED)
TWO = '<f{"a": "one \\u00e9", "b": [1, {}]}>\n<f{}>'
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize("said", [TWO, f"Wait. {TWO} Yes"])
@pytest.mark.parametrize("limit", [99, 32])
def test_the_clients_own_streaming_joins_pieces_to_the_whole_answer(
    marked: EngineServer, said: str, limit: int
) -> None:
    marked.engine.codec.tool_format = SHORT
    asked = [{"role": "assistant", "content": said[::-1]}]
    body: Any = {"model": MODEL, "messages": asked, "tools": [TOOL], "max_tokens": limit}
    with OpenAI(base_url=f"{marked.url}/v1", api_key="none", max_retries=0) as client:
        (whole,) = client.chat.completions.create(**body).choices
        pieces = []
        with client.chat.completions.stream(**body) as stream:
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    pieces.append(event.arguments_delta)
        (streamed,) = stream.current_completion_snapshot.choices
    calls = [call.function.model_dump() for call in whole.message.tool_calls or []]
    assert [
        call.function.model_dump(include={"name", "arguments"})
        for call in streamed.message.tool_calls or []
    ] == calls
    assert "".join(pieces) == "".join(call["arguments"] for call in calls)
    assert len(pieces) > 8
    reason = "tool_calls" if limit == 99 else "length"
    assert (whole.finish_reason, streamed.finish_reason) == (reason, reason)


@pytest.mark.parametrize("limit", [99, 32])
def test_the_events_of_responses_join_to_the_whole_answer(marked: EngineServer, limit: int) -> None:
    marked.engine.codec.tool_format = SHORT
    asked = [{"role": "assistant", "content": TWO[::-1]}]
    body: Any = {"model": MODEL, "input": asked, "tools": [FUNCTION], "max_output_tokens": limit}
    with OpenAI(base_url=f"{marked.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**body)
        with client.responses.stream(**body) as stream:
            events = list(stream)
    streamed: Any = events[-1]
    fields = {"type", "name", "arguments", "status"}
    outputs = [item.model_dump(include=fields) for item in whole.output]
    assert [item.model_dump(include=fields) for item in streamed.response.output] == outputs
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert done == [item["arguments"] for item in outputs]
    for at, item in enumerate(outputs):
        deltas = [
            e.delta
            for e in events
            if e.type == "response.function_call_arguments.delta" and e.output_index == at
        ]
        assert "".join(deltas) == item["arguments"]
    assert [item["status"] for item in outputs] == (
        ["completed"] * 2 if limit == 99 else ["incomplete"]
    )
