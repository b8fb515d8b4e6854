"""Traces: one span a request, under the caller's trace, with what the answer was and cost; asked in
vain, an error.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tangram.errors import ConfigError
from tangram.serve.observability.tracing import Traces, traces_to
from tests.mentions import mentioning

from .conftest import (
    CHAT,
    COMPLETIONS,
    MODEL,
    EngineServer,
    chat_body,
    free_port,
    run_fake_server,
    stream_data,
    wait_until,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collected:
    """A fake server whose spans stay in memory."""

    def __init__(self, server: EngineServer, spans: InMemorySpanExporter) -> None:
        self.server, self._spans = server, spans

    def only(self) -> ReadableSpan:
        """The one span, once it is there: it is made after the client has its answer."""
        wait_until(lambda: bool(self._spans.get_finished_spans()), "there is no span")
        (span,) = self._spans.get_finished_spans()
        return span

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()


@pytest.fixture
def collected() -> Iterator[Collected]:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with run_fake_server(traces=Traces(provider, MODEL)) as server:
        yield Collected(server, spans)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_span_has_what_was_asked_and_what_came_of_it(collected: Collected) -> None:
    with collected.server.http() as client:
        body = chat_body(
            max_tokens=4, temperature=0.5, seed=3, n=2, kv_retention=0.5, kv_scorer="a"
        )
        response = client.post(CHAT, json=body)
    span, usage = collected.only(), response.json()["usage"]
    found = attributes(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tangram",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": response.json()["id"],
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "tangram.kv_bytes": usage["kv_bytes"],
        "tangram.request.kv_retention": 0.5,
        "tangram.request.kv_scorer": "a",
        "http.response.status_code": 200,
        "url.path": CHAT,
        "tangram.request_id": response.headers["x-request-id"],
    }
    assert {name: found.get(name) for name in expected} == expected
    assert span.name == f"chat {MODEL}" and span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None and span.end_time is not None
    seconds = (span.end_time - span.start_time) / 1e9
    assert (
        0
        <= found["tangram.queue_seconds"]
        <= found["gen_ai.response.time_to_first_chunk"]
        <= seconds
        < 10
    )
    assert not [name for name in found if "message" in name or "prompt" in name], (
        "texts are nobody's business"
    )


def test_it_hangs_under_the_callers_trace_and_is_left_out_where_that_is_not_sampled(
    collected: Collected,
) -> None:
    with collected.server.http() as client:
        client.post(CHAT, json=chat_body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        client.post(
            COMPLETIONS,
            json={"model": MODEL, "prompt": "abc"},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=7"},
        )
    span = collected.only()
    assert span.name == f"text_completion {MODEL}"
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "7"


def test_a_traceparent_that_is_none_starts_a_trace_of_its_own(collected: Collected) -> None:
    with collected.server.http() as client:
        assert (
            client.post(CHAT, json=chat_body(), headers={"traceparent": "00-zz-zz-01"}).status_code
            == 200
        )
    assert collected.only().parent is None


def test_streams_count_their_tokens_and_a_hit_its_cached_ones(collected: Collected) -> None:
    with collected.server.http() as client:
        for _ in range(2):
            stream_data(client.post(CHAT, json=chat_body(stream=True, max_tokens=3)))
    wait_until(lambda: len(collected.all) == 2, "there are not two spans")
    first, second = map(attributes, collected.all)
    assert first["gen_ai.request.stream"] and first["gen_ai.usage.output_tokens"] == 3
    assert (
        first["gen_ai.usage.cache_read.input_tokens"]
        == 0
        < second["gen_ai.usage.cache_read.input_tokens"]
    )


def test_failures_say_so_and_wrong_requests_are_no_failures(collected: Collected) -> None:
    broken = {"messages": [{"role": "user", "content": "broken"}]}
    with collected.server.http() as client:
        client.get("/v1/models")
        client.post("/tokenize", json={"prompt": "abc"})
        for count, body in enumerate(
            (chat_body(**broken), chat_body(**broken, stream=True), chat_body(oops=1)), 1
        ):
            client.post(CHAT, json=body)
            wait_until(lambda spans=count: len(collected.all) == spans, "a request has no span")
    whole, stream, wrong = collected.all
    assert attributes(whole)["error.type"] == "500" and whole.status.status_code is StatusCode.ERROR
    assert (
        attributes(stream)["error.type"] == "500"
        and attributes(stream)["http.response.status_code"] == 200
    )
    assert (
        attributes(wrong)["http.response.status_code"] == 400
        and wrong.status.status_code is StatusCode.UNSET
    )


def test_a_client_that_hangs_up_leaves_a_span_that_says_abort(collected: Collected) -> None:
    endless = chat_body(
        messages=[{"role": "user", "content": "endless"}], stream=True, max_tokens=None
    )
    with collected.server.http() as client, client.stream("POST", CHAT, json=endless) as response:
        next(response.iter_lines())
    assert attributes(collected.only())["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP collector over HTTP, and what it was sent."""
    sent: list[ExportTraceServiceRequest] = []

    class TraceHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                sent.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), TraceHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_spans_reach_a_collector_before_the_server_is_gone(
    collector: tuple[str, list[ExportTraceServiceRequest]], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    url, sent = collector
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-of-the-house")
    if by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    traces = traces_to(url if by == "option" else None, MODEL)
    with run_fake_server(traces=traces) as server:
        server.chat()
    spans = [
        span
        for request in sent
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in spans] == [f"chat {MODEL}"]
    resource = {
        entry.key: entry.value.string_value
        for entry in sent[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "chat-of-the-house"


def test_nothing_asked_is_nothing_made() -> None:
    assert traces_to(None, MODEL, {}) is None
    assert (
        traces_to(
            None, MODEL, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}
        )
        is None
    )


def test_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("otlp_endpoint 'collector:4318' URL")):
        traces_to("collector:4318", MODEL, {})
    with pytest.raises(
        ConfigError, match=mentioning("OTEL_EXPORTER_OTLP_ENDPOINT 'collector:4318' URL")
    ):
        traces_to(None, MODEL, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4318", None])
def test_without_the_sdk_asking_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry.sdk") or name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=mentioning("'tangram-serve[otel]'")):
        traces_to(
            endpoint,
            MODEL,
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"},
        )


@pytest.mark.serial
def test_a_collector_that_is_not_there_holds_up_neither_answers_nor_the_end() -> None:
    begin_s = time.monotonic()
    with run_fake_server(traces=traces_to(f"http://127.0.0.1:{free_port()}", MODEL)) as server:
        for _ in range(3):
            assert server.chat().choices[0].finish_reason == "stop"
        assert time.monotonic() - begin_s < 5
    assert time.monotonic() - begin_s < 15
