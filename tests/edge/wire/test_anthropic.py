"""/v1/messages and its count_tokens, asked by Anthropic's client: an engine without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from random import Random
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import TypeAdapter

from tangram.serve.answers import sending
from tangram.types import ThinkingFormat, ToolFormat
from tests.mentions import mentions

from .conftest import CHAT, MODEL, USER, EngineServer, run_fake_server, scrape

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALL = '<c>{"name":"f","arguments":{"a":[1,"é"]}}</c>'
RESULT = {"type": "tool_result", "tool_use_id": "a"}
PICTURE = [{"type": "image", "source": {}}]
NOTE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture(scope="module")
def thinker() -> Iterator[EngineServer]:
    """Its model marks thoughts and calls, and says what it is asked, backwards."""
    with run_fake_server() as server:
        server.engine.codec.thinking_format = ThinkingFormat("<t>", "</t>")
        server.engine.codec.tool_format = ToolFormat("<c>", "</c>")
        yield server


def sdk(server: EngineServer, api_key: str = "none") -> Any:
    """The official client; untyped, because tests also send what its types forbid."""
    return anthropic.Anthropic(base_url=server.url, api_key=api_key, max_retries=0, timeout=30)


def saying(text: str, **fields: Any) -> dict[str, Any]:
    """A request that `text` answers."""
    asked = {"role": "user", "content": f"<assistant>{text[::-1]}"}
    return {"model": MODEL, "max_tokens": 60, "messages": [asked], **fields}


def create(server: EngineServer, **fields: Any) -> Any:
    with sdk(server) as client:
        return client.messages.create(**{"model": MODEL, "max_tokens": 60, **fields})


def post(server: EngineServer, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json={"model": MODEL, **fields})


def check_refusal(response: httpx.Response, status: int, kind: str, facts: str) -> str:
    """The message of an error in Anthropic's form."""
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == response.headers["request-id"]
    assert body.keys() == {"type", "error", "request_id"}
    assert mentions(body["error"]["message"], facts), body
    return str(body["error"]["message"])


def prompt_of(server: EngineServer) -> str:
    return "".join(map(chr, server.engine.submitted[-1].prompt_token_ids))


def test_a_text_gets_an_answer_with_its_usage(fake_server: EngineServer) -> None:
    asked = {"system": "be brief", "messages": [{"role": "user", "content": "abc"}]}
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    answer = create(fake_server, **asked, extra_body=sampled, metadata={"user_id": "me"})
    assert [block.to_dict() for block in answer.content] == [
        {"type": "text", "text": "cba>resu<feirb eb>metsys<"}
    ]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (25, 0)
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (0, 25)
    sampling = fake_server.engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (
        *sampled.values(),
        60,
    )
    again = create(fake_server, **asked).usage
    assert (again.input_tokens, again.cache_read_input_tokens) == (1, 24)
    with sdk(fake_server) as client:
        assert client.messages.count_tokens(model=MODEL, **asked).input_tokens == 25


