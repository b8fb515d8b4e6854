"""Fields of other servers that this one does not support: refused unless they ask for nothing.

Clients send some of them with their default value (`"audio": null`, `"store": false`). Such a value
changes nothing, so it passes. Any other value is an error: to drop it silently would give a wrong
answer. A server that was told to ignore such fields counts them, and logs them once a name.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

from prometheus_client import Counter
from pydantic_core import PydanticCustomError

NoOps = Mapping[str, tuple[object, ...]]
# Clients choose the names, so the number and the length of those kept are bounded.
_MOST_LOGGED = 100
_MOST_NAME_CHARACTERS = 64
_log = logging.getLogger(__name__)
_CACHING = ("prompt_cache_options", "prompt_cache_retention")

# Of both endpoints, OpenAI's and vLLM's: the values that ask for nothing, besides null.
COMMON: NoOps = {
    **dict.fromkeys(("add_special_tokens", "allowed_token_ids", "structured_outputs"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}

CHAT: NoOps = {
    **COMMON,
    **dict.fromkeys(("audio", "chat_template", "moderation", "prediction", *_CACHING), ()),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
    "web_search_options": (),
}

COMPLETION: NoOps = {**COMMON, "best_of": (1,), "metadata": ({},), "suffix": ("",)}

RESPONSES: NoOps = {
    **dict.fromkeys(("context_management", "conversation", "max_tool_calls", *_CACHING), ()),
    **dict.fromkeys(("moderation", "prompt"), ()),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
}

TOKENIZE: NoOps = {"chat_template": (), "return_token_strs": (False,), "tools": ([],)}

MESSAGES: NoOps = {
    **dict.fromkeys(("container", "diagnostics", "inference_geo", "output_format"), ()),
    **dict.fromkeys(("thread", "user_profile_id"), ()),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "mcp_servers": ([],),
    "speed": ("standard",),
}

MESSAGE: NoOps = {
    "annotations": ([],),
    **dict.fromkeys(("audio", "function_call", "parsed", "refusal"), ()),
}

STREAM_OPTIONS: NoOps = {"include_obfuscation": (False,)}

# Names that may be labels of a metric: their number is bounded.
KNOWN_ELSEWHERE = frozenset(
    {"cache_control", "chat_template_kwargs", "reasoning_effort", "verbosity"}.union(
        CHAT, COMPLETION, RESPONSES, MESSAGES, TOKENIZE, MESSAGE, STREAM_OPTIONS
    )
)

# What other servers of this API have under /v1, by the first parts of the path.
_PATHS: Mapping[str, str] = {
    "assistants": "assistants",
    "audio": "speech and transcription",
    "batches": "stored batches (tangram generate --batch answers files)",
    "chat/completions": "stored completions",
    "classify": "classification",
    "completions": "stored completions",
    "containers": "containers",
    "conversations": "stored conversations",
    "embeddings": "embeddings",
    "evals": "evaluations",
    "files": "files",
    "fine_tuning": "fine-tuning",
    "images": "images",
    "messages/batches": "stored batches (tangram generate --batch answers files)",
    "moderations": "moderation",
    "pooling": "embeddings",
    "realtime": "the realtime API",
    "rerank": "reranking",
    "responses": "lists of stored responses",
    "responses/compact": "compaction",
    "responses/input_tokens": "input tokens (POST /tokenize counts those of a prompt)",
    "score": "scoring",
    "threads": "assistants",
    "uploads": "files",
    "vector_stores": "vector stores",
    "videos": "videos",
}


def not_served(path: str) -> str | None:
    """What OpenAI's API has at `path` and this server has not; None if it is no such path."""
    version, *parts = path.removeprefix("/").split("/")
    longest, first = "/".join(parts[:2]), "".join(parts[:1])
    return _PATHS.get(longest, _PATHS.get(first)) if version == "v1" else None


def asks_for_nothing(value: object, no_ops: tuple[object, ...]) -> bool:
    """Whether `value` is null, or one of those that change nothing."""
    # bool is an int in Python: without the type check `False` would pass for 0 and `1` for True.
    same_kind = (no_op for no_op in no_ops if isinstance(no_op, bool) == isinstance(value, bool))
    return value is None or any(value == no_op for no_op in same_kind)


def drop_no_ops(body: dict[str, Any], unsupported: NoOps) -> dict[str, Any]:
    """`body` without unsupported fields that ask for nothing.

    Raises a validation error naming the first unsupported field that asks for something. Unknown
    fields stay, so the schema refuses them.
    """
    for field in unsupported.keys() & body.keys():
        if not asks_for_nothing(body[field], unsupported[field]):
            raise wrong_field(field, f"'{field}' is not supported: leave it out")
    return {name: value for name, value in body.items() if name not in unsupported}


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """A validation error that blames `field`, for validators that look at more than one field."""
    return PydanticCustomError("wrong_field", "{message}", {"field": field, "message": message})


class IgnoredFields:
    """The fields that were ignored so far.

    `counter` has one label, the field's name. Unknown names share the label `other`.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._logged: set[str] = set()

    def note(self, name: str) -> None:
        """Enter a field that a request has set and that was ignored."""
        self._counter.labels(name if name in KNOWN_ELSEWHERE else "other").inc()
        shown = name[:_MOST_NAME_CHARACTERS]
        if shown not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(shown)
            _log.warning(
                "requests have the field %r, which is not served here: it is ignored", shown
            )


def without_unknown(
    body: dict[str, Any], known: Container[str], refused: NoOps, ignored: IgnoredFields | None
) -> dict[str, Any]:
    """`body` without unsupported fields, which `ignored` counts; with None unchanged."""
    if ignored is None:
        return body
    unserved = {
        name
        for name, value in body.items()
        if (not asks_for_nothing(value, refused[name]) if name in refused else name not in known)
    }
    for name in unserved:
        ignored.note(name)
    return {name: value for name, value in body.items() if name not in unserved}
