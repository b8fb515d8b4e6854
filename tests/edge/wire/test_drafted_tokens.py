"""Drafted tokens over the wire: in the usage of every endpoint, as OpenAI's client reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tangram.types import DraftedTokens

from .conftest import MODEL, USER, EngineServer, run_fake_server, run_real_server, scrape

FOX = "the quick brown fox jumps over the lazy dog. "
LAST = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def drafting() -> Iterator[EngineServer]:
    with run_fake_server() as server:
        server.engine.drafted = DraftedTokens(5, 3)
        yield server


@pytest.fixture(scope="module")
def real(python: list[str]) -> Iterator[str]:
    with run_real_server("--speculative-config", '{"method": "suffix"}', python=python) as url:
        yield url


def usages(server: EngineServer, **fields: Any) -> list[Any]:
    """Of chat and of completions, whole and streamed."""
    answers = [server.chat(**fields), server.complete(prompt="say it", **fields)]
    streams = [server.chat(**fields, **LAST), server.complete(prompt="say it", **fields, **LAST)]
    return [*(answer.usage for answer in answers), *(list(one)[-1].usage for one in streams)]


def test_the_usage_has_what_was_accepted_and_rejected(drafting: EngineServer) -> None:
    for usage in usages(drafting):
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 3)


def test_several_completions_add_up(drafting: EngineServer) -> None:
    for usage in usages(drafting, n=2):
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 6)


def test_a_response_has_the_fields_of_openai_only(drafting: EngineServer) -> None:
    answer = drafting.openai().responses.create(model=MODEL, input=[USER])
    assert answer.usage.output_tokens_details.model_dump() == {"reasoning_tokens": 0}


def test_an_engine_that_drafts_nothing_says_nothing(fake_server: EngineServer) -> None:
    for usage in usages(fake_server):
        details = usage.completion_tokens_details
        assert details is None or details.accepted_prediction_tokens is None


def test_a_real_server_counts_the_same_in_usage_and_metrics(real: str) -> None:
    asked = {"model": "smollm2", "prompt": FOX * 4 + FOX[:19], "max_tokens": 40, "temperature": 0}
    with openai.OpenAI(base_url=f"{real}/v1", api_key="none", timeout=120) as client:
        whole = client.completions.create(**asked)  # type: ignore[call-overload]
        (*_, last) = client.completions.create(**asked, **LAST)  # type: ignore[call-overload]
        chat: Any = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"Say this again: {FOX * 2}"}],
            max_tokens=40,
        )
    details = [answer.usage.completion_tokens_details for answer in (whole, last, chat)]
    accepted = sum(one.accepted_prediction_tokens for one in details)
    rejected = sum(one.rejected_prediction_tokens for one in details)
    with httpx.Client(base_url=real, timeout=30) as http:
        found = scrape(http)
    drafted = found["tangram_draft_tokens_total", ""]
    # The engine also counts accepted tokens behind an end of text.
    assert 0 < accepted <= found["tangram_accepted_draft_tokens_total", ""]
    assert accepted + rejected == drafted
    assert accepted < sum(answer.usage.completion_tokens for answer in (whole, last, chat))
