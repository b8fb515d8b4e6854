"""What a browser needs, and what a client hears that asks in the wrong way or for
something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import openai
import pytest
from typer.testing import CliRunner

from tangram.cli import app
from tangram.errors import ConfigError, OverloadError
from tangram.serve.options import ServerOptions
from tangram.serve.transport.guard import MAX_HEADER_BYTES

from .conftest import CHAT, MODEL, EngineServer, chat_body, run_fake_server
from .test_protection import raw_request

PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    """A server with a key, to which one page may talk."""
    with run_fake_server("sesame", allowed_origins=(PAGE, "http://localhost:3000")) as server:
        yield server


def test_a_page_may_ask_with_its_key(server: EngineServer) -> None:
    with server.http() as client:
        before = client.options(CHAT, headers=PREFLIGHT)
        assert before.status_code == 200
        assert before.headers[ALLOWED] == PAGE
        allowed = before.headers["access-control-allow-headers"]
        assert {"authorization", "content-type", "x-stainless-lang"} <= set(
            re.split(", ?", allowed.lower())
        )
        assert "POST" in before.headers["access-control-allow-methods"]
        headers = {"Origin": PAGE, "Authorization": "Bearer sesame"}
        answer = client.post(CHAT, json=chat_body(), headers=headers)
        with client.stream("POST", CHAT, json=chat_body(stream=True), headers=headers) as stream:
            assert stream.headers[ALLOWED] == PAGE
            assert "[DONE]" in stream.read().decode()
    assert answer.status_code == 200
    assert answer.headers[ALLOWED] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_a_page_can_read_every_error(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    key, origin = {"Authorization": "Bearer sesame"}, {"Origin": PAGE}
    statuses = []
    with server.http() as client:
        for headers, body in (
            ({}, chat_body()),
            (key, chat_body(temprature=1)),
            (key, chat_body(model="other")),
        ):
            answer = client.post(CHAT, json=body, headers={**headers, **origin})
            statuses.append(answer.status_code)
            assert answer.headers[ALLOWED] == PAGE and answer.json()["error"]["message"]
        large = client.get("/health", headers={**origin, "X-Long": "a" * (MAX_HEADER_BYTES - 50)})
        assert (large.status_code, large.headers[ALLOWED]) == (431, PAGE)
        monkeypatch.setattr(server.engine, "submit", lambda *_: 1 / 0)
        bug = client.post(CHAT, json=chat_body(), headers={**key, **origin})
        assert (bug.status_code, bug.headers[ALLOWED]) == (500, PAGE)
    assert statuses == [401, 400, 404]


def test_a_full_queue_is_told_to_pages_too() -> None:
    def full(*_: object) -> None:
        raise OverloadError("full", 7)

    with run_fake_server(allowed_origins=("*",)) as server, server.http() as client:
        server.engine.submit = full  # type: ignore[method-assign]
        answer = client.post(CHAT, json=chat_body(), headers={"Origin": "https://anywhere.example"})
    assert (answer.status_code, answer.headers[ALLOWED], answer.headers["retry-after"]) == (
        429,
        "*",
        "7",
    )
    assert "retry-after" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", f"{PAGE}.evil.example", "http://localhost:3001"]
)
def test_another_page_may_not(server: EngineServer, origin: str) -> None:
    with server.http() as client:
        before = client.options(CHAT, headers=PREFLIGHT | {"Origin": origin})
        answer = client.get("/health", headers={"Origin": origin})
    assert before.status_code == 400
    assert ALLOWED not in before.headers and ALLOWED not in answer.headers


def test_a_preflight_opens_nothing_else(server: EngineServer) -> None:
    """Only a true preflight goes without a key."""
    with server.http() as client:
        assert client.options(CHAT, headers={"Origin": PAGE}).status_code == 401
        assert client.options(CHAT).status_code == 401


def test_without_the_option_no_page_may_ask(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        assert client.options(CHAT, headers=PREFLIGHT).status_code == 405
        assert ALLOWED not in client.get("/health", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "HTTPS://chat.example", "", "http://a b"]
)
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServerOptions(allowed_origins=("https://fine.example:8443", "http://[::1]:80", origin))


def test_the_page_of_the_api_needs_no_key_and_its_document_does(
    locked_server: EngineServer,
) -> None:
    """A browser opens the page without a key, and the page asks for one."""
    with locked_server.http() as client:
        page = client.get("/docs")
        linked = re.findall(r'(?:src|href)="(/docs/[^"]+)"', page.text)
        files = [client.get(path) for path in linked]
        refused = client.get("/openapi.json")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert len(linked) == 3 and all(file.status_code == 200 for file in files)
    for answer in (page, *files):
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert refused.status_code == 401


@pytest.mark.parametrize("path", ["/docs/", "/docs/no-such-file", "/docs/../v1/models"])
def test_nothing_else_lies_below_the_page_of_the_api(
    locked_server: EngineServer, path: str
) -> None:
    status, _ = raw_request(locked_server, f"GET {path} HTTP/1.1\nHost: here\nConnection: close")
    assert status == 404


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (None, "is missing"),
        ("", "is missing"),
        ("text/plain", "'text/plain'"),
        ("application/x-www-form-urlencoded", "urlencoded'"),
        ("x" * 9000, "xxx...xxx"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize"])
def test_a_body_that_is_not_called_json_is_told_so(
    shared_server: EngineServer, path: str, kind: str | None, words: str
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    with shared_server.http() as client:
        answer = client.post(path, content=b'{"model": "a"}', headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "invalid_content_type",
        None,
    )
    assert words in error["message"] and "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "application/ld+json"]
)
def test_json_by_any_name_is_read(shared_server: EngineServer, kind: str) -> None:
    with shared_server.http() as client:
        assert (
            client.post(
                "/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": kind}
            ).status_code
            == 200
        )
        wrong = client.post("/tokenize", content=b"{", headers={"Content-Type": kind})
    assert wrong.json()["error"]["code"] == "json_invalid"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/moderations", "moderation"),
        ("/v1/images/generations", "images"),
        ("/v1/audio/speech", "speech"),
        ("/v1/audio/transcriptions", "transcription"),
        ("/v1/files", "files"),
        ("/v1/batches", "--batch"),
        ("/v1/rerank", "reranking"),
        ("/v1/chat/completions/chatcmpl-1", "stored completions"),
        ("/v1/chat/completions/chatcmpl-1/messages", "stored completions"),
    ],
)
def test_an_endpoint_of_others_is_refused_by_name(
    shared_server: EngineServer, path: str, word: str
) -> None:
    with shared_server.http() as client:
        asked = {"model": MODEL, "input": "a"}
        for answer in (client.post(path, json=asked), client.get(path), client.delete(path)):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "endpoint_not_supported")
            assert word in error["message"] and path in error["message"]
            assert set(error) == {"message", "type", "param", "code"}


def test_a_list_of_stored_answers_is_refused_by_name_too(shared_server: EngineServer) -> None:
    with shared_server.http() as client:
        answer = client.post("/v1/responses/input_tokens", json={"input": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (405, "endpoint_not_supported")
        assert "/tokenize" in error["message"]
        for path in (CHAT, "/v1/responses"):
            answer = client.get(path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (405, "endpoint_not_supported")
            assert "stored" in error["message"]


def test_a_server_without_the_page_says_so(shared_server: EngineServer) -> None:
    with shared_server.http() as client:
        for path in ("/v1/kv", "/v1/kv/model", "/v1/kv/requests/a/kept"):
            error = client.get(path).json()["error"]
            assert error["code"] == "page_off" and "--page off" in error["message"]


def test_the_official_client_says_what_is_not_served(shared_server: EngineServer) -> None:
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        shared_server.openai().embeddings.create(model=MODEL, input="a")


def test_a_path_that_nobody_has_is_not_found(shared_server: EngineServer) -> None:
    with shared_server.http() as client:
        for path in ("/v2/embeddings", "/embeddings", "/v1/x", "/v1", "/"):
            answer = client.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["code"] is None


def test_the_command_line_refuses_what_is_no_origin_before_it_loads_a_model() -> None:
    origins = ["--allowed-origins", "*", "--allowed-origins", "here"]
    ended = CliRunner().invoke(app, ["serve", "smollm2", "--port", "0", *origins])
    assert ended.exit_code == 2
    assert "allowed_origins has 'here'" in ended.output
