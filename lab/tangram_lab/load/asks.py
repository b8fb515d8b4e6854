"""The requests of a measurement: random tokens of given lengths, in turns or from a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tangram.errors import ConfigError
from tangram.foreign_files import parse_json, read_text

TRACE_BLOCK = 512  # tokens for which one hash of a Mooncake trace stands
MOST_TOKENS = 2**27  # of all prompts together, which are generated before the first request


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, the tokens to answer with, and its time in seconds from the start."""

    tokens: tuple[int, ...]
    output_tokens: int
    at_s: float = 0.0


class TraceLine(BaseModel):
    """A request of a Mooncake trace; other fields of a line are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1)]
    output_length: Annotated[int, Field(ge=0)]
    hash_ids: list[Annotated[int, Field(ge=0)]]


def check_lengths(
    option: str, count: int, prompt_tokens: int, output_tokens: int, most_tokens: int
) -> None:
    """Raise `ConfigError` if the longest of `count` requests, or all of them, are too long.

    This is checked before any is generated.
    """
    longest = prompt_tokens + output_tokens
    if longest > most_tokens:
        raise ConfigError(
            f"{option} is too large: a request has {longest} tokens with its answer, a sequence "
            f"may have {most_tokens}"
        )
    if count * prompt_tokens > MOST_TOKENS:
        raise ConfigError(
            f"{option} is too large: {count} prompts of {prompt_tokens} tokens are "
            f"{count * prompt_tokens}, at most {MOST_TOKENS} are allowed: ask for fewer"
        )


def draw_tokens(count: int, vocab_size: int, *seed: int) -> tuple[int, ...]:
    """`count` random tokens; the same seed gives the same tokens."""
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, count).tolist())


def alike(
    count: int, input_tokens: int, output_tokens: int, *, shared_tokens: int, vocab_size: int
) -> list[Ask]:
    """`count` requests at once.

    Each has `shared_tokens` of a common prefix, then `input_tokens` of its own.
    """
    shared = draw_tokens(shared_tokens, vocab_size, 0)
    return [
        Ask(shared + draw_tokens(input_tokens, vocab_size, 1, n), output_tokens)
        for n in range(count)
    ]


def arriving(asks: Sequence[Ask], rate: float) -> list[Ask]:
    """`asks` as independent clients send them, `rate` a second on average (Poisson).

    The gaps are the same at every rate.
    """
    gaps = np.random.default_rng(5).exponential(1.0, len(asks))
    return [
        replace(ask, at_s=float(at_s))
        for ask, at_s in zip(asks, np.cumsum(gaps) / rate, strict=True)
    ]


def read_trace(path: Path, *, seconds: float, speed: float, vocab_size: int) -> list[Ask]:
    """The first `seconds` of a Mooncake trace (JSON lines), `speed` times as fast.

    Equal hashes are equal tokens. Raises `ConfigError` naming the line and field that is missing or
    wrong, or if no request is left.
    """
    asks = []
    for number, entry in read_lines(path):
        at_s = entry.timestamp / 1e3
        if at_s >= seconds:
            break
        tokens, length = TRACE_BLOCK * len(entry.hash_ids), entry.input_length
        if tokens < length:
            raise ConfigError(
                f"{path}:{number}: hash_ids stand for {tokens} tokens, input_length is {length}"
            )
        needed = entry.hash_ids[: -(-length // TRACE_BLOCK)]
        blocks = [
            token for block in needed for token in draw_tokens(TRACE_BLOCK, vocab_size, 2, block)
        ]
        asks.append(Ask(tuple(blocks[:length]), max(1, entry.output_length), at_s / speed))
    if not asks:
        raise ConfigError(f"{path}: no request in the first {seconds} s: raise --seconds")
    return asks


def read_lines(path: Path) -> Iterator[tuple[int, TraceLine]]:
    """The lines of a Mooncake trace, numbered from 1. Raises `ConfigError` for a bad one."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"trace {path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        fields = tuple(TraceLine.model_fields)
        if missing := [name for name in fields if not isinstance(entry, dict) or name not in entry]:
            raise ConfigError(
                f"{path}:{number}: {', '.join(missing)} missing; every line needs "
                f"{', '.join(fields)}"
            )
        try:
            yield number, TraceLine.model_validate(entry)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place, given = ".".join(map(str, first["loc"])), shortened(first["input"])
            raise ConfigError(f"{path}:{number}: {place} is {given}: {first['msg']}") from error


def next_turn(
    histories: Sequence[tuple[int, ...]],
    turn: int,
    user_tokens: int,
    output_tokens: int,
    vocab_size: int,
) -> list[Ask]:
    """The next turn of every session: its history so far and `user_tokens` new tokens."""
    return [
        Ask(history + draw_tokens(user_tokens, vocab_size, 3, turn, session), output_tokens)
        for session, history in enumerate(histories)
    ]