@pytest.mark.parametrize(
    ("said", "fields", "content", "end"),
    [
        ("Yes", {}, [("text", "Yes")], ("end_turn", None)),
        ("Yes", {"max_tokens": 2}, [("text", "Ye")], ("max_tokens", None)),
        ("<t>Hm.</t>Yes", {}, [("thinking", "Hm."), ("text", "Yes")], ("end_turn", None)),
        ("<t>Hm", {}, [("thinking", "Hm")], ("end_turn", None)),
        (
            f"<t>Hm</t>Wait. {CALL}",
            {"tools": [TOOL], "max_tokens": 99},
            [("thinking", "Hm"), ("text", "Wait."), ("tool_use", {"a": [1, "é"]})],
            ("tool_use", None),
        ),
        (
            CALL,
            {"tools": [TOOL], "max_tokens": CALL.index("é")},
            [("tool_use", {"a": [1]})],
            ("max_tokens", None),
        ),
        (
            "<t>Hm.</t>Yes",
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            [("thinking", ""), ("text", "Yes")],
            ("end_turn", None),
        ),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(
    thinker: EngineServer,
    said: str,
    fields: dict[str, Any],
    content: list[tuple[str, Any]],
    end: tuple[str, str | None],
) -> None:
    body = saying(said, **fields)
    with sdk(thinker) as client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
    for found in (whole, streamed):
        blocks = [block.to_dict() for block in found.content]
        names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
        assert [(block["type"], block[names[block["type"]]]) for block in blocks] == content
        assert (found.stop_reason, found.stop_sequence) == end
        assert all(block["signature"] for block in blocks if block["type"] == "thinking")
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert whole.usage.output_tokens_details == streamed.usage.output_tokens_details
    assert events[-1].type == "message_stop"


def make_answer(random: Random) -> tuple[str, dict[str, Any]]:
    """What a model says and what is asked of it: thoughts, texts and calls, cut anywhere."""
    parts = ["Wait. ", "\n\n", "é🤷", "<", "STOP", "<c>no</c>", CALL, CALL.replace('"a"', '"b"')]
    said = random.choice(["", "<t>Hm 漢\n</t>", "<t></t>", "<t>cut"])
    said += "".join(random.choices(parts, k=random.randrange(5)))
    fields: dict[str, Any] = {"max_tokens": random.randrange(1, len(said) + 20)}
    if random.random() < 0.8:
        fields["tools"] = [TOOL]
    if random.random() < 0.3:
        fields["stop_sequences"] = ["STOP"]
    return said or "x", fields


def check_events(recorded: str, kind: TypeAdapter[Any]) -> None:
    """Each is of the client's own types, and one block ends before the next begins."""
    ended, is_open = 0, False
    for line in recorded.splitlines():
        if not line.startswith("data: ") or '"type":"ping"' in line:
            continue
        event = kind.validate_python(json.loads(line.removeprefix("data: ")))
        if event.type.startswith("content_block"):
            assert (event.index, is_open) == (ended, event.type != "content_block_start")
            is_open = event.type != "content_block_stop"
            ended += not is_open
        elif event.type == "message_delta":
            assert not is_open


def test_the_client_reads_two_hundred_streams_as_it_reads_whole_answers(
    thinker: EngineServer,
) -> None:
    random, kind = Random(5), TypeAdapter[Any](anthropic.types.RawMessageStreamEvent)
    with sdk(thinker) as client, thinker.http() as raw:
        for _ in range(200):
            said, fields = make_answer(random)
            body = saying(said, **fields)
            whole = client.messages.create(**body)
            with client.messages.stream(**body) as stream:
                streamed = stream.get_final_message()
            for name in ("stop_reason", "stop_sequence"):
                assert getattr(streamed, name) == getattr(whole, name), body
            assert streamed.usage.output_tokens == whole.usage.output_tokens
            shown = [
                [
                    {name: value for name, value in block.to_dict().items() if name != "id"}
                    for block in answer.content
                ]
                for answer in (streamed, whole)
            ]
            assert shown[0] == shown[1], body
            check_events(raw.post(MESSAGES, json=body | {"stream": True}).text, kind)


def test_events_come_in_their_order(thinker: EngineServer) -> None:
    body = saying(f"<t>Hm</t>Wait. {CALL}", tools=[TOOL], max_tokens=99, stream=True)
    with thinker.http() as client:
        lines = client.post(MESSAGES, json=body).text.strip().split("\n\n")
    events = [json.loads(line.partition("\ndata: ")[2]) for line in lines]
    assert [line.split("\n")[0] for line in lines] == [f"event: {e['type']}" for e in events]
    kinds = [e.get("delta", {}).get("type", e["type"]) for e in events]
    shortened = [kind for kind, _ in groupby(kinds)]
    block = ("content_block_start", "content_block_stop")
    assert shortened == [
        "message_start",
        "ping",
        *(block[0], "thinking_delta", "signature_delta", block[1]),
        *(block[0], "text_delta", block[1]),
        *(block[0], "input_json_delta", block[1]),
        "message_delta",
        "message_stop",
    ]
    starts = [e["index"] for e in events if e["type"] == block[0]]
    assert starts == [e["index"] for e in events if e["type"] == block[1]] == [0, 1, 2]
    opening = events[0]["message"]
    assert (opening["content"], opening["stop_reason"]) == ([], None)
    assert opening["usage"]["input_tokens"] + opening["usage"]["cache_read_input_tokens"] == len(
        prompt_of(thinker)
    )
    assert events[-2]["usage"]["output_tokens"] > opening["usage"]["output_tokens"]


def test_a_conversation_goes_on_with_the_answer_as_the_client_holds_it(
    thinker: EngineServer,
) -> None:
    with sdk(thinker) as client:
        said = saying(f"<t>Hm</t>Wait. {CALL}", tools=[TOOL], max_tokens=99)
        first = client.messages.create(**said)
    (call,) = (block for block in first.content if block.type == "tool_use")
    told: list[Any] = []
    codec = thinker.engine.codec
    render = codec.render_chat
    codec.render_chat = lambda messages, *rest: told.append(messages) or render(messages, *rest)  # type: ignore
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    answer = [
        result | {"content": [{"type": "text", "text": "no", **NOTE}], **NOTE},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "so"},
    ]
    try:
        for sent in (first.content, [block.model_dump() for block in first.content]):
            create(
                thinker,
                tools=[TOOL],
                messages=[
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": sent},
                    {"role": "user", "content": answer},
                    {"role": "user", "content": "now"},
                ],
            )
    finally:
        codec.render_chat = render  # type: ignore
    function = {"name": "f", "arguments": {"a": [1, "é"]}}
    assert (
        told[0]
        == told[1]
        == [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_content": "Hm",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "Error: no"},
            {"role": "user", "content": "and\nso\nnow"},
        ]
    )


def test_notes_change_no_prompt(fake_server: EngineServer) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=af31"}
    plain: dict[str, Any] = {"system": "brief", "messages": [USER]}
    text = {"type": "text", **NOTE}
    noted = {
        "system": [billing, text | {"text": "brief"}],
        "messages": [{"role": "user", "content": [text | {"text": "say it"}]}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        **NOTE,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-1m-2025-08-07"}
    with fake_server.http() as client:
        for body in (plain, noted):
            body = {"model": MODEL, "max_tokens": 5, **body}
            assert client.post(f"{MESSAGES}?beta=true", json=body, headers=headers).is_success
    first, second = fake_server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids


def test_an_answer_may_ask_for_more_than_the_context_has_left(fake_server: EngineServer) -> None:
    answer = create(fake_server, messages=[{"role": "user", "content": "endless"}], max_tokens=9999)
    tokens = answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.stop_reason, tokens) == ("model_context_window_exceeded", 512)
    long = [{"role": "user", "content": "a" * 600}]
    response = post(fake_server, max_tokens=1, messages=long)
    # The words by which agents know that they have to shorten a conversation.
    message = check_refusal(response, 400, "invalid_request_error", "606 511")
    assert message.startswith("prompt is too long")


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        *(
            (
                {"messages": [USER, {"role": "user", "content": [{"type": kind, "source": {}}]}]},
                f"messages[1].content '{kind}'",
            )
            for kind in ("image", "document", "server_tool_use", "web_search_tool_result")
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": PICTURE}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages[0].content 'thinking' 'assistant'",
        ),
        ({"messages": [USER | {"content": [{"type": {}}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f", "input_schema": {"type": 1}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences 16"),
        ({"stop_sequences": ["a" * 257]}, "stop_sequences 257 256"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"top_k": -2}, "top_k -2"),
        ({"oops": 1}, "oops"),
        ({"system": [{"type": "text", "text": "\ud800"}]}, "system[0].text"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(
    shared_server: EngineServer, fields: dict[str, Any], facts: str
) -> None:
    body = json.dumps({"model": MODEL, "max_tokens": 5, "messages": [USER], **fields})
    with shared_server.http() as client:
        response = client.post(MESSAGES, content=body, headers={"Content-Type": "application/json"})
    assert all(fact in response.text for fact in facts.split()), response.text
    check_refusal(response, 400, "invalid_request_error", "")


def test_tool_runners_of_the_client_go_on_without_a_thread(fake_server: EngineServer) -> None:
    """They ask the server to hold the conversation, until they are told in this form."""
    refused = post(fake_server, max_tokens=9, messages=[USER], thread={"type": "create"})
    check_refusal(refused, 400, "invalid_request_error", "thread")
    details = refused.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    with sdk(fake_server) as client:
        runner = client.beta.messages.tool_runner(**saying("done"), tools=[])
        assert [message.content[0].text for message in runner] == ["done"]


@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "f"}, True, False),
    ],
)
def test_a_choice_of_tools_is_the_chat_endpoints(
    thinker: EngineServer, choice: dict[str, Any], forced: bool, parallel: bool
) -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    chosen: Any = {"auto": "auto", "any": "required"}.get(choice["type"])
    sources = thinker.engine.grammars.sources
    assert post(thinker, tools=[TOOL], tool_choice=choice, messages=[USER], max_tokens=3).is_success
    made = thinker.engine.submitted[-1].grammar
    chat = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": chosen or {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": parallel or choice["type"] == "tool",
    }
    assert post(thinker, CHAT, messages=[USER], max_tokens=3, **chat).is_success
    assert made == thinker.engine.submitted[-1].grammar and made is not None
    assert sources


def test_no_tool_is_called_where_none_may_be(thinker: EngineServer) -> None:
    answer = create(thinker, **saying(CALL, tools=[TOOL], tool_choice={"type": "none"}))
    assert [block.type for block in answer.content] == ["text"]


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"does {name}",
        "input_schema": {"type": "object"},
        **fields,
    }


