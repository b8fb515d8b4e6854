"""Responses that a server remembers, as the official client asks for them."""

from __future__ import annotations

import json
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tangram.types import ThinkingFormat, ToolFormat

from .conftest import MODEL, EngineServer, run_fake_server, wait_until
from .fake_engine import FakeCodec, FakeEngine

PATH = "/v1/responses"
ODD_IDS = (
    "a",
    "resp_" + "0" * 32,
    "%00",
    "%2e%2e",
    "a%2Fb",
    "%ff%fe",
    "'%20OR%201=1--",
    "x" * 5000,
)


def respond(server: EngineServer, key: str = "none", **fields: Any) -> Any:
    with server.openai(key) as client:
        answer = client.responses.create(**{"model": MODEL, "input": "abc", **fields})
        return list(answer) if fields.get("stream") else answer


def prompt_of(server: EngineServer, place: int = -1) -> str:
    return "".join(map(chr, server.engine.submitted[place].prompt_token_ids))


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def test_a_conversation_goes_on_from_a_stored_response(fake_server: EngineServer) -> None:
    first = respond(fake_server, instructions="S")
    assert first.store and first.previous_response_id is None
    second = respond(fake_server, input="and", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert prompt_of(fake_server) == f"<user>abc<assistant>{first.output_text}<user>and"
    third = respond(fake_server, input="so", previous_response_id=second.id, stream=True)
    sent = [{"role": "user", "content": "abc"}, *first.output, {"role": "user", "content": "and"}]
    whole = respond(
        fake_server, input=[*sent, *second.output, {"role": "user", "content": "so"}], store=False
    )
    assert prompt_of(fake_server) == prompt_of(fake_server, -2)
    assert whole.output_text == third[-1].response.output_text and not whole.store
    assert whole.usage.input_tokens_details.cached_tokens == len(prompt_of(fake_server)) - 1


def test_a_branch_does_not_know_the_other(fake_server: EngineServer) -> None:
    first = respond(fake_server)
    for word in ("left", "right"):
        respond(fake_server, input=word, previous_response_id=first.id)
        assert prompt_of(fake_server).endswith(f"{first.output_text}<user>{word}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_what_was_answered(fake_server: EngineServer, stream: bool) -> None:
    answer = respond(fake_server, stream=stream, metadata={"a": "b"}, max_output_tokens=2)
    answered = answer[-1].response if stream else answer
    with fake_server.openai() as client:
        found = client.responses.retrieve(answered.id, include=["reasoning.encrypted_content"])
    assert found.to_dict() == answered.to_dict()
    assert found.status == "incomplete"


def test_input_items_come_in_pages(fake_server: EngineServer) -> None:
    first = respond(fake_server, input=[{"role": "user", "content": word} for word in "abc"])
    second = respond(fake_server, input="d", previous_response_id=first.id)
    with fake_server.openai() as client:
        items = client.responses.input_items
        newest = list(items.list(second.id))
        assert texts(newest) == ["d", first.output_text, "c", "b", "a"]
        assert texts(items.list(first.id, order="asc").data) == ["a", "b", "c"]
        assert newest[1].id == first.output[0].id and newest[1].role == "assistant"
        one_by_one = items.list(second.id, order="asc", limit=1)
        assert texts(list(one_by_one)) == texts(reversed(newest))
        page = items.list(second.id, limit=2, after=newest[0].id, order="desc")
        assert texts(page.data) == texts(newest[1:3]) and page.has_more
        for fields in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_1"}):
            with pytest.raises(openai.BadRequestError) as refused:
                items.list(second.id, **fields)
            assert refused.value.param == next(iter(fields))
        named = [{"role": "user", "content": word, "id": "msg_1"} for word in "ab"]
        twice = respond(fake_server, input=named)
        assert texts(list(items.list(twice.id, limit=1, order="asc"))) == ["a"]


def test_an_item_is_referred_to_by_its_id(fake_server: EngineServer) -> None:
    first = respond(fake_server)
    reference = {"type": "item_reference", "id": first.output[0].id}
    items = [{"role": "user", "content": "x"}, reference, {"role": "user", "content": "y"}]
    second = respond(fake_server, input=items)
    assert prompt_of(fake_server) == f"<user>x<assistant>{first.output_text}<user>y"
    with fake_server.openai() as client:
        listed = client.responses.input_items.list(second.id, order="asc").data
        assert texts(listed) == ["x", first.output_text, "y"]
        client.responses.delete(first.id)
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match="not found") as refused:
            respond(fake_server, input=[reference])
    assert refused.value.param == "input"


def assert_unknown(client: httpx.Client, response_id: str, **query: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = client.request(method, f"{PATH}/{response_id}{path}", params=query)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "not_found_error"), answer.text
    body = {"model": MODEL, "input": "a", "previous_response_id": response_id, **query}
    answer = client.post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")
    assert error["param"] == "previous_response_id"


def test_others_see_nothing(locked_server: EngineServer) -> None:
    answer = respond(locked_server, "sesame")
    salted = respond(locked_server, "sesame", extra_body={"cache_salt": "s"})
    with locked_server.http() as client:
        client.headers["Authorization"] = "Bearer poppy"
        assert_unknown(client, answer.id)
        client.headers["Authorization"] = "Bearer sesame"
        assert_unknown(client, answer.id, cache_salt="s")
        assert_unknown(client, salted.id)
        assert_unknown(client, salted.id, cache_salt="t")
        assert client.get(f"{PATH}/{answer.id}").status_code == 200
        assert client.get(f"{PATH}/{salted.id}", params={"cache_salt": "s"}).status_code == 200
        item = {"type": "item_reference", "id": salted.output[0].id}
        assert client.post(PATH, json={"model": MODEL, "input": [item]}).status_code == 404


@pytest.mark.parametrize("odd", ODD_IDS)
def test_odd_ids_are_not_found(shared_server: EngineServer, odd: str) -> None:
    with shared_server.http() as client:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = client.request(method, f"{PATH}/{odd}{path}")
            assert answer.status_code == 404, answer.text
            assert answer.json()["error"]["message"] and len(answer.content) < 2000


def wait_for_status(client: Any, response_id: str, status: str) -> Any:
    def has_come() -> bool:
        return bool(client.responses.retrieve(response_id).status == status)

    wait_until(has_come, f"{response_id} is not {status}", every_s=0.02)
    return client.responses.retrieve(response_id)


def test_a_response_runs_in_the_background(fake_server: EngineServer) -> None:
    begun = respond(fake_server, background=True, input="x" * 40)
    assert (begun.status, begun.background, begun.output, begun.store) == (
        *("in_progress", True, []),
        True,
    )
    with fake_server.openai() as client:
        ended = wait_for_status(client, begun.id, "completed")
        assert ended.output_text == "x" * 40 + ">resu<" and ended.usage.output_tokens == 46
        assert ended.created_at == begun.created_at
        after = respond(fake_server, input="so", previous_response_id=begun.id)
        assert after.status == "completed"
        broken = respond(fake_server, background=True, input="broken")
        failed = wait_for_status(client, broken.id, "failed")
        assert failed.error.code == "server_error" and "caught fire" in failed.error.message
        with pytest.raises(openai.BadRequestError, match="is failed"):
            respond(fake_server, previous_response_id=broken.id)


def test_a_running_response_is_cancelled(fake_server: EngineServer) -> None:
    begun = respond(fake_server, background=True, input="endless")
    with fake_server.openai() as client:
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            respond(fake_server, previous_response_id=begun.id)
        assert client.responses.cancel(begun.id).status == "cancelled"
        assert client.responses.cancel(begun.id).status == "cancelled"
        wait_until(lambda: fake_server.engine.stats().running == 0, "it still runs")
        assert client.responses.retrieve(begun.id).status == "cancelled"
        ended = respond(fake_server)
        assert client.responses.cancel(ended.id).status == "completed"


def test_what_is_streamed_can_be_cancelled_too(fake_server: EngineServer) -> None:
    with fake_server.openai() as client:
        stream = client.responses.create(model=MODEL, input="endless", stream=True)
        response_id = next(iter(stream)).response.id
        assert client.responses.retrieve(response_id).status == "in_progress"
        client.responses.cancel(response_id)
        last = list(stream)[-1]
        assert (last.type, last.code) == ("error", "response_cancelled")
        assert client.responses.retrieve(response_id).status == "cancelled"
    wait_until(lambda: fake_server.engine.stats().running == 0, "it still runs")


def test_what_is_deleted_while_it_runs_ends(fake_server: EngineServer) -> None:
    begun = respond(fake_server, background=True, input="endless")
    with fake_server.openai() as client:
        client.responses.delete(begun.id)
        wait_until(lambda: fake_server.engine.stats().running == 0, "it still runs")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.id)


