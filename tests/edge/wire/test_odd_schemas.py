"""Schemas of tools that cannot be followed: where the model may choose, they fail no request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.bare_tokenizer import load_tokenizer
from tangram.serve.bodies.json_schema import SchemaBounds
from tangram.serve.chat.offer import Offer
from tangram.serve.chat.schema import ChatRequest
from tangram.serve.formats.forms import AnswerForm
from tests.mentions import assert_refused, mentions
from tests.templates import HERMES

from .conftest import CHAT, MODEL, USER
from .scripted import ScriptedServer, run_scripted_server
from .tiny import tiny_folder

VOCABULARY, RESPONSES = 49152, "/v1/responses"
TAGS = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}
<parameter={{ name }}>
{{ value }}
</parameter>{% endfor %}
</function>
</tool_call>{% endfor %}
{% endfor %}"""
GOOD = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"properties": {"a": {"not": {}}}}, "'not'"),
    "unknown": ({"properties": {"a": {"x-frob": 1}}}, "'x-frob'"),
    "format": ({"properties": {"a": {"type": "string", "format": "frob"}}}, "frob"),
    "pattern": ({"properties": {"a": {"pattern": "("}}}, "unclosed"),
    "recursive": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "end"),
    "nowhere": ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "b"),
    "long": ({"properties": {"a": {"pattern": "a" * 8001}}}, "8000"),
    "type": ({"type": "array"}, "object"),
    "properties": ({"properties": ["a"]}, "dict"),
    "slow": ({"properties": {"a": {"type": "integer", "multipleOf": 99999989}}}, "10000"),
}


def tool(name: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with run_server(tmp_path_factory, HERMES) as server:
        yield server


def run_server(factory: pytest.TempPathFactory, template: str) -> Any:
    folder = tiny_folder(factory.mktemp("odd"), vocabulary=VOCABULARY)
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return run_scripted_server(folder, VOCABULARY)


def post(server: ScriptedServer, path: str = CHAT, **fields: Any) -> Any:
    asked = {"messages": [USER]} if path == CHAT else {"input": "say it"}
    with server.http() as client:
        return client.post(path, json={"model": MODEL, "temperature": 0, **asked, **fields})


def say(server: ScriptedServer, text: str) -> None:
    server.say(server.engine.codec.encode(text))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("kind", ODD)
def test_a_tool_with_an_odd_schema_is_free_and_the_others_are_not(
    server: ScriptedServer, kind: str
) -> None:
    schema, words = ODD[kind]
    tools = [tool("first", GOOD), tool("odd", schema), tool("last", GOOD)]
    said = {"city": [1, {"deep": None}]}
    say(server, call("odd", json.dumps(said)) + call("last", '{"city": "Rome"}'))
    answer = post(server, tools=tools, max_tokens=100)
    assert answer.status_code == 200, answer.text
    (warning,) = answer.json()["warnings"]
    assert mentions(warning, f"'odd' {words}") and "tools[1].function.param" in warning, warning
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    found = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]
    assert found == [("odd", said), ("last", {"city": "Rome"})]
    say(server, call("last", '{"city": "Oslo"}'))
    held = post(server, tools=tools, max_tokens=100).json()["choices"][0]
    assert "Oslo" not in json.dumps(held), "a tool of a good schema is free too"