def searching(*names: str, said: str = "") -> list[dict[str, Any]]:
    """A conversation in which the tool `search` has found tools, and `said` is the answer."""
    use = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": name, **NOTE} for name in names]
    text = {"type": "text", "text": f"<assistant>{said[::-1]}"}
    return [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [RESULT | {"content": found}, text]},
    ]


def test_a_deferred_tool_is_read_and_called_where_a_result_has_named_it(
    thinker: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferred = [tool(name, defer_loading=True) for name in ("far", "farther")]
    tools, codec = [tool("search"), *deferred], thinker.engine.codec
    call = '<c>{"name":"far","arguments":{}}</c>'

    def ask(names: list[str], **fields: Any) -> tuple[str, int, list[str]]:
        asked = {"tools": tools, "messages": searching(*names, said=call), **fields}
        answer = create(thinker, max_tokens=200, **asked)
        with sdk(thinker) as client:
            counted = client.messages.count_tokens(model=MODEL, **asked).input_tokens
        called = [block.name for block in answer.content if block.type == "tool_use"]
        return prompt_of(thinker), counted, called

    listed: list[list[str]] = []
    render = codec.render_chat

    def note(messages: Any, tools: Any, options: Any) -> Any:
        listed.append([each["function"]["name"] for each in tools])
        return render(messages, tools, options)

    monkeypatch.setattr(codec, "render_chat", note)
    plain, plain_tokens, called = ask([], tools=tools[:1])
    unread, unread_tokens, none = ask([])
    assert (unread, unread_tokens, none) == (plain, plain_tokens, called) and called == []
    read, read_tokens, far = ask(["far"])
    definition = {
        "type": "function",
        "function": {"name": "far", "description": "does far", "parameters": {"type": "object"}},
    }
    assert json.dumps(definition) in read and "does farther" not in read
    assert read_tokens == len(read) > unread_tokens and far == ["far"]
    twice, _, _ = ask(["far", "search", "far"])
    assert twice.count("does far") == 1 and "\nsearch\nfar" in twice
    assert ask(["farther"])[2] == [], "another one"
    assert listed and all(names == ["search"] for names in listed), "the prefix stays"


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"tools": [tool("far", defer_loading=True)]}, "tools defer_loading"),
        ({"tools": [tool("near")], "messages": searching("far")}, "messages tool_reference far"),
        (
            {
                "tools": [tool("near"), tool("far", defer_loading=True)],
                "tool_choice": {"type": "tool", "name": "far"},
            },
            "tool_choice far near",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_reference"}]}]},
            "messages[0].content tool_reference",
        ),
    ],
)
def test_a_tool_that_nobody_can_find_is_refused(
    thinker: EngineServer, fields: dict[str, Any], facts: str
) -> None:
    response = post(thinker, max_tokens=5, **{"messages": [USER], **fields})
    check_refusal(response, 400, "invalid_request_error", facts)