def test_a_client_that_leaves_cancels_its_response(fake_server: EngineServer) -> None:
    with fake_server.openai() as client:
        with client.responses.create(model=MODEL, input="endless", stream=True) as stream:
            response_id = next(iter(stream)).response.id
        found = wait_for_status(client, response_id, "cancelled")
    assert found.error is None
    wait_until(lambda: fake_server.engine.stats().running == 0, "it still runs")


def test_what_goes_on_from_a_deleted_response_stays(fake_server: EngineServer) -> None:
    first = respond(fake_server)
    second = respond(fake_server, input="and", previous_response_id=first.id)
    with fake_server.openai() as client:
        client.responses.delete(first.id)
        with fake_server.http() as http:
            assert_unknown(http, first.id)
        respond(fake_server, input="so", previous_response_id=second.id)
        assert prompt_of(fake_server).startswith(f"<user>abc<assistant>{first.output_text}<user>")
        assert len(list(client.responses.input_items.list(second.id))) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "store"),
        ({"background": True, "stream": True}, "stream"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"include": "a"}, "include"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"previous_response_id": "\ud800"}, "previous_response_id"),
        ({"previous_response_id": "\0" * 3000}, "previous_response_id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "a" * 2000}]}, "input[0].id"),
    ],
)
def test_what_is_wrong_is_named(
    shared_server: EngineServer, fields: dict[str, Any], param: str
) -> None:
    with shared_server.http() as client:
        content = json.dumps({"model": MODEL, "input": "a", **fields})
        answer = client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_server_that_stores_nothing_says_so() -> None:
    with run_fake_server(store_responses=0) as server:
        answer = respond(server)
        assert not answer.store
        with server.http() as client:
            assert client.get(f"{PATH}/{answer.id}").status_code == 404
            for fields in (
                {"store": True},
                {"background": True},
                {"previous_response_id": answer.id},
            ):
                refused = client.post(PATH, json={"model": MODEL, "input": "a", **fields})
                assert refused.status_code == 400 and "store_responses" in refused.text
                assert refused.json()["error"]["param"] in fields


