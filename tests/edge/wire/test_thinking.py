"""Thoughts over the wire: chat and responses of a server whose model says what it is asked,
backwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tangram.types import ThinkingFormat, ToolFormat

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, run_fake_server, stream_data

THINK = ThinkingFormat("<t>", "</t>")
CALLS = ToolFormat("<c>", "</c>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<c>{"name":"f","arguments":{}}</c>'


@pytest.fixture(scope="module")
def thinker() -> Iterator[EngineServer]:
    with run_fake_server() as server:
        server.engine.codec.thinking_format = THINK
        server.engine.codec.tool_format = CALLS
        yield server


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return chat_body(
        messages=[{"role": "assistant", "content": text[::-1]}], **({"max_tokens": 60} | fields)
    )


def ask(server: EngineServer, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer in one piece, and what its stream adds up to: both with usage."""
    streamed: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": 0}
    with server.http() as http:
        whole = http.post(CHAT, json=body).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", CHAT, json=body | options) as response:
            *chunks, last, _ = list(stream_data(response))
    for chunk in chunks:
        (choice,) = json.loads(chunk)["choices"]
        for field in ("reasoning_content", "content"):
            streamed[field] += choice["delta"].get(field) or ""
        pieces = choice["delta"].get("tool_calls", [])
        streamed["calls"] += sum("id" in piece for piece in pieces)
        streamed["reason"] = choice["finish_reason"]
    streamed["usage"] = json.loads(last)["usage"]
    (choice,) = whole["choices"]
    message = choice["message"]
    found = {
        "reasoning_content": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": len(message.get("tool_calls", [])),
        "reason": choice["finish_reason"],
        "usage": whole["usage"],
    }
    return found, streamed


@pytest.mark.parametrize(
    ("said", "thought", "content", "calls", "tokens"),
    [
        ("<t>\nHm.\n</t>\n\nYes.", "Hm.", "Yes.", 0, 12),
        ("Yes <t>no</t>", "", "Yes <t>no</t>", 0, 0),
        (f"<t>Hm</t>{CALL}", "Hm", "", 1, 8),
        (f"<t>{CALL}</t>no", CALL, "no", 0, 40),
    ],
)
def test_whole_answers_and_streams_tell_thoughts_apart(
    thinker: EngineServer, said: str, thought: str, content: str, calls: int, tokens: int
) -> None:
    whole, streamed = ask(thinker, saying(said, tools=[TOOL]))
    for found in (whole, streamed):
        assert (found["reasoning_content"], found["content"], found["calls"]) == (
            thought,
            content,
            calls,
        )
        assert found["reason"] == ("tool_calls" if calls else "stop")
        # One character is a token; the mark is known with its last one.
        assert abs(found["usage"]["completion_tokens_details"]["reasoning_tokens"] - tokens) <= 2
    assert (
        whole["usage"]["completion_tokens_details"]
        == streamed["usage"]["completion_tokens_details"]
    )


def test_a_limit_in_the_middle_of_a_thought_leaves_a_thought(thinker: EngineServer) -> None:
    for found in ask(thinker, saying("<t>Thinking on and on</t>Yes", max_tokens=11)):
        assert (found["reasoning_content"], found["content"], found["reason"]) == (
            "Thinking",
            "",
            "length",
        )
        assert found["usage"]["completion_tokens"] == 11


def test_without_the_form_a_tag_is_text(shared_server: EngineServer) -> None:
    said = "<think>Hm</think>Yes"
    for found in ask(shared_server, saying(said)):
        assert (found["reasoning_content"], found["content"]) == ("", said)
        assert "completion_tokens_details" not in found["usage"]


