"""The example requests of the OpenAPI document: the real server answers each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tangram.serve.api_document.sample_requests import EXAMPLES, SUMMARIES

BODIES = [
    (path, number) for path, bodies in EXAMPLES.items() for number in range(1, len(bodies) + 1)
]
PATHS = {path for summaries in SUMMARIES.values() for path in summaries}
READABLE = sorted(
    path
    for path in PATHS - EXAMPLES.keys() - {"/v1/kv/events"}
    if not path.startswith("DELETE ") and not path.endswith("/cancel")
)


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def answer(client: httpx.Client) -> str:
    """The id of an answer over more than a chunk."""
    body = {"model": "smollm2", "prompt": "All is well. " * 300, "max_tokens": 1}
    return str(client.post("/v1/completions", json=body).json()["id"])


def test_every_endpoint_is_summarised_and_every_body_has_an_example(document: Any) -> None:
    operations = {
        f"DELETE {path}" if method == "delete" else path: operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert operations.keys() == PATHS
    asked = {path for path, operation in operations.items() if "requestBody" in operation}
    assert asked == EXAMPLES.keys()


@pytest.mark.parametrize(("path", "number"), BODIES)
def test_an_example_is_answered(
    client: httpx.Client, document: Any, path: str, number: int
) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    answer = client.post(path, json=content["examples"][str(number)]["value"])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", READABLE)
def test_what_is_read_without_a_body_is_answered(
    client: httpx.Client, answer: str, path: str
) -> None:
    if path.startswith("/v1/responses/"):
        body = {"model": "smollm2", "input": "Well?", "max_output_tokens": 1}
        answer = client.post("/v1/responses", json=body).json()["id"]
    query = {"chunk": 0} if path.endswith("/kept") else {}
    asked = path.replace("{model}", "smollm2").replace("{id}", answer)
    assert client.get(asked, params=query).status_code == 200


def test_events_are_streamed(client: httpx.Client) -> None:
    with client.stream("GET", "/v1/kv/events") as stream:
        assert stream.status_code == 200
        assert next(stream.iter_lines()) == "event: hello"
