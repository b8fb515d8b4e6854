"""Who is let in, and how much an unknown client can send."""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from pydantic import ValidationError

from tangram.errors import ConfigError
from tangram.serve.options import ServerOptions
from tangram.serve.transport.guard import MAX_HEADER_BYTES
from tests.mentions import mentioning

from .conftest import CHAT, MODEL, EngineServer, chat_body, run_fake_server

MAX_BODY_MB = 0.1


@pytest.fixture(scope="module")
def small_server() -> Iterator[EngineServer]:
    """A server that takes bodies up to 100,000 bytes."""
    with run_fake_server(max_body_mb=MAX_BODY_MB) as server:
        yield server


def raw_request(server: EngineServer, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of an answer to bytes that no client library would send."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/MODELS",
        "/v1%2fmodels",
        "/%76%31/models",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/health%2f..%2fv1%2fmodels",
        "/health/",
        "//health",
        "/HEALTH",
        "/%68ealth",
        "/health%00",
        "/health;/v1/models",
        "/ready/../metrics",
        "/metrics",
        "/openapi.json",
        "/version",
        "/tokenize",
        "/admin",
        "http://anywhere/health",
        "http://anywhere/v1/models",
    ],
)
def test_no_spelling_of_a_path_goes_without_a_key(locked_server: EngineServer, target: str) -> None:
    status, body = raw_request(
        locked_server, f"GET {target} HTTP/1.1\nHost: here\nConnection: close"
    )
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("host", ["evil.example", "[", "health", "127.0.0.1:1@x", "a" * 5000])
def test_an_odd_host_header_opens_nothing_and_breaks_nothing(
    locked_server: EngineServer, host: str
) -> None:
    for path, key, status in (
        ("/v1/models", "x", 401),
        ("/health", "x", 200),
        ("/nowhere", "sesame", 404),
    ):
        head = f"GET {path} HTTP/1.1\nHost: {host}\nConnection: close\nAuthorization: Bearer {key}"
        assert raw_request(locked_server, head)[0] == status


def test_each_key_opens_and_nothing_near_it_does(locked_server: EngineServer) -> None:
    with locked_server.http() as client:
        for given in ("Bearer sesame", "Bearer poppy", "bearer sesame"):
            assert client.get("/v1/models", headers={"Authorization": given}).status_code == 200, (
                given
            )
        wrong = (
            "Bearer sesam",
            "Bearer sesamee",
            "Bearer sesame poppy",
            "sesame",
            "Basic sesame",
            "Bearer",
            "Bearer é",
        )
        for given in wrong:
            response = client.get("/v1/models", headers={"Authorization": given.encode()})
            assert response.status_code == 401, given
            assert response.headers["www-authenticate"] == "Bearer"
        for keys in (("wrong", "sesame"), ("sesame", "wrong")):
            twice = [("Authorization", f"Bearer {key}") for key in keys]
            assert client.get("/v1/models", headers=twice).status_code == 401, keys
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


@pytest.mark.parametrize("given", ["sesame", "poppy", "s", "sesame" * 50])
def test_every_key_is_compared_in_constant_time(
    locked_server: EngineServer, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    compared, compare = list[tuple[int, int]](), hmac.compare_digest

    def note_call(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr("tangram.serve.transport.guard.hmac.compare_digest", note_call)
    with locked_server.http() as client:
        status = client.get("/v1/models", headers={"Authorization": f"Bearer {given}"}).status_code
    assert status == (200 if given in ("sesame", "poppy") else 401)
    assert compared == [(32, 32)] * 2, (
        "a digest for each of the two keys, whatever was found before"
    )


@pytest.mark.parametrize("key", ["", "two words"])
def test_keys_that_nobody_could_send_are_refused_at_start(key: str) -> None:
    with pytest.raises(ConfigError, match=mentioning("api_key 2")):
        ServerOptions(api_key=("fine", key))


def test_a_bound_on_bodies_must_be_positive() -> None:
    for size in (0.0, 1e-9, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError, match=mentioning(f"max_body_mb {size}")):
            ServerOptions(max_body_mb=size)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_bound_is_413_before_it_is_read_to_its_end(
    small_server: EngineServer, chunked: bool
) -> None:
    sent_bytes = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent_bytes
        for _ in range(20):
            sent_bytes += 10_000
            yield b" " * 10_000

    headers = {"Content-Type": "application/json"} | (
        {} if chunked else {"Content-Length": "200000"}
    )
    with small_server.http() as client:
        response = client.post(CHAT, content=parts(), headers=headers)
        assert response.status_code == 413
        assert "100000" in response.json()["error"]["message"]
        assert client.post(CHAT, json=chat_body(model=MODEL)).status_code == 200


def test_a_declared_size_is_refused_without_waiting_for_the_body(
    small_server: EngineServer,
) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\nHost: here\nContent-Type: application/json\nContent-Length: "
        "999999999999"
    )
    host, port = small_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n{")
        assert b" 413 " in connection.recv(100)


def test_a_body_at_the_bound_is_read(small_server: EngineServer) -> None:
    content = json.dumps(chat_body()).encode()
    with small_server.http() as client:
        response = client.post(
            CHAT,
            content=content.ljust(int(MAX_BODY_MB * 1e6)),
            headers={"Content-Type": "application/json"},
        )
    assert response.status_code == 200


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES, 64 * 1024, 1024 * 1024])
def test_a_large_header_is_431(small_server: EngineServer, size: int) -> None:
    with httpx.Client(base_url=small_server.url) as client:
        response = client.get("/health", headers={"X-Long": "a" * size})
        assert response.status_code == 431
        assert str(MAX_HEADER_BYTES) in response.json()["error"]["message"]
        assert (
            client.get("/health", headers={"X-Long": "a" * (MAX_HEADER_BYTES // 2)}).status_code
            == 200
        )


def test_what_is_no_http_is_a_400_in_the_error_form(small_server: EngineServer) -> None:
    status, body = raw_request(small_server, "nonsense")
    assert (status, set(json.loads(body)["error"])) == (400, {"message", "type", "param", "code"})


def test_every_answer_has_an_id_and_a_bug_is_found_in_the_log_by_it(
    fake_server: EngineServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def buggy(*_: object) -> None:
        raise ZeroDivisionError("/home/secret at 0x7fffdeadbeef")

    with fake_server.http() as client:
        ids = {
            client.get(path).headers["x-request-id"]
            for path in ("/health", "/nowhere", "/v1/models")
        }
        monkeypatch.setattr(fake_server.engine, "submit", buggy)
        response = client.post(CHAT, json=chat_body())
    assert len(ids) == 3
    assert response.status_code == 500
    request_id = response.headers["x-request-id"]
    assert request_id in response.json()["error"]["message"] and request_id in caplog.text
    assert not any(word in response.text for word in ("secret", "0x", "Zero", "Traceback"))


def test_an_error_does_not_send_back_all_that_it_quotes(fake_server: EngineServer) -> None:
    with fake_server.http() as client:
        for fields in (
            {"x" * 100_000: 1},
            {"model": "x" * 100_000},
            {"logit_bias": {"x" * 100_000: 1}},
        ):
            response = client.post(CHAT, json=chat_body(**fields))
            assert 400 <= response.status_code < 500
            assert len(response.content) < 5000
