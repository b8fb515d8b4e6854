"""Fields that clients of other servers send: each does what it says, or is known to be harmless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.bare_tokenizer import load_tokenizer
from tests.mentions import assert_refused
from tests.templates import HERMES

from .conftest import CHAT, COMPLETIONS, MODEL, USER, EngineServer
from .scripted import ScriptedServer, run_scripted_server
from .tiny import tiny_folder

VOCABULARY, RESPONSES = 49152, "/v1/responses"
SAID = {"role": "assistant", "content": "The sky is"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """The embedded model's tokenizer, a template that knows tools, answers that a test says."""
    folder = tiny_folder(tmp_path_factory.mktemp("fields"), vocabulary=VOCABULARY)
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = HERMES
    tokenizer.save_pretrained(folder)
    with run_scripted_server(folder, VOCABULARY) as server:
        yield server


def post(server: Any, path: str, **fields: Any) -> Any:
    greedy = {"temperature": 0} if path in (CHAT, COMPLETIONS, RESPONSES) else {}
    with server.http() as client:
        return client.post(path, json={"model": MODEL, **greedy, **fields})


def tokens_of(server: Any, messages: list[dict[str, Any]], **fields: Any) -> tuple[list[int], str]:
    """The tokens of a prompt, and its text."""
    tokens = post(server, "/tokenize", messages=messages, **fields).json()["tokens"]
    return tokens, post(server, "/detokenize", tokens=tokens).json()["prompt"]


def test_notes_and_options_without_effect_change_nothing(fake_server: EngineServer) -> None:
    note = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "say it", **note}
    tool = {"type": "function", "function": {"name": "look"}, **note}
    plain = post(fake_server, CHAT, messages=[USER])
    noted = post(
        fake_server,
        CHAT,
        messages=[USER | note | {"content": [part]}],
        stream_options={"include_usage": True},
    )
    assert plain.status_code == noted.status_code == 200, noted.text
    first, second = fake_server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids
    totals = [answer.json()["usage"]["total_tokens"] for answer in (plain, noted)]
    assert totals[0] == totals[1]
    assert_refused(post(fake_server, CHAT, messages=[USER], tools=[tool]), "tools", "leave them")


def test_calls_are_read_as_the_streaming_helpers_of_a_client_leave_them(
    server: ScriptedServer,
) -> None:
    """OpenAI's client for Python, of which users send `message` or `message.model_dump()` back."""
    function = {"name": "read_file", "arguments": '{"path": "sum.py"}'}
    call = {"id": "call_9b3f6f80", "type": "function", "function": function}
    message = {"role": "assistant", "content": "I read the file."}
    noted = function | {"parsed_arguments": {"path": "sum.py"}}
    result = {"role": "tool", "tool_call_id": "call_9b3f6f80", "content": "1"}
    plain, kept = (
        tokens_of(server, [USER, message | fields, result])
        for fields in (
            {"tool_calls": [call]},
            {"tool_calls": [call | {"function": noted, "index": 0}], "parsed": None},
        )
    )
    assert plain == kept


