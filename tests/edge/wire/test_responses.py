"""/v1/responses, /tokenize, /detokenize, /version, /ready and echo, over an engine
without a model.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tangram import __version__
from tangram.errors import RequestError

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, run_fake_server, wait_until


def respond(server: EngineServer, **fields: Any) -> Any:
    with server.openai() as client:
        answer = client.responses.create(**{"model": MODEL, "input": "abc", **fields})
        return list(answer) if fields.get("stream") else answer


def test_a_text_gets_an_answer_with_its_usage(fake_server: EngineServer) -> None:
    answer = respond(
        fake_server, instructions="be brief", temperature=0.5, top_p=0.9, max_output_tokens=50
    )
    assert answer.output_text == "cba>resu<feirb eb>metsys<"
    assert (answer.status, answer.object, answer.model, answer.store) == (
        "completed",
        "response",
        MODEL,
        True,
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
        25,
        25,
        50,
    )
    sampling = fake_server.engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 50)


def test_a_conversation_goes_on_with_the_answer_as_the_client_holds_it(
    fake_server: EngineServer,
) -> None:
    first = respond(fake_server)
    question = {
        "role": "user",
        "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "so"}],
    }
    for sent in (first.output[0], first.output[0].model_dump(), first.output[0].to_dict()):
        respond(fake_server, input=[{"role": "user", "content": "abc"}, sent, question])
        prompt = "".join(map(chr, fake_server.engine.submitted[-1].prompt_token_ids))
        assert prompt == "<user>abc<assistant>cba>resu<<user>and\nso"
    assert respond(fake_server).usage.input_tokens_details.cached_tokens > 0


def test_an_answer_cut_by_its_limit_is_incomplete(fake_server: EngineServer) -> None:
    answer = respond(fake_server, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == (
        "incomplete",
        "max_output_tokens",
        "cb",
    )


@pytest.mark.parametrize("limit", [2, 50])
def test_the_stream_has_the_events_that_the_client_knows(
    fake_server: EngineServer, limit: int
) -> None:
    whole = respond(fake_server, max_output_tokens=limit)
    events = respond(fake_server, max_output_tokens=limit, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    fields = {"model": MODEL, "input": "abc", "max_output_tokens": limit}
    with fake_server.openai() as client, client.responses.stream(**fields) as stream:
        assert list(stream)[-1].response.output_text == whole.output_text


def test_an_engine_that_gives_up_ends_the_stream_with_an_error_event(
    fake_server: EngineServer,
) -> None:
    with pytest.raises(openai.InternalServerError, match="caught fire"):
        respond(fake_server, input="broken")
    last = respond(fake_server, input="broken", stream=True)[-1]
    assert (last.type, last.message) == ("error", "the pages caught fire")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web" * 30}]}, "tools[0].type"),
        ({"tools": [{"type": ["web"]}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"truncation": "much"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"oops": 1}, "oops"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        (
            {"input": [{"type": "function_call_output", "role": "user", "content": "a"}]},
            "input[0].type",
        ),
        ({"input": [{"type": {}, "output": "a"}]}, "input[0].type"),
        ({"input": [{"type": ["message"], "content": "a"}]}, "input[0].type"),
        ({"input": "x" * 3000}, "input"),
        ({"input": "\ud800"}, "input[0].content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 999}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"kv_retention": 2}, "kv_retention"),
        ({"kv_scorer": 2}, "kv_scorer"),
        ({"speculative": 2}, "speculative"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(
    shared_server: EngineServer, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "input": "abc", **fields}
    with shared_server.http() as client:
        response = client.post(
            "/v1/responses", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_metadata_are_labels_that_the_answer_repeats(fake_server: EngineServer) -> None:
    labels = {"chat": "7", "k" * 64: "v" * 512}
    assert respond(fake_server).metadata == {}
    assert respond(fake_server, metadata=labels).metadata == labels
    streamed = list(respond(fake_server, metadata=labels, stream=True))
    assert streamed[0].response.metadata == streamed[-1].response.metadata == labels
    first, second, third = fake_server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids == third.prompt_token_ids


@pytest.mark.parametrize(
    ("labels", "param"),
    [
        ({str(n): "a" for n in range(17)}, "metadata"),
        ({"a": "b" * 513}, "metadata.a"),
        ({"a": 1}, "metadata.a"),
        ("a", "metadata"),
    ],
)
def test_metadata_are_bounded_as_in_chat(
    shared_server: EngineServer, labels: Any, param: str
) -> None:
    with shared_server.http() as client:
        for path, body in (("/v1/responses", {"input": "a"}), (CHAT, {"messages": [USER]})):
            answer = client.post(path, json={"model": MODEL, "metadata": labels, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_error_has_the_field_of_the_endpoint_and_its_other_words_as_they_were(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*arguments: object) -> None:
        text = "the template rejects them: messages must alternate after the prompt"
        raise RequestError(lambda field: f"{field}: {text}", "messages")

    monkeypatch.setattr(fake_server.engine.codec, "render_chat", reject)
    asked = {"/v1/responses": ({"input": "a"}, "input"), CHAT: ({"messages": [USER]}, "messages")}
    with fake_server.http() as client:
        for path, (body, field) in asked.items():
            error = client.post(path, json={"model": MODEL, **body}).json()["error"]
            assert (error["param"], error["message"]) == (
                field,
                f"{field}: the template rejects them: messages must alternate after the prompt",
            )


def test_a_schema_is_blamed_by_the_name_of_the_endpoint(fake_server: EngineServer) -> None:
    wish = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
    chat_wish = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"oops": 1}}}
    respond(fake_server, text={"format": wish})
    assert fake_server.engine.grammars.sources[-1][1] == "text.format"
    for path, body, field in (
        (
            "/v1/responses",
            {"input": "a", "text": {"format": wish | {"schema": {"oops": 1}}}},
            "text.format",
        ),
        (CHAT, {"messages": [USER], "response_format": chat_wish}, "response_format.json_schema"),
    ):
        with fake_server.http() as client:
            error = client.post(path, json={"model": MODEL, **body}).json()["error"]
        assert error["param"] == f"{field}.schema.oops" and "'oops'" in error["message"]


def test_values_that_ask_for_nothing_pass(shared_server: EngineServer) -> None:
    nothing = {
        "store": False,
        "tools": [],
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "user": "me",
    }
    assert respond(shared_server, **nothing).output_text


def test_tokens_and_text_go_both_ways(shared_server: EngineServer) -> None:
    with shared_server.http() as client:
        tokens = client.post("/tokenize", json={"model": MODEL, "prompt": "hey"}).json()
        assert tokens == {
            "count": 3,
            "max_model_len": 512,
            "tokens": [104, 101, 121],
            "token_strs": None,
        }
        messages = [{"role": "user", "content": "hey"}]
        chat = client.post(
            "/tokenize", json={"messages": messages, "add_special_tokens": False}
        ).json()
        assert bytes(chat["tokens"]) == b"<user>hey"
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {
            "prompt": "hey"
        }
        for path, body, status, param in (
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
            ("/tokenize", {"prompt": "x" * 5000}, 400, "prompt"),
            ("/tokenize", {"messages": messages, "chat_template": "x"}, 400, "chat_template"),
            ("/tokenize", {"prompt": "a", "model": "gpt-4"}, 404, "model"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
            ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
            ("/detokenize", {}, 400, "tokens"),
        ):
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), (
                response.text
            )


def test_echo_begins_with_the_prompt_whole_and_streamed(shared_server: EngineServer) -> None:
    for prompt in (["abc", "de"], [[97, 98, 99], [100, 101]]):
        whole = shared_server.complete(prompt=prompt, echo=True, n=2)
        texts = ["abccba", "abccba", "deed", "deed"]
        assert [choice.text for choice in whole.choices] == texts
        streamed = [""] * 4
        for chunk in shared_server.complete(prompt=prompt, echo=True, n=2, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == texts
    with shared_server.http() as client:
        assert (
            client.post("/v1/chat/completions", json=chat_body(echo=True)).json()["error"]["param"]
            == "echo"
        )


def test_the_version_and_whether_it_is_ready() -> None:
    with run_fake_server() as server, server.http() as client:
        assert client.get("/version").json() == {"version": __version__}
        assert client.get("/ready").status_code == 200
        server.engine.healthy = False
        wait_until(lambda: client.get("/ready").status_code == 503, "it is not ready")
        server.engine.healthy = True
