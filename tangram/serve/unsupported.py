"""Fields of other servers that this one does not support: refused unless they ask for nothing.

Clients send some of them with their default value (`"audio": null`, `"store": false`). Such a value
changes nothing, so it passes. Any other value is an error: to drop it silently would give a wrong
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

NoOps = Mapping[str, tuple[object, ...]]

# Of both endpoints, OpenAI's and vLLM's: the values that ask for nothing, besides null.
COMMON: NoOps = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

CHAT: NoOps = {
    **COMMON,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "store": (False,),
    "web_search_options": (),
}

COMPLETION: NoOps = {**COMMON, "best_of": (1,), "metadata": ({},), "suffix": ("",)}

RESPONSES: NoOps = {
    "context_management": (),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
}

TOKENIZE: NoOps = {"chat_template": (), "return_token_strs": (False,), "tools": ([],)}

MESSAGES: NoOps = {
    "container": (),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
}

MESSAGE: NoOps = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "parsed": (),
    "refusal": (),
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


def drop_no_ops(body: Any, unsupported: NoOps) -> Any:
    """`body` without unsupported fields that ask for nothing.

    Raises a validation error naming the first unsupported field that asks for something. Unknown
    fields stay, so the schema refuses them.
    """
    if not isinstance(body, dict):
        return body
    for field in unsupported.keys() & body.keys():
        if not asks_for_nothing(body[field], unsupported[field]):
            raise wrong_field(field, f"'{field}' is not supported: leave it out")
    return {name: value for name, value in body.items() if name not in unsupported}


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """A validation error that blames `field`, for validators that look at more than one field."""
    return PydanticCustomError("wrong_field", "{message}", {"field": field, "message": message})