def test_what_codex_sends_beside_a_conversation_changes_nothing(fake_server: EngineServer) -> None:
    labels = {"x-codex-window-id": "01a22c18:0", "x-codex-turn-metadata": "{" + "a" * 900 + "}"}
    beside = {
        "client_metadata": labels,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a22c18-e3fe-7ed1-9326-1a0fdfe97874",
        "reasoning": {"summary": "auto"},
        "store": False,
    }
    for fields in ({}, beside):
        answer = post(fake_server, RESPONSES, input=[{"type": "message", **USER}], **fields)
        assert answer.status_code == 200, answer.text
    first, second = fake_server.engine.submitted
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_thought_is_read_and_written_under_both_names(server: ScriptedServer) -> None:
    prompts = [
        tokens_of(server, [USER, {"role": "assistant", "content": "b", **thought}, USER])
        for thought in ({}, {"reasoning": "c"}, {"reasoning": "c", "reasoning_content": "c"})
    ]
    assert prompts[1] == prompts[2]
    differing = {"role": "assistant", "content": "b", "reasoning": "c", "reasoning_content": "d"}
    response = post(server, CHAT, messages=[USER, differing])
    assert_refused(response, "messages[1].reasoning", "differ")
    response = post(server, CHAT, messages=[USER | {"reasoning": "c"}])
    assert_refused(response, "messages[0].reasoning", "assistant")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "The sky is<|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nThe sky is"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "<|im_start|>assistant\nThe sky is",
        ),
    ],
)
def test_a_prompt_ends_as_the_request_says(
    server: ScriptedServer, fields: dict[str, Any], end: str
) -> None:
    tokens, text = tokens_of(server, [USER, SAID], **fields)
    assert text.endswith(end)
    server.say(server.engine.codec.encode(" blue"))
    answer = post(server, CHAT, messages=[USER, SAID], max_tokens=5, **fields).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["choices"][0]["message"]["content"] == " blue"


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER, SAID], {"add_generation_prompt": True}),
        ([USER], {}),
        ([USER, SAID | {"content": " "}], {}),
    ],
)
def test_what_cannot_be_continued_is_refused(
    server: ScriptedServer, messages: list[Any], fields: dict[str, Any]
) -> None:
    for path in (CHAT, "/tokenize"):
        response = post(server, path, messages=messages, continue_final_message=True, **fields)
        assert_refused(response, "continue_final_message", "continue_final_message")
    response = post(server, "/tokenize", prompt="a", continue_final_message=True)
    assert_refused(response, "continue_final_message", "messages")


def test_special_tokens_are_shown_on_request(server: ScriptedServer) -> None:
    codec = server.engine.codec
    (mark,) = (token for token in codec.special_token_ids if token == 1)
    name = codec.verbatim([mark], "tokens")
    script = [*codec.encode("one"), mark, *codec.encode(" two"), mark]
    texts = {}
    for shown in (False, True):
        for stream in (False, True):
            server.say(script)
            fields = {"max_tokens": 20, "skip_special_tokens": not shown, "stream": stream}
            answer = post(server, COMPLETIONS, prompt="a", **fields)
            if stream:
                lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
                texts[shown, stream] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            else:
                texts[shown, stream] = answer.json()["choices"][0]["text"]
    assert texts[False, False] == texts[False, True] == "one two"
    assert texts[True, False] == texts[True, True] == f"one{name} two{name}"
    server.say(script)
    fields = {"max_tokens": 20, "skip_special_tokens": False, "stop": name}
    answer = post(server, COMPLETIONS, prompt="a", **fields).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one", "stop")


def ask_long(server: ScriptedServer, turns: int, **fields: Any) -> Any:
    items: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        items.append({"role": "user", "content": f"question {turn}: " + "why " * 300})
        items.append({"role": "assistant", "content": f"answer {turn}"})
    items[-1:] = []
    server.say(server.engine.codec.encode("so"))
    return post(server, RESPONSES, input=items, **fields)


def test_the_oldest_items_are_left_out_on_request(server: ScriptedServer) -> None:
    short = ask_long(server, 3, truncation="auto").json()
    assert short["truncation"] == "auto"
    assert short["usage"] == ask_long(server, 3).json()["usage"] | {
        "input_tokens_details": short["usage"]["input_tokens_details"]
    }
    assert_refused(ask_long(server, 30), "input", "4096")
    cut = ask_long(server, 30, truncation="auto", max_output_tokens=500)
    assert cut.status_code == 200, cut.text
    tokens = cut.json()["usage"]["input_tokens"]
    assert 4096 - 500 - 350 < tokens <= 4096 - 500
    last = {"role": "user", "content": "why " * 5000}
    assert_refused(post(server, RESPONSES, input=[USER, last], truncation="auto"), "input", "4096")
    assert_refused(post(server, RESPONSES, input="a", truncation="much"), "truncation", "auto")


def test_what_is_cut_keeps_system_messages_and_begins_with_a_question(
    fake_server: EngineServer,
) -> None:
    items = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "first " + "x" * 400},
        {"role": "assistant", "content": "answered"},
        {"role": "user", "content": "second " + "y" * 200},
    ]
    answer = post(fake_server, RESPONSES, input=items, truncation="auto", max_output_tokens=9)
    assert answer.status_code == 200, answer.text
    (request,) = fake_server.engine.submitted
    text = "".join(map(chr, request.prompt_token_ids))
    assert text == "<system>S<user>second " + "y" * 200
