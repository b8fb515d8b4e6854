"""Two calls of tools in one answer, of a model that is made to write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall

from bench.bare_tokenizer import load_tokenizer
from tests.templates import HERMES

from .conftest import join_calls
from .test_tools import END, ask, tool, tool_server


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tool_server(tmp_path_factory, HERMES) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def scripted_twice(mark: str, first: str, second: str) -> dict[str, Any]:
    """What has any model call `first`, then `second`, and end: a call has each token of `mark`
    twice, at its ends.
    """
    encode = load_tokenizer("smollm2").encode
    bias = {token: 100 - at / 4 for at, token in enumerate(encode(mark, add_special_tokens=False))}
    # Between the mark's after one call and after two
    bias |= {encode(first)[0]: 3, encode(second)[0]: 2, END: 91.5}
    penalties = {"presence_penalty": 2, "frequency_penalty": 2}
    return {
        "temperature": 0,
        **penalties,
        "logit_bias": {str(token): value for token, value in bias.items()},
    }


def test_two_calls_of_one_answer_have_their_own_places_and_ids(client: Any) -> None:
    # The tokenizer has one token for "</": with a "<" inside, each token of the mark comes twice in
    # a call.
    wanted = {
        "type": "object",
        "properties": {"a": {"const": "a<b"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    fields = {"tools": [tool("clock", wanted), tool("sun", wanted)], "tool_choice": "auto"}
    fields |= scripted_twice("<tool_call>", "clock", "sun")
    (whole,) = ask(client, **fields).choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    chunks = [chunk.choices[0] for chunk in ask(client, **fields, stream=True)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0, 1}
    joined = join_calls([piece.model_dump() for piece in pieces])
    streamed = [ChoiceDeltaToolCall.model_validate(call) for call in joined]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    for calls in (whole.message.tool_calls, streamed):
        assert [call.function.name for call in calls] == ["clock", "sun"]
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": "a<b"}] * 2
        assert len({call.id for call in calls}) == 2
