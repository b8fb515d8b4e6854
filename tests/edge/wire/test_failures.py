"""Errors in the OpenAI form, the API key, and clients that hang up."""

from __future__ import annotations

import httpx
import openai
import pytest

from .conftest import CHAT, MODEL, USER, EngineServer, chat_body, stream_data, wait_until


def test_what_never_fits_is_the_clients_error_in_a_stream_too(fake_server: EngineServer) -> None:
    with pytest.raises(openai.BadRequestError, match="512") as caught:
        fake_server.chat(max_tokens=999, stream=True)
    assert caught.value.param == "max_tokens"


def test_with_one_bad_prompt_of_two_nothing_is_begun(fake_server: EngineServer) -> None:
    with pytest.raises(openai.BadRequestError):
        fake_server.complete(prompt=["endless", "x" * 600])
    engine = fake_server.engine
    assert (engine.stats().running, engine.submitted, engine.aborted) == (0, [], [])


def test_bodies_that_are_no_object(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        for content in ("{", "[1]", "null", '"text"', b"\xff\xfe", "", "[" * 100_000):
            response = client.post(
                CHAT, content=content, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 400, content
            assert response.json()["error"]["type"] == "invalid_request_error"


def test_another_model_does_not_exist(fake_server: EngineServer) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        fake_server.chat(model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_unknown_paths_and_methods_use_the_error_form(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        for response, status in ((client.get("/v2"), 404), (client.get(CHAT), 405)):
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_bug_in_the_engine_is_a_500_without_its_details(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def buggy(*_: object) -> None:
        raise ZeroDivisionError("secret path")

    monkeypatch.setattr(fake_server.engine, "submit", buggy)
    with fake_server.http() as client:
        response = client.post(CHAT, json=chat_body())
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


def test_api_key(locked_server: EngineServer) -> None:
    with locked_server.http() as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert client.get(path).status_code == 401
        refused = client.post(
            CHAT, content="not even json", headers={"Authorization": "Bearer sesam"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        locked_server.openai("wrong").models.list()
    assert [model.id for model in locked_server.openai("sesame").models.list()] == [MODEL]


def test_an_engine_that_gives_up_is_a_server_error(fake_server: EngineServer) -> None:
    messages = [USER | {"content": "broken"}]
    with pytest.raises(openai.InternalServerError, match="caught fire"):
        fake_server.chat(messages=messages)
    with pytest.raises(openai.APIError, match="caught fire"):
        list(fake_server.chat(messages=messages, stream=True))


def test_a_dead_engine_is_told_and_nobody_waits_for_it(fake_server: EngineServer) -> None:
    body = chat_body(stream=True, messages=[USER | {"content": "silent"}])
    with fake_server.http() as client, client.stream("POST", CHAT, json=body) as response:
        fake_server.engine.die()
        assert "has stopped" in stream_data(response)[0]
        assert client.get("/health").status_code == 503
        assert client.post(CHAT, json=chat_body()).status_code == 503


@pytest.mark.parametrize("word", ["silent", "endless"])
def test_hanging_up_on_a_stream_frees_the_pages(fake_server: EngineServer, word: str) -> None:
    engine = fake_server.engine
    body = chat_body(stream=True, max_tokens=None, n=2, messages=[USER | {"content": word}])
    with fake_server.http() as client, client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        assert engine.stats().pages_held > 0
    wait_until(lambda: engine.stats().pages_held == 0, "the abandoned request still holds pages")
    assert engine.aborted == [engine.submitted[0].request_id]


@pytest.mark.parametrize("word", ["silent", "endless"])
def test_hanging_up_while_waiting_for_an_answer_frees_the_pages(
    fake_server: EngineServer, word: str
) -> None:
    engine = fake_server.engine
    body = chat_body(max_tokens=None, n=2, messages=[USER | {"content": word}])
    with fake_server.http() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body, timeout=0.2)
    wait_until(lambda: engine.stats().pages_held == 0, "the abandoned request still holds pages")
    assert engine.aborted == [engine.submitted[0].request_id]


def test_a_finished_request_is_not_aborted(fake_server: EngineServer) -> None:
    fake_server.chat()
    list(fake_server.chat(stream=True))
    assert fake_server.engine.aborted == []


def test_stopping_the_server_ends_its_streams_and_its_engine(fake_server: EngineServer) -> None:
    body = chat_body(stream=True, max_tokens=None, messages=[USER | {"content": "endless"}])
    with fake_server.http() as client, client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        fake_server.stop()
    assert fake_server.engine.stopped
    assert len(fake_server.engine.aborted) == 1
