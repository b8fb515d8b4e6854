"""What a chat template is shown of the messages of /v1/messages, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tangram.serve.bodies.structured import NamedTool
from tangram.serve.messages.messages_schema import CountTokensRequest, MessagesRequest
from tangram.serve.transport.api_errors import of_validation

USER = {"role": "user", "content": "a"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def show(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What the template gets."""
    body = {"model": "m", "messages": list(messages), **fields}
    chat = CountTokensRequest.model_validate(body).chat(frozenset())
    return [message.for_template() for message in chat.messages]


def test_texts_of_a_turn_are_lines_and_turns_of_a_role_are_one() -> None:
    turns = [USER, {"role": "user", "content": [text("b"), text("c")]}]
    assert show(*turns) == [{"role": "user", "content": "a\nb\nc"}]
    system = [text("x-anthropic-billing-header: cch=1"), text("d"), text("e")]
    assert show(USER, system=system)[0] == {"role": "system", "content": "d\ne"}
    assert show(USER, system=system[:1]) == [USER]
    later = show(USER, {"role": "system", "content": "now"}, USER)
    assert [message["role"] for message in later] == ["user", "system", "user"]


def test_results_are_messages_of_their_own_in_the_order_of_the_blocks() -> None:
    content = [text("b"), RESULT | {"content": "1"}, RESULT | {"is_error": True}, text("c")]
    tool = {"role": "tool", "tool_call_id": "t1"}
    assert show({"role": "user", "content": content}) == [
        {"role": "user", "content": "b"},
        tool | {"content": "1"},
        tool | {"content": "Error: "},
        {"role": "user", "content": "c"},
    ]


def test_thoughts_texts_and_calls_of_an_answer_are_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm", "signature": "s" * 5000},
        {"type": "redacted_thinking", "data": "x"},
        text("Yes"),
        CALL,
    ]
    (_, answer) = show(USER, {"role": "assistant", "content": blocks})
    function = {"name": "f", "arguments": {"a": 1}}
    assert answer == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }


@given(st.lists(st.sampled_from([text("b"), CALL, RESULT]), min_size=1, max_size=6))
def test_no_block_is_lost(blocks: list[dict[str, Any]]) -> None:
    turns = [
        {"role": "assistant" if block is CALL else "user", "content": [block]} for block in blocks
    ]
    messages = show(*turns)
    calls = sum(len(message.get("tool_calls", [])) for message in messages)
    results = sum(message["role"] == "tool" for message in messages)
    assert (calls, results) == (blocks.count(CALL), blocks.count(RESULT))
    lines = [m["content"] for m in messages if m["role"] == "user"]
    assert "\n".join(lines).count("b") == blocks.count(text("b"))


def test_tools_and_choices_are_the_chats() -> None:
    tool = {"type": "custom", "name": "f", "input_schema": {"type": "object"}, "strict": True}
    body = {"model": "m", "messages": [USER], "tools": [tool], "max_tokens": 1}
    for choice, wanted in (
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "f"}, NamedTool("f")),
        ({"type": "none"}, "none"),
        (None, "auto"),
    ):
        request = MessagesRequest.model_validate(body | {"tool_choice": choice})
        chat = request.chat(frozenset())
        assert chat.tool_choice == wanted
        assert chat.parallel_tool_calls == (wanted != "required")
        function = chat.tools[0].function
        assert (function.name, function.strict) == ("f", True)
        assert function.parameters == {"type": "object"}


@pytest.mark.parametrize(
    ("content", "field", "told"),
    [
        ([{"type": "image", "source": {}}], "messages[0].content", "image"),
        ([{"type": "tool_use"}], "messages[0].content[0].id", "required"),
        ([RESULT | {"content": [CALL]}], "messages[0].content[0].content[0].type", "text"),
        ([CALL], "messages[0].content", "assistant"),
        ([CALL | {"input": []}], "messages[0].content[0].input", "dictionary"),
        ([CALL | {"input": {"a": "\ud800"}}], "messages[0].content[0].input", "surrogate"),
        (["a"], "messages[0].content[0]", "object"),
        ([text("a") | {"citations": [{}]}], "messages[0].content[0].citations", "citations"),
        ([{}] * 100_000, "messages[0].content[0].type", "required"),
    ],
)
def test_an_error_names_the_block(content: list[Any], field: str, told: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    with pytest.raises(ValidationError) as found:
        CountTokensRequest.model_validate(body)
    error = of_validation(found.value)
    assert (error.param, told in str(error)) == (field, True), str(error)
    assert found.value.error_count() < 10
