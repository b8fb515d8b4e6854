"""Whatever JSON a client sends, the answer is never a server error, it comes soon, and nothing
stays behind.
"""

from __future__ import annotations

import json
import resource
import time
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.serve.chat.schema import ChatRequest, CompletionRequest
from tangram.serve.messages.messages_schema import MessagesRequest
from tangram.serve.responses.responses_schema import ResponsesRequest
from tangram.serve.tokens import DetokenizeRequest, TokenizeRequest
from tests.examples import examples

from .conftest import CHAT, COMPLETIONS, MODEL, USER, EngineServer, wait_until

JSON = {"Content-Type": "application/json"}
PATHS = {
    CHAT: {"model": MODEL, "messages": [USER], "max_tokens": 2},
    COMPLETIONS: {"model": MODEL, "prompt": "a", "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
    "/v1/messages": {"model": MODEL, "messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [USER]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just("\ud800")
    | st.integers(-2, 2),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest),
    *(TokenizeRequest, DetokenizeRequest),
)
NAMES = st.sampled_from(
    sorted({name for body in BODIES for name in (*body.model_fields, *body.refused)})
)


@settings(
    max_examples=examples(250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(path=st.sampled_from(sorted(PATHS)), changes=st.dictionaries(NAMES, VALUES, max_size=3))
def test_no_body_is_a_server_error(
    shared_server: EngineServer, path: str, changes: dict[str, Any]
) -> None:
    with shared_server.http() as client:
        response = client.post(path, content=json.dumps({**PATHS[path], **changes}), headers=JSON)
    assert response.status_code in (200, 400, 404), response.text
    wait_until(lambda: shared_server.engine.stats().running == 0, "the request still runs")


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    method=st.sampled_from(["GET", "DELETE", "POST"]),
    name=st.text(min_size=1, max_size=40) | st.binary(min_size=1, max_size=9),
    end=st.sampled_from(["", "/cancel", "/input_items"]),
    query=st.dictionaries(
        st.sampled_from(["after", "order", "limit", "cache_salt", "include[]", "stream"]),
        st.text(max_size=9) | st.integers().map(str),
    ),
)
def test_no_question_about_a_stored_response_is_a_server_error(
    shared_server: EngineServer, method: str, name: str | bytes, end: str, query: dict[str, str]
) -> None:
    asked = [(key, value.encode(errors="replace")) for key, value in query.items()]
    spelled = quote(name.encode(errors="replace") if isinstance(name, str) else name, safe="")
    url = f"{shared_server.url}/v1/responses/{spelled}{end}?{urlencode(asked)}"
    with shared_server.http() as client:
        answer = client.request(method, url)
    assert answer.status_code in (400, 404, 405), answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": [1] * 2_000_000},
        {"stop_token_ids": ["a"] * 2_000_000},
        {"logit_bias": {str(number): "a" for number in range(500_000)}},
        {f"field {number}": 1 for number in range(500_000)},
        {"messages": [{}] * 2_000_000},
        {"messages": [{f"field {number}": 1 for number in range(120)}] * 2000},
        {"messages": [USER | {"content": [{}] * 2_000_000}]},
        {"stream_options": {f"field {number}": 1 for number in range(500_000)}, "stream": True},
        {"tools": [{}] * 2_000_000},
    ],
)
def test_a_body_full_of_mistakes_costs_little(
    shared_server: EngineServer, fields: dict[str, Any]
) -> None:
    content = json.dumps({"model": MODEL, "messages": [USER], **fields}).encode()
    before_kib, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with shared_server.http() as client:
        response = client.post(CHAT, content=content, headers=JSON)
    assert response.status_code == 400
    assert len(response.content) < 5000
    assert time.process_time() - start_s < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300 * 1024
