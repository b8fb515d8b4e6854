"""A hook of Schemathesis: changes a generated request before it is sent.

A valid request for a long answer becomes one for a short answer, so that the time goes into more
requests. The document can say only in words that some valid fields do not fit each other or this
server. Such fields are made to fit, so that the request is answered. Tools are left out, since the
template of the embedded model has none and the answer could only be 400. Values out of range stay,
since the test is whether they are refused.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import schemathesis
from schemathesis import GenerationMode

from tangram.limits import Biases, Tokens
from tangram.types import SAMPLING_LIMITS, RequestOptions

MOST_TOKENS = 4
MOST_CHOICES = 3
MOST_PROMPTS = 3
MOST_MESSAGES = 5
MOST_TEXT = 400  # characters, so that a prompt fits into the context of the server
RATIOS = (0.5, 1.0)
VOCABULARY = 49_152
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
# The fields that limit an answer, by endpoint. The first is set if none is given.
LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
# Of one scorer, without drafts, the server has no other of these.
UNSERVED = {entry.name for entry in fields(RequestOptions)} - {"kv_retention", "cache_salt"}
# Values that only a chat template could read, which the embedded model's does not.
TOLD = ("chat_template_kwargs", "reasoning_effort", "verbosity")
Fields = dict[str, Any]


def small(path: str, body: Fields) -> Fields:
    """`body` with at most `MOST_TOKENS` for each of few answers, if its values are allowed."""
    limits, changed = LIMITS[path], dict(body)
    for name in limits:
        if _is_count(body.get(name)):
            changed[name] = min(body[name], MOST_TOKENS)
    if all(body.get(name) is None for name in limits):
        changed[limits[0]] = MOST_TOKENS
    if _is_count(body.get("n")) and body["n"] <= 128:
        changed["n"] = min(body["n"], MOST_CHOICES)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not _are_tokens(prompt) and len(prompt) <= 1024:
        changed["prompt"] = prompt[:MOST_PROMPTS]
    return changed


def whole(value: Any) -> Any:
    """`value` with 3.0 as 3: the document allows both as integers, the server the second only."""
    if isinstance(value, dict):
        return {name: whole(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [whole(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def fitting(path: str, body: Fields) -> Fields:
    """A valid `body` with fields that fit each other and this server."""
    changed = dict(body)
    if body.get("kv_retention") is not None:
        changed["kv_retention"] = min(RATIOS, key=lambda ratio: abs(ratio - body["kv_retention"]))
    changed |= dict.fromkeys(UNSERVED & body.keys())
    if body.get("stream_options") is not None:
        changed["stream"] = True
    for name, limit in SAMPLING_LIMITS.items():
        if isinstance(limit, Tokens) and body.get(name):
            changed[name] = _tokens(body[name])
        if isinstance(limit, Biases) and body.get(name):
            named = body[name].items()
            changed[name] = {str(int(token) % VOCABULARY): bias for token, bias in named}
    if body.get("messages"):
        adapt = _turn if path in (MESSAGES, COUNT) else _message
        changed["messages"] = [adapt(message) for message in body["messages"][:MOST_MESSAGES]]
    if isinstance(body.get("input"), list):
        changed["input"] = [_item(item) for item in body["input"][:MOST_MESSAGES]]
    changed |= {"prompt_logprobs": 0} if body.get("max_tokens") == 0 else {}
    if changed.get("prompt_logprobs") is not None:
        changed |= {"stream": False, "stream_options": None}
    if body.get("response_format") is not None:
        changed |= {"response_format": _shape(body["response_format"]), "ignore_eos": None}
    if body.get("continue_final_message"):
        changed |= dict.fromkeys(("add_generation_prompt", "tools", "continue_final_message"))
        if body.get("messages"):
            begun = {"role": "assistant", "content": "So"}
            changed |= {"messages": [*changed["messages"], begun], "continue_final_message": True}
    if body.get("min_tokens"):
        changed["min_tokens"] = None if changed.get("response_format") or body.get("stop") else 1
    if path == CHAT:
        if body.get("top_logprobs") is not None:
            changed["logprobs"] = True
        changed |= dict.fromkeys(("max_tokens", "tools", "tool_choice", "parallel_tool_calls"))
        changed |= dict.fromkeys(TOLD)
    if path == RESPONSES:
        changed |= dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "reasoning"))
        changed |= dict.fromkeys(("previous_response_id", "background"))
        form = (body.get("text") or {}).get("format")
        changed["text"] = None if form is None else {"format": _text_format(form)}
    if path in (MESSAGES, COUNT):
        changed |= dict.fromkeys(("tools", "tool_choice", "thinking"))
        form = (body.get("output_config") or {}).get("format")
        schema = {"type": "json_schema", "schema": {"type": "integer"}}
        changed["output_config"] = None if form is None else {"format": schema}
    if path == COMPLETIONS:
        changed["prompt"] = _prompt(body["prompt"])
    if path == "/tokenize":
        changed |= {"add_special_tokens": None, "chat_template_kwargs": None}
        if not body.get("messages"):
            changed |= dict.fromkeys(("add_generation_prompt", "continue_final_message"))
        changed |= (
            {"prompt": None}
            if body.get("messages")
            else {"messages": None, "prompt": body.get("prompt") or "a"}
        )
    if path == "/detokenize":
        changed["tokens"] = _tokens(body["tokens"])
    return changed


def _shape(form: Fields) -> Fields:
    """A format with a schema only where it belongs, and one that a small model can follow."""
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    return {
        "type": "json_schema",
        "json_schema": {"name": "anything", "schema": {"type": "integer"}},
    }


def _text_format(form: Fields) -> Fields:
    """The same as `_shape`, for /v1/responses."""
    shape = _shape(form)
    return {"type": shape["type"], **shape.get("json_schema", {})}


def _item(item: Fields) -> Fields:
    """A message that a model without tools can read."""
    return item if "role" in item else {"role": "user", "content": "a"}


def _turn(message: Fields) -> Fields:
    """A message of /v1/messages that a model without tools can read."""
    return {"role": message["role"], "content": "a"}


def _message(message: Fields) -> Fields:
    """An item that a model without tools can read."""
    role = "user" if message["role"] == "tool" else message["role"]
    return {"role": role, "content": message.get("content") or "", "name": message.get("name")}


def _prompt(prompt: Any) -> Any:
    """A prompt with tokens, all of them the model's."""
    if isinstance(prompt, str):
        return prompt[:MOST_TEXT] or "a"
    return _tokens(prompt[:MOST_TEXT]) if _are_tokens(prompt) else [_prompt(one) for one in prompt]


def _tokens(tokens: list[int]) -> list[int]:
    return [int(token) % VOCABULARY for token in tokens]


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if not isinstance(case.body, dict):
        return
    body = case.body
    if case.meta is not None and case.meta.generation.mode == GenerationMode.POSITIVE:
        body = fitting(case.path, whole(body))
    case.body = small(case.path, body) if case.path in LIMITS else body
