"""A thought ends after as many tokens as a request lets it have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.bare_tokenizer import load_tokenizer
from tests.mentions import assert_refused
from tests.real_templates import real_template

from .conftest import CHAT, COMPLETIONS, MODEL, USER
from .scripted import ScriptedServer, run_scripted_server
from .tiny import run_tiny_server, tiny_folder

VOCABULARY = 49152
# As Qwen3's: a thought of a past answer stands between marks; the prompt may open one.
THINKS = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if opened %}<think>
{% endif %}{% endif %}"""


def folder_of(factory: pytest.TempPathFactory, template: str) -> Any:
    folder = tiny_folder(factory.mktemp("budget"), vocabulary=VOCABULARY)
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with run_scripted_server(folder_of(tmp_path_factory, THINKS), VOCABULARY) as server:
        yield server


def ask(server: Any, path: str = CHAT, **fields: Any) -> Any:
    asked = {"messages": [USER]} if path == CHAT else {}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 80, **asked, **fields}
    with server.http() as client:
        return client.post(path, json=body)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7, 40, None])
def test_a_thought_ends_in_time(
    server: ScriptedServer, budget: int | None, opened: bool, shaped: bool
) -> None:
    codec = server.engine.codec
    begin, end = codec.encode("<think>"), codec.encode("</think>")
    answer = codec.encode('"yes"' if shaped else " yes")
    thought = codec.encode(" no") * 20
    said = [*([] if opened else begin), *thought]
    if budget is not None and budget < len(thought):
        # What the model would say meanwhile is not said: the mark of the end is.
        said = [*said[: len(said) - len(thought) + budget], *thought[: len(end)], *answer]
    else:
        said = [*said, *end, *answer]
    server.say(said)
    fields: dict[str, Any] = {"chat_template_kwargs": {"opened": opened}}
    if shaped:
        schema = {"name": "a", "schema": {"enum": ["yes"]}}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    found = ask(server, thinking_token_budget=budget, **fields)
    assert found.status_code == 200, found.text
    message = found.json()["choices"][0]["message"]
    expected = min(20, 20 if budget is None else budget)
    assert message["content"].strip() == ('"yes"' if shaped else "yes")
    assert message.get("reasoning_content", "").split() == ["no"] * expected
    assert message.get("reasoning") == message.get("reasoning_content")


def test_an_answer_without_a_thought_has_no_budget(server: ScriptedServer) -> None:
    script = server.engine.codec.encode("one two three four <think> five six</think>")
    server.say(script)
    message = ask(server, thinking_token_budget=0).json()["choices"][0]["message"]
    assert message["content"] == "one two three four <think> five six</think>"


def test_messages_keep_their_budget(server: ScriptedServer) -> None:
    codec = server.engine.codec
    end = codec.encode("</think>")
    thought = codec.encode(" no") * (7 + len(end))
    server.say([*codec.encode("<think>"), *thought, *codec.encode(" yes")])
    thinking = {"type": "enabled", "budget_tokens": 7}
    found = ask(server, "/v1/messages", messages=[USER], thinking=thinking).json()
    written = [block.get("thinking", block.get("text")).split() for block in found["content"]]
    assert written == [["no"] * 7, ["yes"]]


def test_completions_have_budgets_too(server: ScriptedServer) -> None:
    codec = server.engine.codec
    server.say(codec.encode(" no") * 30)
    fields = {"prompt": "Well. <think>", "max_tokens": 20, "thinking_token_budget": 3}
    answer = ask(server, COMPLETIONS, **fields).json()["choices"][0]["text"]
    assert answer.startswith(" no no no</think> no")


def test_a_budget_of_channels_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with run_tiny_server(
        folder_of(tmp_path_factory, real_template("gptoss")), kv_cache_gib=0.03
    ) as server:
        for budget in (5, -1):
            response = ask(server, thinking_token_budget=budget)
            assert_refused(response, "thinking_token_budget", "thinking_token_budget")
