"""The schemas of the answers below /v1/kv, for the OpenAPI document."""

from __future__ import annotations

from tangram.serve.bodies.body import Json
from tangram.types import LossReason

INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
STRING: Json = {"type": "string"}
_BOOLEAN: Json = {"type": "boolean"}
_BASE64: Json = {"type": "string", "contentEncoding": "base64"}


def record(**fields: Json) -> Json:
    """An object with all of `fields`."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _each(schema: Json, *names: str) -> dict[str, Json]:
    """Fields of one kind."""
    return dict.fromkeys(names, schema)


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_RETENTION = record(
    kv_retention=NUMBER,
    scorer=_or_null(STRING),
    budgets=_array(_array(INTEGER)),
    **_each(_BOOLEAN, "drafted", "default"),
)
_MODEL = record(
    model=STRING,
    **_each(INTEGER, "layers", "kv_heads", "chunk_tokens", "page_tokens", "page_bytes"),
    **_each(INTEGER, "kv_token_bytes", "pages_total", "host_pages_total"),
    full_layers=_array(INTEGER),
    windows=_array(_or_null(INTEGER)),
    retentions=_array(_RETENTION),
    speculation=_or_null(record(method=STRING, num_speculative_tokens=INTEGER)),
    recorded=_BOOLEAN,
)
_CHUNK = record(
    **_each(INTEGER, "index", "begin", "end", "shared_by"),
    **_each(_BOOLEAN, "recorded", "drafts_recorded"),
    **{"in": {"enum": ["device", "host", "gone"]}},
)
_REUSE: Json = {
    "type": "object",
    "required": ["reason", "lost_tokens"],
    "properties": {
        "reason": {"enum": [*LossReason, "none"]},
        **_each(INTEGER, "lost_tokens", "at_token"),
        **_each(STRING, "before", "earlier", "now"),
    },
}
_REQUEST = record(
    **_each(STRING, "id", "request_id"),
    **_each(INTEGER, "index", "conversation", "prompt_tokens", "cached_tokens"),
    **_each(INTEGER, "computed_tokens", "output_tokens", "sealed_chunks"),
    **_each(INTEGER, "kv_bytes", "kv_bytes_uncompressed"),
    state={"enum": ["waiting", "running", "ended"]},
    kv_retention=NUMBER,
    scorer=_or_null(STRING),
    tokens=_array(record(id=INTEGER, text=STRING)),
    reuse=_REUSE,
    chunks=_array(_CHUNK),
    raw=record(begin=INTEGER, end=INTEGER),
    drafted=_or_null(record(accepted=INTEGER, rejected=INTEGER)),
    times=record(queued=NUMBER, **_each(_or_null(NUMBER), "admitted", "first_token", "ended")),
)
_KEPT = record(
    **_each(INTEGER, "chunk", "begin", "layers", "kv_heads", "tokens"),
    bits=_BASE64,
    draft_bits=_or_null(_BASE64),
)
_HOLDER = record(number=INTEGER, tokens=INTEGER, **_each(_or_null(STRING), "id", "request_id"))
_POOL = record(
    **_each(INTEGER, "pages_total", "host_used", "host_total", "promised"),
    **_each(_BASE64, "states", "owners"),
    conversations=_array(_HOLDER),
)
_MAYBE = _array(_or_null(NUMBER))
_HISTORY = record(
    step_s=INTEGER,
    **_each(_array(NUMBER), "at", "throughput", "prompt_throughput"),
    **_each(_MAYBE, "ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "cached_share"),
    **_each(_array(INTEGER), "queue", "running", "pages_held", "pages_cached", "pages_free"),
)
KV_ANSWERS: dict[str, Json] = {
    "/v1/kv/model": _MODEL,
    "/v1/kv/requests/{id}": _REQUEST,
    "/v1/kv/requests/{id}/kept": _KEPT,
    "/v1/kv/pool": _POOL,
    "/v1/kv/history": _HISTORY,
}
