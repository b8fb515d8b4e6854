"""What the OpenAPI document says of each endpoint in words, and example bodies of requests."""

from __future__ import annotations

from typing import NamedTuple

from tangram.serve.body import Json


class EndpointSummary(NamedTuple):
    """The group that an endpoint stands in, and what it does."""

    tag: str
    text: str


_ANSWERS, _TOKENS, _SERVER, _CACHE = "Answers", "Tokens", "Model and server", "KV cache"
_STORED = "Stored responses"
SUMMARIES = {
    "/v1/chat/completions": EndpointSummary(_ANSWERS, "Answer a conversation"),
    "/v1/completions": EndpointSummary(_ANSWERS, "Continue a text"),
    "/v1/responses": EndpointSummary(
        _ANSWERS, "Answer a conversation, in the form of the Responses API"
    ),
    "/v1/responses/{id}": EndpointSummary(_STORED, "A stored response, as it is now"),
    "DELETE /v1/responses/{id}": EndpointSummary(_STORED, "Remove a stored response"),
    "/v1/responses/{id}/cancel": EndpointSummary(_STORED, "End a response that still runs"),
    "/v1/responses/{id}/input_items": EndpointSummary(
        _STORED, "The conversation that a response has answered, in pages"
    ),
    "/v1/messages": EndpointSummary(_ANSWERS, "Answer a conversation, in Anthropic's form"),
    "/v1/messages/count_tokens": EndpointSummary(
        _TOKENS, "The number of a conversation's tokens, in Anthropic's form"
    ),
    "/tokenize": EndpointSummary(_TOKENS, "The tokens of a text or of a conversation"),
    "/detokenize": EndpointSummary(_TOKENS, "The text of tokens"),
    "/v1/models": EndpointSummary(_SERVER, "The served model, in a list"),
    "/v1/models/{model}": EndpointSummary(_SERVER, "The served model"),
    "/health": EndpointSummary(_SERVER, "Whether the engine runs"),
    "/ready": EndpointSummary(_SERVER, "Whether new requests are taken"),
    "/version": EndpointSummary(_SERVER, "The server's version"),
    "/metrics": EndpointSummary(_SERVER, "Metrics for Prometheus"),
    "/v1/kv/model": EndpointSummary(
        _CACHE, "The cache's shape, and the retention ratios that are served"
    ),
    "/v1/kv/requests/{id}": EndpointSummary(
        _CACHE, "The cache of an answer; id is that of the answer, or its x-request-id"
    ),
    "/v1/kv/requests/{id}/kept": EndpointSummary(
        _CACHE, "Which tokens of a chunk each KV head keeps"
    ),
    "/v1/kv/pool": EndpointSummary(_CACHE, "The state and the owner of each page"),
    "/v1/kv/history": EndpointSummary(_CACHE, "Speed, waiting times and pages of the last minutes"),
    "/v1/kv/events": EndpointSummary(_CACHE, "Steps, requests and pages as they change: a stream"),
}
_QUESTION = "What is the capital of France?"
_CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


_MESSAGES: Json = {"messages": [{"role": "user", "content": _QUESTION}]}


def _chat(**fields: object) -> Json:
    return {**_MESSAGES, "max_tokens": 32, **fields}


# Path to title to body. The name of the served model goes with each.
EXAMPLES: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": {
        "A question": _chat(),
        "The whole cache: nothing is dropped": _chat(kv_retention=1.0),
        "An answer as a stream": _chat(stream=True, stream_options={"include_usage": True}),
        "An answer as JSON of a schema": _chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": _CITY},
            }
        ),
    },
    "/v1/completions": {
        "A text": {"prompt": "The capital of France is", "max_tokens": 16},
        "Two texts": {
            "prompt": ["The capital of France is", "The capital of Italy is"],
            "max_tokens": 16,
        },
    },
    "/v1/responses": {
        "A question": {"input": _QUESTION, "max_output_tokens": 32},
        "A question in the background": {
            "input": _QUESTION,
            "max_output_tokens": 32,
            "background": True,
        },
        "A question with instructions": {
            "instructions": "Answer with one word.",
            "input": _QUESTION,
            "max_output_tokens": 32,
        },
    },
    "/v1/messages": {
        "A question": {**_MESSAGES, "max_tokens": 32},
        "A question with a system prompt, as a stream": {
            "system": "Answer with one word.",
            **_MESSAGES,
            "max_tokens": 32,
            "stream": True,
        },
    },
    "/v1/messages/count_tokens": {"A question": _MESSAGES},
    "/tokenize": {
        "A text": {"prompt": _QUESTION},
        "A conversation": {"messages": [{"role": "user", "content": _QUESTION}]},
    },
    "/detokenize": {"Three tokens": {"tokens": [70, 71, 72]}},
}
