"""OpenTelemetry: one span for each request that generates text.

Names follow the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai,
still in development). Names that these lack begin with `tangram.`. A span is made when the answer
is sent, from the times in its record, so it costs nothing before. The SDK is optional: `pip install
'tangram-serve[otel]'`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tangram.errors import ConfigError
from tangram.serve.observability.record import Generation, Record
from tangram.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
Value = str | int | float | bool | list[str]


def check_traces(endpoint: str | None, model: str) -> None:
    """Raise `ConfigError` as `traces_to` does."""
    if (traces := traces_to(endpoint, model)) is not None:
        traces.close()


def traces_to(
    endpoint: str | None, model: str, variables: Mapping[str, str] | None = None
) -> Traces | None:
    """Traces to the OTLP collector at `endpoint` (HTTP, without /v1/traces), or to the one in
    `variables`.

    These are environment variables of the OpenTelemetry specification (OTEL_EXPORTER_OTLP_ENDPOINT,
    …). They also set headers, sampling and the service's name. None if neither names a collector.
    Raises `ConfigError` if the endpoint is no URL, or if the SDK is missing.
    """
    variables = os.environ if variables is None else variables
    named = next((name for name in _ENDPOINT_VARIABLES if variables.get(name)), None)
    if endpoint is None and (
        named is None or variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
    ):
        return None
    asked, url = (
        (named, variables[named])
        if endpoint is None and named
        else ("otlp_endpoint", endpoint or "")
    )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{asked} is {url!r}, it must be a URL such as http://127.0.0.1:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{asked} is {url!r}, but OpenTelemetry's SDK is not installed: pip install "
            "'tangram-serve[otel]', or ask for no traces"
        ) from error
    ours = Resource({"service.name": "tangram", "service.version": __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    # The exporter adds /v1/traces to a variable, but not to an argument.
    exporter = (
        OTLPSpanExporter()
        if endpoint is None
        else OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, model)


@dataclass(frozen=True)
class Traces:
    """Makes the spans of one server. Needs the SDK."""

    provider: TracerProvider
    model: str

    def __call__(self, record: Record) -> None:
        """Make the span of an answered request; other endpoints have none."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS.get(record.path)
        if operation is None or record.method != "POST":
            return
        span = self.provider.get_tracer("tangram").start_span(
            f"{operation} {self.model}",
            TraceContextTextMapPropagator().extract(record.trace_headers),
            kind=SpanKind.SERVER,
            start_time=record.started_at_ns,
            attributes=_attributes(record, operation, self.model),
        )
        failure = _failure(record)
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.started_at_ns + int(record.duration_s * 1e9))

    def close(self) -> None:
        """Send the remaining spans."""
        self.provider.shutdown()


def _failure(record: Record) -> str | None:
    """The HTTP status of a failure of the server, at once or in the middle of an answer."""
    if record.status is None:
        return "cut"
    if record.status >= 500:
        return str(record.status)
    failure = None if record.generation is None else record.generation.failure
    return None if failure is None else str(failure)


def _attributes(record: Record, operation: str, model: str) -> dict[str, Value]:
    known: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tangram",
        "gen_ai.request.model": model,
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "tangram.request_id": record.request_id,
    }
    if record.generation is not None:
        known |= _describe_request(record.generation) | _came(record, record.generation, model)
    return {name: value for name, value in known.items() if value is not None}


def _describe_request(generation: Generation) -> dict[str, Value | None]:
    asked, sampling = generation.first, generation.first.sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.stream": generation.stream,
        "tangram.request.kv_retention": asked.kv_retention,
        "tangram.request.kv_scorer": asked.kv_scorer,
    }


def _came(record: Record, generation: Generation, model: str) -> dict[str, Value | None]:
    """Times in seconds from the request's start."""
    usage = generation.usage
    return {
        "gen_ai.response.id": generation.response_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": generation.finish_reasons,
        "gen_ai.response.time_to_first_chunk": record.since_start(generation.first_token_s),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "tangram.queue_seconds": record.since_start(generation.admitted_s),
        "tangram.kv_bytes": usage.kv_bytes,
    }
