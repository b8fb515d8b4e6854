"""LangChain's ChatOpenAI against the real server, as its users write it."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

MOST_TOKENS = 8
QUESTIONS = ("What is the capital of France?", "Name a colour.", "Count to three.")


@pytest.fixture
def model(server_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="smollm2",
        base_url=f"{server_url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        timeout=120,
        max_retries=0,
        max_completion_tokens=MOST_TOKENS,
        stream_usage=True,
    )


def check_usage(message: BaseMessage) -> None:
    usage = getattr(message, "usage_metadata", None)
    assert usage is not None
    assert usage["input_tokens"] > 0 and 0 < usage["output_tokens"] <= MOST_TOKENS
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_an_answer_comes_whole_with_its_usage(model: ChatOpenAI) -> None:
    answer = model.invoke(QUESTIONS[0])
    assert answer.content
    assert answer.response_metadata["model_name"] == "smollm2"
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    check_usage(answer)


def test_a_stream_adds_up_to_the_whole_answer(model: ChatOpenAI) -> None:
    chunks = list(model.stream(QUESTIONS[0]))
    assert len(chunks) > 2
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert isinstance(total, AIMessageChunk)
    assert total.content == model.invoke(QUESTIONS[0]).content
    check_usage(total)


def test_a_batch_answers_each_as_if_alone(model: ChatOpenAI) -> None:
    together = model.batch(list(QUESTIONS))
    assert [answer.content for answer in together] == [
        model.invoke(question).content for question in QUESTIONS
    ]


def test_a_conversation_goes_on_and_is_found_in_the_cache(model: ChatOpenAI) -> None:
    long_rules = "You are a lighthouse keeper. " * 120
    history: list[BaseMessage] = [SystemMessage(long_rules), HumanMessage(QUESTIONS[0])]
    history.append(model.invoke(history))
    second = model.invoke([*history, HumanMessage("Why?")])
    usage = second.usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] >= 512
    assert usage["input_tokens"] > usage["input_token_details"]["cache_read"]
    check_usage(second)
