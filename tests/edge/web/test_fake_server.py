"""The fake server answers in the forms of the real one."""

from __future__ import annotations

import httpx
import jsonschema_rs
import pytest

from tangram.serve.api_document.kv_answers import KV_ANSWERS
from tests.edge.web.fake_cache import CHUNK_TOKENS
from tests.edge.web.fake_server import MODEL, FakeServer

QUERIES = {"/v1/kv/requests/{id}/kept": "?chunk=0", "/v1/kv/history": "?seconds=600"}


@pytest.mark.parametrize("path", KV_ANSWERS)
def test_an_answer_has_the_fields_of_the_real_one(path: str, fake: FakeServer) -> None:
    question = {"role": "user", "content": "again and " * CHUNK_TOKENS}
    with httpx.Client(base_url=fake.url) as client:
        body = {"model": MODEL, "messages": [question]}
        client.post("/v1/chat/completions", json=body).raise_for_status()
        name = list(fake.cache.requests)[-1]
        answer = client.get(path.replace("{id}", name) + QUERIES.get(path, "")).json()
    schema = KV_ANSWERS[path]
    jsonschema_rs.validate(schema, answer)
    assert schema["properties"].keys() <= answer.keys()
