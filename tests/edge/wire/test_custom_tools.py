"""Tools that are no functions: those with a text as input, and those of other servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tangram.types import CallStyle, ToolFormat

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, run_fake_server, stream_data

RESPONSES = "/v1/responses"
JSON = ToolFormat("<", ">", "$name$arguments", CallStyle.NAMED)
TAGS = ToolFormat("<c>", "</c>", "$name;$arguments", CallStyle.TAGGED, "<k=$key>$value</k>")
LARK = 'start: LINE+\nLINE: /[a-z "]+/ LF\n%import common.LF'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": LARK}
PATCH = {"type": "custom", "name": "p", "description": "Patches."}
TEXT = 'a "b" é\n\\n'
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["a.b"]}},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "local_shell"},
    {"type": "file_search", "vector_store_ids": ["a"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "mac"},
    {"type": "mcp", "server_label": "a", "server_url": "https://a.b", "authorization": "secret"},
    {"type": "image_generation"},
]


@pytest.fixture
def server() -> Iterator[EngineServer]:
    """Its model says what it is asked, backwards."""
    with run_fake_server() as server:
        server.engine.codec.tool_format = JSON
        yield server


def ask(server: EngineServer, text: str = "Yes", **fields: Any) -> dict[str, Any]:
    """The whole answer, which the stream's last event is, too."""
    said = [{"role": "assistant", "content": text[::-1]}]
    body = {"model": MODEL, "input": said, "max_output_tokens": 60, **fields}
    with server.http() as http:
        answer = http.post(RESPONSES, json=body)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refuse(server: EngineServer, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": "a", **fields}
    with server.http() as http:
        answer = http.post(RESPONSES, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_tools_of_other_servers_are_left_out_and_named_once(server: EngineServer) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    answer = ask(server, tools=[*OTHERS[:4], function, *OTHERS[4:], OTHERS[0]])
    assert [tool["name"] for tool in answer["tools"]] == ["f"]
    (warning,) = answer["warnings"]
    for tool in OTHERS:
        assert warning.count(repr(tool["type"])) == 1
    assert "secret" not in json.dumps(answer)
    without = ask(server, tools=[function])
    assert answer["usage"]["input_tokens"] == without["usage"]["input_tokens"]
    assert "warnings" not in without
    alone = ask(server, tools=OTHERS)
    assert (alone["tools"], alone["tool_choice"]) == ([], "none")


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "mcp", "server_label": "a"}])
def test_a_choice_of_what_is_not_run_is_refused_by_name(
    server: EngineServer, choice: dict[str, str]
) -> None:
    error = refuse(server, tools=OTHERS, tool_choice=choice)
    assert error["param"] == "tool_choice"
    assert repr(choice["type"]) in error["message"]


def test_faults_name_the_place_that_the_client_sent(server: EngineServer) -> None:
    wrong = {"type": "function", "name": "f", "parameters": {"type": "array"}, "strict": True}
    error = refuse(server, tools=[OTHERS[0], wrong, PATCH])
    assert error["param"] == "tools[1].parameters.type"
    assert refuse(server, tools=[OTHERS[0], {"type": "w" * 65}])["param"] == "tools[1].type"
    assert refuse(server, tools=OTHERS, tool_choice="required")["param"] == "tool_choice"


def test_items_of_other_tools_are_left_out_and_named(server: EngineServer) -> None:
    others = [
        {"type": "web_search_call", "id": "a", "status": "completed", "action": {"query": "b"}},
        {"type": "local_shell_call", "call_id": "a", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "a", "output": "{}"},
        {"type": "mcp_list_tools", "id": "a", "server_label": "b", "tools": []},
    ]
    said = {"role": "user", "content": "hi", "phase": "commentary"}
    answer = ask(
        server, input=[said, *others], client_metadata={"a": "b" * 600}, metadata={"c": "d"}
    )
    assert all(repr(item["type"]) in answer["warnings"][0] for item in others)
    assert answer["usage"]["input_tokens"] == ask(server, input=[said])["usage"]["input_tokens"]
    assert answer["metadata"] == {"c": "d"}
    assert refuse(server, input=[{"type": "sandwich"}])["param"].startswith("input[0]")


