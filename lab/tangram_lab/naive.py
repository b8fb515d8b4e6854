"""Naive against cached decoding: one model, the same tokens, with and without a KV cache.

Naive decoding sends the whole sequence through the model for each new token. So each token's keys
and values are projected again at every step. A cache keeps them, and each position is projected
once. `count_naive_positions` says how many that should be; a hook counts how many there were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tangram.engine.loop import Engine
from tangram.errors import ConfigError, TangramError
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams


@dataclass(frozen=True)
class DecodingRun:
    """`token_ids` that followed a prompt, the positions projected for them, and the seconds."""

    positions: int
    seconds: float
    token_ids: list[int]


def count_naive_positions(prompt_tokens: int, tokens: int) -> int:
    """Positions that `tokens` naive steps project: p + (p + 1) + … + (p + n − 1).

    A prompt of 1 token and 100 steps: 1 + 2 + … + 100 = 5,050.
    """
    return tokens * (2 * prompt_tokens + tokens - 1) // 2


def count_cached_positions(prompt_tokens: int, tokens: int) -> int:
    """Positions that the same steps project with a cache: the prompt, then one a step."""
    return prompt_tokens + tokens - 1


def decode_naively(loaded: LoadedModel, prompt: Sequence[int], tokens: int) -> DecodingRun:
    """The `tokens` likeliest next tokens; each is computed from the whole sequence again."""
    sequence, serving = list(prompt), loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("sdpa")
    try:
        with _counting(loaded) as count, torch.inference_mode():
            begin = time.perf_counter()
            for _ in range(tokens):
                ids = torch.tensor([sequence], device=loaded.device)
                out = loaded.model(ids, use_cache=False, logits_to_keep=1)
                sequence.append(int(out.logits[0, -1].argmax()))
            seconds = time.perf_counter() - begin
    finally:
        loaded.model.set_attn_implementation(serving)
    return DecodingRun(count.positions, seconds, sequence[len(prompt) :])


def decode_with_cache(
    engine: Engine, loaded: LoadedModel, prompt: Sequence[int], tokens: int
) -> DecodingRun:
    """The same tokens from an engine of `loaded`, whose cache keeps everything."""
    found: list[int] = []

    def take(event: Event) -> None:
        found.extend(event.token_ids)

    params = SamplingParams.state_all(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with _counting(loaded) as count:
        begin = time.perf_counter()
        engine.submit(Request("0", tuple(prompt), params, take))
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - begin
    return DecodingRun(count.positions, seconds, found)


def check_equal(naive: DecodingRun, cached: DecodingRun) -> None:
    """Raise `TangramError` at the first token that differs: then nothing can be compared."""
    pairs = zip(naive.token_ids, cached.token_ids, strict=True)
    for place, (one, other) in enumerate(pairs):
        if one != other:
            raise TangramError(
                f"token {place + 1} is {one} without a cache and {other} with it, so times are "
                "not comparable; sums in 16 bits may do that, use --dtype float32"
            )


def check_naive_length(prompt_tokens: int, tokens: int, most_tokens: int) -> None:
    """Raise `ConfigError` if prompt and answer are longer than a sequence may be."""
    if prompt_tokens + tokens > most_tokens:
        raise ConfigError(
            f"prompt_tokens + tokens is {prompt_tokens + tokens}, a sequence of this model may "
            f"have {most_tokens}: use fewer"
        )


@dataclass
class _Count:
    positions: int = field(default=0)


@contextmanager
def _counting(loaded: LoadedModel) -> Iterator[_Count]:
    """Count the positions that enter the model: each layer projects all of them."""
    count = _Count()

    def add(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        count.positions += inputs[0].numel()

    hook = loaded.model.get_input_embeddings().register_forward_pre_hook(add)
    try:
        yield count
    finally:
        hook.remove()
