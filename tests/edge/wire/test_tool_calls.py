"""Calls of tools in text that an engine made up: read alike from a stream and from a
whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tangram.engine.text.formats import TOOL_FORMATS
from tangram.types import ToolFormat

from .conftest import CHAT, EngineServer, chat_body, run_fake_server, stream_data

TOOL = {"type": "function", "function": {"name": "f"}}
MARKED = ToolFormat("<c>", "</c>")
# JSON, or nearly, that names no function or whose arguments no JSON can hold.
NO_CALLS = [
    "[]",
    '"f"',
    '{"name":[],"arguments":{}}',
    '{"name":{"f":1},"arguments":{}}',
    '{"name":"f","arguments":{"a":1e999}}',
    '{"name":"f","arguments":{"a":[-1e999]}}',
    '{"name":"f","arguments":{"a":NaN}}',
    '{"name":"f","arguments":{"a":"\\ud800"}}',
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
    streamed = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    text = "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert (choice["message"]["content"], text or None, end) == (content, content, "[DONE]")
    assert len(choice["message"].get("tool_calls", [])) == len(streamed) == calls
    assert [call["index"] for call in streamed] == list(range(calls))
    for call in streamed:
        json.loads(call["function"]["arguments"], parse_constant=pytest.fail)
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