@pytest.mark.parametrize("kind", ODD)
def test_what_must_be_followed_is_refused_with_the_reason(
    server: ScriptedServer, kind: str
) -> None:
    schema, words = ODD[kind]
    for fields in (
        {"tools": [tool("odd", schema)], "tool_choice": "required"},
        {"tools": [tool("odd", schema)], "tool_choice": choose("odd")},
        {"tools": [tool("odd", schema, strict=True), tool("good", GOOD)]},
    ):
        response = post(server, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"].startswith("tools") and mentions(error["message"], words), error


def test_a_tool_that_is_not_called_matters_to_nobody(server: ScriptedServer) -> None:
    tools = [tool("odd", ODD["not"][0]), tool("good", GOOD)]
    say(server, call("good", '{"city": "Rome"}'))
    forced = post(server, tools=tools, tool_choice=choose("good"), max_tokens=100)
    say(server, "hello")
    none = post(server, tools=tools, tool_choice="none", max_tokens=100)
    for answer in (forced, none):
        assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text


def test_a_warning_is_said_once(server: ScriptedServer) -> None:
    tools = [tool("odd", ODD["not"][0])]
    say(server, "hello")
    lines = post(server, tools=tools, stream=True, max_tokens=9).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(chunks) > 2
    assert ["warnings" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    say(server, "hello")
    flat = {"type": "function", **tools[0]["function"]}
    answer = post(server, RESPONSES, tools=[flat]).json()
    assert mentions(answer["warnings"][0], "tools[0].parameters.properties.a.not")


def test_what_nothing_can_be_made_of_is_refused_whatever_is_chosen(server: ScriptedServer) -> None:
    for schema, words in (
        ({"description": "a" * (2 << 20)}, "2097152"),
        ({"properties": {"a": json.loads('{"items":' * 70 + "{}" + "}" * 70)}}, "64"),
    ):
        for choice in ("auto", "none"):
            response = post(server, tools=[tool("a", schema)], tool_choice=choice)
            assert_refused(response, "tools[0].function.parameters", words)
    response = post(server, tools=[tool("a", GOOD)] * 257)
    assert_refused(response, "tools", "256")


def test_tools_that_are_too_many_together_are_free(server: ScriptedServer) -> None:
    """Each is fine alone, but no grammar can be made of all."""
    large = {"properties": {f"p{at}": {"pattern": f"(a|b)*a(a|b){{{at + 9}}}"} for at in range(40)}}
    tools = [tool(f"large_{at}", large) for at in range(4)]
    say(server, call("large_1", "{}"))
    answer = post(server, tools=tools, max_tokens=60).json()
    assert answer["choices"][0]["message"]["tool_calls"]


def test_tags_of_a_free_tool_are_any_parameters(tmp_path_factory: pytest.TempPathFactory) -> None:
    with run_server(tmp_path_factory, TAGS) as server:
        written = "<parameter=b>\n[1]\n</parameter>\n<parameter=c>\nx y\n</parameter>\n"
        say(server, f"<tool_call>\n<function=odd>\n{written}</function>\n</tool_call>")
        tools = [tool("odd", {"properties": {"a<": {}}}), tool("good", GOOD)]
        answer = post(server, tools=tools, max_tokens=100).json()
        assert mentions(answer["warnings"][0], "'odd' rename")
        (one,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(one["function"]["arguments"]) == {"b": [1], "c": "x y"}


def make_large(number: int) -> dict[str, Any]:
    """A tool as those of MCP servers are: some 5 KB of schema."""
    about = "what the server does with it, in more words than anybody reads, " * 2
    kinds: list[dict[str, Any]] = [
        {"type": "string", "description": about},
        {"type": "integer", "minimum": 1, "maximum": 100, "description": about},
        {"enum": [f"choice {at} of {number}" for at in range(8)], "description": about},
        {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
        {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
    ]
    properties = {f"p{at}_{number}": kinds[at % len(kinds)] for at in range(30)}
    return tool(f"tool_{number}", {"type": "object", "properties": properties})


def test_the_tools_of_many_servers_are_held_to_their_schemas(server: ScriptedServer) -> None:
    """200 of them make one grammar within its limits of time and memory."""
    body = {"model": MODEL, "messages": [USER], "tools": [make_large(at) for at in range(200)]}
    assert len(json.dumps(body["tools"])) > 1_000_000
    request = ChatRequest.model_validate(body)
    offer = Offer.of(request, SchemaBounds())
    form = AnswerForm(tools=server.engine.codec.tool_format)
    source, field = request.grammar(form, list(offer.tools.values())) or ("", "")
    matcher = server.engine.grammars.compile(source, field).begin()
    for token in server.engine.codec.encode(call("tool_77", '{"p2_77": "choice 3 of 77"}')):
        matcher.take(token)
        assert matcher.error is None, matcher.error
    assert not offer.faults
