"""The conversations of the soak: a few turns each, some cut off by their client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import httpx

from bench.logbook import LOGBOOK
from bench.stress.server import MODEL

PATH = "/v1/chat/completions"
WORDS = LOGBOOK.read_text().split()
MOST_TURNS = 4
TURN_WORDS = (30, 250)
ANSWER_TOKENS = (8, 32)
SHARED_WORDS = 300  # half of the conversations begin with the same text
HANG_UP_SHARE = 0.12
HANG_UP_WITHIN_S = 3.0
MANY = 5000
Message = dict[str, str]


@dataclass(frozen=True)
class UserTurn:
    """A client that disconnects after `patience_s` if the answer has not ended by then."""

    text: str
    answer_tokens: int
    stream: bool
    patience_s: float | None


def conversation(random: Random) -> list[UserTurn]:
    """A conversation of 1 to `MOST_TURNS` turns; a client that disconnects ends it."""
    turns = []
    for number in range(random.randint(1, MOST_TURNS)):
        start, length = random.randrange(len(WORDS)), random.randint(*TURN_WORDS)
        text = " ".join(WORDS[(start + at) % len(WORDS)] for at in range(length))
        if number == 0 and random.random() < 0.5:
            text = f"{' '.join(WORDS[:SHARED_WORDS])}\n\n{text}"
        hangs_up = random.random() < HANG_UP_SHARE
        patience_s = random.uniform(0.0, HANG_UP_WITHIN_S) if hangs_up else None
        turns.append(
            UserTurn(text, random.randint(*ANSWER_TOKENS), random.random() < 0.5, patience_s)
        )
        if hangs_up:
            break
    return turns


def mean_turns() -> float:
    """The mean number of turns of a conversation."""
    random = Random(0)
    return sum(len(conversation(random)) for _ in range(MANY)) / MANY


class WrongAnswerError(Exception):
    """An answer that is incomplete or inconsistent; the message says why."""


@dataclass
class Outcome:
    """The outcome of one turn: `answered`, `hung up` by the client, or `lost`.

    Times are seconds of a monotonic clock. `token_s` are the times of the pieces of a streamed
    answer. `retry_after_s` is what a server said that refused the request.
    """

    asked_s: float
    stream: bool
    kind: str = "lost"
    reason: str = ""
    status: int = 0
    retry_after_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    answer_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """From the question to the first token, for streams."""
        return self.token_s[0] - self.asked_s if self.token_s else None

    @property
    def gaps_s(self) -> list[float]:
        """From each piece of a streamed answer to the next."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]


async def hold(client: httpx.AsyncClient, turns: list[UserTurn]) -> AsyncIterator[Outcome]:
    """A conversation, turn by turn, each with the whole history.

    It ends with the first turn that is not answered.
    """
    history: list[Message] = []
    for turn in turns:
        history.append({"role": "user", "content": turn.text})
        outcome = await ask(client, list(history), turn)
        yield outcome
        if outcome.kind != "answered":
            return
        history.append({"role": "assistant", "content": outcome.text})


async def ask(client: httpx.AsyncClient, messages: list[Message], turn: UserTurn) -> Outcome:
    """Send one turn, and return its outcome."""
    outcome = Outcome(
        time.monotonic(), turn.stream, messages=messages, answer_tokens=turn.answer_tokens
    )
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": turn.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    patience = asyncio.timeout(turn.patience_s)
    try:
        async with patience:
            await (_read_stream if turn.stream else _whole)(client, body, outcome)
            outcome.kind = "answered"
    except TimeoutError:
        outcome.kind = "hung up"
    except (httpx.HTTPError, WrongAnswerError, ValueError, KeyError) as error:
        # A client that disconnects may get an error of its own connection.
        outcome.kind = "hung up" if patience.expired() else "lost"
        outcome.reason = f"{type(error).__name__}: {error}"
    outcome.ended_s = time.monotonic()
    return outcome


async def _whole(client: httpx.AsyncClient, body: dict[str, Any], outcome: Outcome) -> None:
    response = await client.post(PATH, json=body)
    _check_status(response, response.text, outcome)
    answer = response.json()
    (choice,) = answer["choices"]
    outcome.text = choice["message"]["content"]
    _check(outcome, [choice["finish_reason"]], answer["usage"])


async def _read_stream(client: httpx.AsyncClient, body: dict[str, Any], outcome: Outcome) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    reasons, usage, last = [], None, ""
    async with client.stream("POST", PATH, json=body | fields) as response:
        _check_status(
            response, "" if response.is_success else (await response.aread()).decode(), outcome
        )
        async for line in response.aiter_lines():
            if not line:
                continue
            last = line.removeprefix("data: ")
            if last == "[DONE]":
                continue
            chunk = json.loads(last)
            if "error" in chunk:
                raise WrongAnswerError(f"the stream says {chunk['error']}")
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                content = choice["delta"].get("content") or ""
                if content:
                    outcome.token_s.append(time.monotonic())
                outcome.text += content
                reasons += [choice["finish_reason"]] if choice["finish_reason"] is not None else []
    if last != "[DONE]":
        raise WrongAnswerError(f"the stream ends with {last[:100]!r}")
    _check(outcome, reasons, usage)


def _check_status(response: httpx.Response, text: str, outcome: Outcome) -> None:
    outcome.status = response.status_code
    if "retry-after" in response.headers:
        outcome.retry_after_s = float(response.headers["retry-after"])
    if outcome.status != 200:
        raise WrongAnswerError(f"status {outcome.status}: {text[:300]}")


def _check(outcome: Outcome, reasons: list[str], usage: dict[str, Any] | None) -> None:
    """An answer that only its length may end has that length, and its usage adds up."""
    if reasons != ["length"]:
        raise WrongAnswerError(f"it ended by {reasons}, not once by its length")
    if usage is None:
        raise WrongAnswerError("there is no usage")
    outcome.prompt_tokens = usage["prompt_tokens"]
    if usage["completion_tokens"] != outcome.answer_tokens:
        raise WrongAnswerError(
            f"{usage['completion_tokens']} tokens instead of {outcome.answer_tokens}"
        )
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        raise WrongAnswerError(f"the usage does not add up: {usage}")
