"""What the OpenAPI document says of each endpoint: a few words, and bodies of requests."""

from __future__ import annotations

from tangram.serve.bodies.body import Json

# What each endpoint does, by the groups in which the document has them.
SUMMARIES = {
    "Answers": {
        "/v1/chat/completions": "Answer a conversation",
        "/v1/completions": "Continue a text",
        "/v1/responses": "Answer a conversation, in the form of the Responses API",
        "/v1/messages": "Answer a conversation, in Anthropic's form",
    },
    "Stored responses": {
        "/v1/responses/{id}": "A stored response, as it is now",
        "DELETE /v1/responses/{id}": "Remove a stored response",
        "/v1/responses/{id}/cancel": "End a response that still runs",
        "/v1/responses/{id}/input_items": "The conversation that a response has answered, in pages",
    },
    "Tokens": {
        "/v1/messages/count_tokens": "The number of a conversation's tokens, in Anthropic's form",
        "/tokenize": "The tokens of a text or of a conversation",
        "/detokenize": "The text of tokens",
    },
    "Model and server": {
        "/v1/models": "The served model, in a list",
        "/v1/models/{model}": "The served model",
        "/health": "Whether the engine runs",
        "/ready": "Whether new requests are taken",
        "/version": "The server's version",
        "/metrics": "Metrics for Prometheus",
    },
    "KV cache": {
        "/v1/kv/model": "The cache's shape, and the retention ratios that are served",
        "/v1/kv/requests/{id}": "The cache of an answer, by its id or its x-request-id",
        "/v1/kv/requests/{id}/kept": "Which tokens of a chunk each KV head keeps",
        "/v1/kv/pool": "The state and the owner of each page",
        "/v1/kv/history": "Speed, waiting times and pages of the last minutes",
        "/v1/kv/events": "Steps, requests and pages as they change: a stream",
    },
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
