"""The schemas of the answers below /v1/kv, for the OpenAPI document."""

from __future__ import annotations

from tangram.serve.body import Json

_INTEGER: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_STRING: Json = {"type": "string"}
_BOOLEAN: Json = {"type": "boolean"}
_BASE64: Json = {"type": "string", "contentEncoding": "base64"}


def _record(**fields: Json) -> Json:
    """An object with all of `fields`."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_RETENTION = _record(
    kv_retention=_NUMBER,
    scorer=_or_null(_STRING),
    budgets=_array(_array(_INTEGER)),
    drafted=_BOOLEAN,
    default=_BOOLEAN,
)
_MODEL = _record(
    model=_STRING,
    layers=_INTEGER,
    kv_heads=_INTEGER,
    chunk_tokens=_INTEGER,
    page_tokens=_INTEGER,
    page_bytes=_INTEGER,
    kv_token_bytes=_INTEGER,
    full_layers=_array(_INTEGER),
    windows=_array(_or_null(_INTEGER)),
    retentions=_array(_RETENTION),
    speculation=_or_null(_record(method=_STRING, num_speculative_tokens=_INTEGER)),
    pages_total=_INTEGER,
    host_pages_total=_INTEGER,
    recorded=_BOOLEAN,
)
_CHUNK = _record(
    index=_INTEGER,
    begin=_INTEGER,
    end=_INTEGER,
    recorded=_BOOLEAN,
    drafts_recorded=_BOOLEAN,
    shared_by=_INTEGER,
    **{"in": {"enum": ["device", "host", "gone"]}},
)
_REUSE: Json = {
    "type": "object",
    "required": ["reason", "lost_tokens"],
    "properties": {
        "reason": {"enum": ["diverged", "evicted", "none"]},
        **dict.fromkeys(("lost_tokens", "at_token"), _INTEGER),
        **dict.fromkeys(("before", "earlier", "now"), _STRING),
    },
}
_REQUEST = _record(
    id=_STRING,
    request_id=_STRING,
    index=_INTEGER,
    state={"enum": ["waiting", "running", "ended"]},
    conversation=_INTEGER,
    kv_retention=_NUMBER,
    scorer=_or_null(_STRING),
    tokens=_array(_record(id=_INTEGER, text=_STRING)),
    prompt_tokens=_INTEGER,
    cached_tokens=_INTEGER,
    reuse=_REUSE,
    computed_tokens=_INTEGER,
    output_tokens=_INTEGER,
    sealed_chunks=_INTEGER,
    chunks=_array(_CHUNK),
    raw=_record(begin=_INTEGER, end=_INTEGER),
    kv_bytes=_INTEGER,
    kv_bytes_uncompressed=_INTEGER,
    drafted=_or_null(_record(accepted=_INTEGER, rejected=_INTEGER)),
    times=_record(
        queued=_NUMBER,
        admitted=_or_null(_NUMBER),
        first_token=_or_null(_NUMBER),
        ended=_or_null(_NUMBER),
    ),
)
_KEPT = _record(
    chunk=_INTEGER,
    begin=_INTEGER,
    layers=_INTEGER,
    kv_heads=_INTEGER,
    tokens=_INTEGER,
    bits=_BASE64,
    draft_bits=_or_null(_BASE64),
)
_POOL = _record(
    pages_total=_INTEGER,
    states=_BASE64,
    owners=_BASE64,
    host_used=_INTEGER,
    host_total=_INTEGER,
    promised=_INTEGER,
    conversations=_array(
        _record(
            number=_INTEGER, id=_or_null(_STRING), request_id=_or_null(_STRING), tokens=_INTEGER
        )
    ),
)
_HISTORY = _record(
    step_s=_INTEGER,
    at=_array(_NUMBER),
    throughput=_array(_NUMBER),
    prompt_throughput=_array(_NUMBER),
    ttft_p50=_array(_or_null(_NUMBER)),
    ttft_p90=_array(_or_null(_NUMBER)),
    tpot_p50=_array(_or_null(_NUMBER)),
    tpot_p90=_array(_or_null(_NUMBER)),
    queue=_array(_INTEGER),
    running=_array(_INTEGER),
    pages_held=_array(_INTEGER),
    pages_cached=_array(_INTEGER),
    pages_free=_array(_INTEGER),
    cached_share=_array(_or_null(_NUMBER)),
)
KV_ANSWERS: dict[str, Json] = {
    "/v1/kv/model": _MODEL,
    "/v1/kv/requests/{id}": _REQUEST,
    "/v1/kv/requests/{id}/kept": _KEPT,
    "/v1/kv/pool": _POOL,
    "/v1/kv/history": _HISTORY,
}