@pytest.mark.parametrize("form", [JSON, TAGS])
def test_the_input_of_a_custom_tool_is_streamed(server: EngineServer, form: ToolFormat) -> None:
    server.engine.codec.tool_format = form
    said = f"<p{json.dumps({'input': TEXT}, ensure_ascii=False)}>"
    if form is TAGS:
        said = f"<c>p;<k=input>{TEXT}</k></c>"
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = [{"role": "assistant", "content": said[::-1]}]
        with client.responses.stream(model=MODEL, input=asked, tools=[PATCH]) as stream:  # type: ignore[list-item]
            events: list[Any] = list(stream)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e.input for e in events if e.type == "response.custom_tool_call_input.done"]
    (item,) = ask(server, said, tools=[PATCH])["output"]
    streamed = events[-1].response.output[0]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "p", "completed")
    assert item["input"] == done == streamed.input == "".join(deltas) == TEXT
    assert len(deltas) > 4
    assert item["call_id"] and streamed.call_id


def test_a_custom_call_and_its_output_go_back_as_calls_of_a_function(server: EngineServer) -> None:
    told: list[Any] = []
    codec = server.engine.codec
    render = codec.render_chat
    codec.render_chat = lambda messages, *rest: told.append(messages) or render(messages, *rest)  # type: ignore
    first = ask(server, f"<p{json.dumps({'input': TEXT})}>", tools=[PATCH])
    item = first["output"][0]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    ask(server, input=[USER, item, result], tools=[PATCH])
    call = {"name": "p", "arguments": {"input": TEXT}}
    assert told[-1][1]["tool_calls"][0]["function"] == call
    assert told[-1][2] == {"role": "tool", "tool_call_id": item["call_id"], "content": "done"}


def test_chats_have_custom_tools_too(server: EngineServer) -> None:
    tool = {"type": "custom", "custom": {"name": "p", "format": {"type": "text"}}}
    said = [{"role": "assistant", "content": f"<p{json.dumps({'input': TEXT})}>"[::-1]}]
    body = chat_body(messages=said, tools=[tool], max_tokens=60)
    with server.http() as http:
        whole = http.post(CHAT, json=body).json()["choices"][0]["message"]["tool_calls"]
        with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
            *chunks, _ = stream_data(response)
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
        (call,) = whole
        assert (call["type"], call["custom"]) == ("custom", {"name": "p", "input": TEXT})
        assert "".join(piece["custom"]["input"] for piece in pieces) == TEXT
        history = [USER, {"role": "assistant", "tool_calls": whole}]
        history.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        again = http.post(CHAT, json=body | {"messages": history, "tool_choice": "none"})
        assert again.is_success, again.text
        named = {"type": "custom", "custom": {"name": "q"}}
        refused = http.post(CHAT, json=body | {"tool_choice": named})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", "start: ("),
        ("lark", 'start: "a" }\nother: "b"'),
        ("lark", "start: other"),
        ("lark", "start: <|im_end|>"),
        ("regex", "[a"),
        ("regex", "a(?=b)"),
        ("regex", "a" * 70_000),
    ],
)
def test_a_bad_grammar_is_refused_by_name(
    server: EngineServer, syntax: str, definition: str
) -> None:
    for form in (JSON, TAGS):
        server.engine.codec.tool_format = form
        given = {"type": "grammar", "syntax": syntax, "definition": definition}
        error = refuse(server, tools=[OTHERS[0], PATCH | {"format": given}])
        assert error["param"].startswith("tools[1].format"), error
        assert len(error["message"]) < 1000


def test_where_calls_are_json_a_grammar_in_lark_is_left_off_and_named(server: EngineServer) -> None:
    tool = PATCH | {"format": GRAMMAR}
    (warning,) = ask(server, tools=[tool])["warnings"]
    assert "'p'" in warning
    assert "lark" in warning
    error = refuse(server, tools=[tool], tool_choice={"type": "custom", "name": "p"})
    assert error["param"] == "tools[0].format"
    assert "send a 'regex', or leave the format out" in error["message"], "it says what to do"
    server.engine.codec.tool_format = TAGS
    assert "warnings" not in ask(server, tools=[tool])