@pytest.mark.parametrize(
    ("variables", "fields", "told"),
    [
        ((), {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {}),
        ((), {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {}),
        (("enable_thinking",), {}, {}),
        (
            ("enable_thinking",),
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True},
        ),
        (("thinking",), {"thinking": {"type": "adaptive"}}, {"thinking": True}),
        (("enable_thinking",), {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (("reasoning_effort",), {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (
            ("reasoning_effort",),
            {"output_config": {"effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_a_template_is_told_of_thoughts_as_far_as_it_listens(
    fake_server: EngineServer, variables: tuple[str, ...], fields: dict[str, Any], told: Any
) -> None:
    codec = fake_server.engine.codec
    codec.template_options = frozenset(variables)
    create(fake_server, messages=[USER], **fields)
    asked = codec.told[-1]
    assert {name: asked[name] for name in asked if name in (*variables, *told)} == told


@pytest.mark.parametrize("begun", [True, False])
def test_an_answer_goes_on_where_the_last_message_ends(
    fake_server: EngineServer, begun: bool
) -> None:
    said = "Sure:" if begun else " "
    create(fake_server, messages=[USER, {"role": "assistant", "content": said}])
    assert fake_server.engine.codec.told[-1].get("continue_final_message", False) is begun


def test_an_answer_follows_a_schema(fake_server: EngineServer) -> None:
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    create(fake_server, messages=[USER], output_config={"format": form})
    assert fake_server.engine.submitted[-1].grammar is not None
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    wrong = {"type": "json_schema", "schema": deep}
    response = post(fake_server, messages=[USER], max_tokens=3, output_config={"format": wrong})
    check_refusal(response, 400, "invalid_request_error", "output_config.format.schema")


def test_an_engine_that_gives_up_ends_the_stream_with_an_error_event(
    fake_server: EngineServer,
) -> None:
    asked = {"messages": [{"role": "user", "content": "broken"}]}
    with pytest.raises(anthropic.InternalServerError, match="caught fire"):
        create(fake_server, **asked)
    with sdk(fake_server) as client, pytest.raises(anthropic.APIStatusError, match="caught fire"):
        list(client.messages.create(model=MODEL, max_tokens=9, stream=True, **asked))
    last = post(fake_server, max_tokens=9, stream=True, **asked).text.strip().split("\n\n")[-1]
    kind, _, data = last.partition("\ndata: ")
    assert kind == "event: error" and json.loads(data)["error"] == {
        "type": "api_error",
        "message": "the pages caught fire",
    }


def test_a_stream_that_waits_shows_that_it_lives(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PING_S", 0.05)
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "silent"}]}
    with (
        fake_server.http() as client,
        client.stream("POST", MESSAGES, json=body | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        # A comment: no client knows an event before the message.
        assert [next(lines) for _ in range(4)] == [": ping", ""] * 2


def test_errors_have_the_form_of_the_path(locked_server: EngineServer) -> None:
    key = {"x-api-key": "sesame"}
    with locked_server.http() as client:
        check_refusal(client.post(MESSAGES, json={}), 401, "authentication_error", "x-api-key")
        wrong = client.post(MESSAGES, json={}, headers={"x-api-key": "wrong"})
        check_refusal(wrong, 401, "authentication_error", "x-api-key")
        check_refusal(client.get(MESSAGES, headers=key), 405, "invalid_request_error", "GET")
        batches = client.post(f"{MESSAGES}/batches", headers=key)
        check_refusal(batches, 404, "not_found_error", "/v1/messages/batches")
        other = {"model": "claude", "max_tokens": 1, "messages": [USER]}
        for path in (MESSAGES, COUNT):
            body = other if path == MESSAGES else {"model": "claude", "messages": [USER]}
            check_refusal(client.post(path, json=body, headers=key), 404, "not_found_error", MODEL)
        bearer = {"Authorization": "Bearer sesame"}
        doubled = client.post("/v1/v1/messages", headers=bearer).json()["error"]["message"]
        assert mentions(doubled, "/v1/messages before")
        # A key in that header opens these paths alone, and the others keep their form.
        assert client.get("/v1/models", headers=key).json()["error"]["code"] == "invalid_api_key"


def test_a_body_over_the_bound_is_refused_in_the_same_form() -> None:
    with run_fake_server(max_body_mb=0.0001) as server:
        response = post(server, messages=[USER | {"content": "a" * 200}])
    check_refusal(response, 413, "request_too_large", "100")


def test_both_headers_of_a_key_are_known(locked_server: EngineServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER]}
    for named in ({"api_key": "sesame"}, {"auth_token": "poppy", "api_key": None}):
        with anthropic.Anthropic(base_url=locked_server.url, max_retries=0, **named) as client:
            answer = client.messages.create(**asked, max_tokens=9)
            assert answer._request_id.startswith("req-")
            used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
            assert client.messages.count_tokens(**asked).input_tokens == used
    wrong = sdk(locked_server, "wrong")
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**asked, max_tokens=9)


def test_full_queues_and_counts_are_those_of_every_endpoint(fake_server: EngineServer) -> None:
    assert post(fake_server, COUNT, messages=[USER]).json().keys() == {"input_tokens"}
    assert post(fake_server, messages=[USER], max_tokens=3, cache_salt="s").is_success
    assert fake_server.engine.submitted[-1].cache_salt == "s"
    response = post(fake_server, COUNT, messages=[USER], max_tokens=3)
    check_refusal(response, 400, "invalid_request_error", "max_tokens")
    with fake_server.http() as client:
        found = scrape(client)
    counted = {
        labels: value
        for (name, labels), value in found.items()
        if name == "tangram_http_requests_total" and MESSAGES in labels
    }
    assert sorted(counted.values()) == [1, 1, 1]