def test_a_thought_goes_back_into_the_conversation(thinker: EngineServer) -> None:
    told: list[Any] = []
    codec = thinker.engine.codec
    render = codec.render_chat
    codec.render_chat = lambda messages, *rest: told.append(messages) or render(messages, *rest)  # type: ignore
    try:
        past = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
        with thinker.http() as http:
            assert http.post(CHAT, json=chat_body(messages=[USER, past, USER])).status_code == 200
            wrong = http.post(CHAT, json=chat_body(messages=[USER | {"reasoning_content": "Hm"}]))
    finally:
        codec.render_chat = render  # type: ignore
    assert told[0][1] == past
    assert wrong.json()["error"]["param"] == "messages[0].reasoning_content"


def respond(server: EngineServer, said: str, **fields: Any) -> Any:
    message = {"role": "assistant", "content": said[::-1]}
    with server.openai() as client:
        answer = client.responses.create(model=MODEL, input=[message], **fields)
        return list(answer) if fields.get("stream") else answer


F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def test_responses_have_items_for_thoughts_texts_and_calls(thinker: EngineServer) -> None:
    answer = respond(thinker, f"<t>Hm</t>Wait. {CALL}", tools=[F])
    thought, message, call = answer.output
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (thought.content[0].text, thought.summary) == ("Hm", [])
    assert (message.content[0].text, answer.output_text) == ("Wait.", "Wait.")
    assert (call.name, json.loads(call.arguments), call.status) == ("f", {}, "completed")
    assert answer.usage.output_tokens_details.reasoning_tokens >= 6
    assert answer.tools[0].name == "f"
    # All of it goes back, and what came of the call.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    for sent in (answer.output, [item.model_dump() for item in answer.output]):
        with thinker.openai() as client:
            again = client.responses.create(
                model=MODEL, input=[{"role": "user", "content": "a"}, *sent, result], tools=[F]
            )
        prompt = "".join(map(chr, thinker.engine.submitted[-1].prompt_token_ids))
        assert prompt == "<user>a<assistant>Wait.<tool>sunny"
        assert again.status == "completed"


def test_the_stream_of_items_is_what_the_client_puts_together(thinker: EngineServer) -> None:
    events = respond(thinker, f"<t>Hm</t>Wait. {CALL}", tools=[F], stream=True)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    message = {"role": "assistant", "content": f"<t>Hm</t>Wait. {CALL}"[::-1]}
    with (
        thinker.openai() as client,
        client.responses.stream(model=MODEL, input=[message], tools=[F]) as stream,
    ):
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Wait."
    cut = respond(thinker, "<t>Thinking on and on</t>Yes", max_output_tokens=11)
    assert (cut.status, [item.type for item in cut.output]) == ("incomplete", ["reasoning"])
    assert cut.output[0].content[0].text == "Thinking"


def test_responses_hold_answers_to_schemas_and_calls(thinker: EngineServer) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"format": {"type": "json_schema", "name": "reply", "schema": schema, "strict": True}}
    answer = respond(thinker, '{"ok":true}', text=wanted)
    assert '"ok"' in thinker.engine.grammars.sources[-1][0]
    assert answer.text.format.name == "reply"
    answer = respond(thinker, CALL, tools=[F], tool_choice={"type": "function", "name": "f"})
    assert (answer.output[0].type, answer.tool_choice.name) == ("function_call", "f")
    assert "calls" in thinker.engine.grammars.sources[-1][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [F, F]}, "tools[1].name"),
        (
            {"tools": [F | {"parameters": {"type": "string"}, "strict": True}]},
            "tools[0].parameters.type",
        ),
        (
            {"tools": [F | {"parameters": {"not": {}}}], "tool_choice": "required"},
            "tools[0].parameters.not",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
            "text.format.schema.not",
        ),
        ({"text": {"oops": 1}}, "text.oops"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "a"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "sandwich"}]}, "input[0].type"),
    ],
)
def test_what_is_wrong_with_an_item_or_a_tool_has_its_name_here(
    thinker: EngineServer, fields: dict[str, Any], param: str
) -> None:
    with thinker.http() as http:
        response = http.post("/v1/responses", json={"model": MODEL, "input": "abc", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
