"""Calls and thoughts of a real engine, over a random model whose template has one of the newer
forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from bench.bare_tokenizer import load_tokenizer
from tests.real_templates import MISTRAL_LISTS, MISTRAL_NAMED, real_template

from .conftest import CHAT, chat_body
from .tiny import TinyServer, run_tiny_server, tiny_folder

CONTROLS = ["[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
CONTROLS += ["<|call|>", "<|return|>", "<|constrain|>"]
TEMPLATES = {"list": MISTRAL_LISTS["mistral-nemo-instruct-2407"], "named": MISTRAL_NAMED}
REAL = {"channels": "gptoss", "thinking": "qwen3_5_think"}
TOOL = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module", params=["list", "named", "channels", "thinking"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, TinyServer]]:
    folder = tiny_folder(tmp_path_factory.mktemp("forms"), vocabulary=49_152 + len(CONTROLS))
    tokenizer = load_tokenizer("smollm2")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in CONTROLS], special_tokens=True)
    name = request.param
    tokenizer.chat_template = TEMPLATES[name] if name in TEMPLATES else real_template(REAL[name])
    tokenizer.save_pretrained(folder)
    with run_tiny_server(folder, kv_cache_gib=0.03) as server:
        yield name, server


def unlikely(*words: str) -> dict[str, Any]:
    """What keeps a model from beginning any of `words`."""
    encode = load_tokenizer("smollm2").encode
    return {str(encode(word, add_special_tokens=False)[0]): -100 for word in words}


def test_a_forced_call_and_a_thought_that_its_limit_ends(served: tuple[str, TinyServer]) -> None:
    name, server = served
    fields: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    fields |= {"temperature": 0, "max_tokens": 60, "logit_bias": unlikely("analysis", "Analysis")}
    with server.http() as http:
        body = http.post(CHAT, json=chat_body(**fields)).json()
    assert "choices" in body, body
    (choice,) = body["choices"]
    if name == "thinking":
        # The prompt has opened the thought, and a random model never ends it.
        details = body["usage"]["completion_tokens_details"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning_content"]
        assert details["reasoning_tokens"] == body["usage"]["completion_tokens"]
    else:
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_time",
            {},
        )
    server.check_baseline()