def test_the_oldest_go_first() -> None:
    with run_fake_server(store_responses=2) as server:
        ids = [respond(server).id for _ in range(3)]
        with server.http() as client:
            found = [client.get(f"{PATH}/{name}").status_code for name in ids]
        assert found == [404, 200, 200]


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """No file of this process grows beyond that of a store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_stored_is_answered_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with run_fake_server(store_path=str(path)) as server:
        known = respond(server)
        labels = {"metadata": {str(number): "v" * 500 for number in range(16)}}
        with full_disk(path):
            for stream in (False, True):
                for _ in range(20):  # the file of changes has some room left
                    answer = respond(server, stream=stream, **labels)
                    answer = answer[-1].response if stream else answer
                assert answer.output_text and not answer.store
                assert "not stored" in answer.warnings[0]
            waited = respond(server, background=True, **labels)
            assert waited.status == "completed", "what is not stored waits"
            with server.openai() as client:
                assert client.responses.retrieve(known.id).output_text == known.output_text
        after = respond(server, **labels)
        assert after.store and not hasattr(after, "warnings")
        with sqlite3.connect(path) as other:
            other.execute("DROP TABLE items")
        with server.http() as http:
            lost = http.get(f"{PATH}/{known.id}")
            assert lost.status_code == 503 and "items" in lost.json()["error"]["message"]
            assert http.get("/health").status_code == 200
        assert respond(server).output_text == known.output_text


def test_a_conversation_has_a_bound() -> None:
    with run_fake_server(max_body_mb=0.002) as server:
        first = respond(server, input="a" * 60)
        for _ in range(20):
            with server.http() as client:
                body = {"model": MODEL, "input": "b" * 20, "previous_response_id": first.id}
                answer = client.post(PATH, json=body)
            if answer.status_code != 200:
                break
            first.id = answer.json()["id"]
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "previous_response_id")
        assert "2000 bytes" in error["message"]


def test_responses_outlive_the_server(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with run_fake_server(store_path=str(path)) as server:
        first = respond(server)
        running = respond(server, background=True, input="silent")
    assert path.stat().st_mode & 0o777 == 0o600
    with run_fake_server(store_path=str(path)) as server, server.openai() as client:
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        assert client.responses.retrieve(running.id).status == "failed"
        respond(server, input="and", previous_response_id=first.id)
        assert prompt_of(server) == f"<user>abc<assistant>{first.output_text}<user>and"


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with run_fake_server(store_path=path) as one, run_fake_server(store_path=path) as other:
        first = respond(one)
        respond(other, input="and", previous_response_id=first.id)
        assert prompt_of(other).startswith(f"<user>abc<assistant>{first.output_text}")
        begun = respond(one, background=True, input="endless")
        with other.openai() as client:
            assert client.responses.retrieve(begun.id).status == "in_progress"
            assert client.responses.cancel(begun.id).status == "cancelled"
        wait_until(lambda: one.engine.stats().running == 0, "it still runs")


class TellingCodec(FakeCodec):
    """Its template shows all of a message."""

    tool_format = ToolFormat("<c>", "</c>")
    thinking_format = ThinkingFormat("<t>", "</t>")

    def render_chat(self, messages: Any, tools: Any = (), options: Any = None) -> tuple[str, ...]:
        return tuple(
            f"<{message['role']}>{message.get('reasoning_content', '')}"
            f"{''.join(str(call['function']) for call in message.get('tool_calls', []))}"
            f"{message.get('tool_call_id', '')[:1]}{message['content']}"
            for message in messages
        )


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_are_gone_on_from_token_for_token(stream: bool) -> None:
    said = '<t>Hm</t>So <c>{"name":"f","arguments":{"a":1}}</c>'
    asked = {"role": "assistant", "content": said[::-1]}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    with run_fake_server(engine=FakeEngine(TellingCodec())) as server:
        first = respond(server, input=[asked], tools=tools, stream=stream)
        first = first[-1].response if stream else first
        kinds = [item.type for item in first.output]
        assert kinds == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "7"}
        further: list[Any] = [result, {"role": "user", "content": "?"}]
        held = [item.to_dict() for item in first.output]
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        answers = [
            respond(server, input=items, tools=tools, **fields)
            for items, fields in (
                (further, {"previous_response_id": first.id}),
                ([asked, *held, *further], {}),
                ([asked, *named, *further], {}),
            )
        ]
        prompts = {prompt_of(server, place) for place in (-3, -2, -1)}
        (prompt,) = prompts
        assert all(part in prompt for part in ("Hm", "So", "{'name'"))
        assert len({answer.usage.input_tokens for answer in answers}) == 1
        with server.openai() as client:
            listed = [
                list(client.responses.input_items.list(answer.id, order="asc"))
                for answer in answers
            ]
        assert [[item.type for item in items] for items in listed] == 3 * [
            ["message", *kinds, "function_call_output", "message"]
        ]
