"""Engines that draft, and what they answer, as the tests of speculation want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tangram.engine.loop import Engine
from tangram.engine.text.answer_text import read_text
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.small_engines import drain

# One line for each method; the values make it draft on short texts.
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "compressed_kv": {"method": "compressed_kv", "num_speculative_tokens": 4, "kv_retention": 0.5},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4, "model": "smollm2"},
}
# GiB of KV pages for a tiny model that drafts.
SHARE = 0.002


def methods_of(loaded: LoadedModel, folder: Path) -> dict[str, dict[str, Any]]:
    """`METHODS` for a tiny model; the model that drafts is one like it, in `folder`.

    It has other weights by a little, so that it is sometimes wrong.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight + 0.01 * torch.randn(weight.shape, generator=generator)
        for name, weight in loaded.model.state_dict().items()
    }
    loaded.model.save_pretrained(folder, state_dict=weights)
    loaded.tokenizer.save_pretrained(folder)
    drafts = {"model": str(folder), "kv_cache_gib": SHARE}
    return METHODS | {"draft_model": METHODS["draft_model"] | drafts}


def few(cases: Sequence[Any], *chosen: Any) -> list[Any]:
    """All of `cases` as parameters of a test; all but those `chosen` are `nightly`."""
    assert {*chosen} <= {*cases}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in chosen else pytest.mark.nightly,
        )
        for case in cases
    ]


class Pattern:
    """A pace that does not go by the clock: it drafts as many tokens as `counts` say, in turn."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts, self._at = counts, 0

    def choose(self, load: object, acceptances: Sequence[object], *more: Any) -> list[int]:
        self._at += 1
        return [
            self._counts[(self._at + row) % len(self._counts)] for row in range(len(acceptances))
        ]

    def record(self, *measured: object) -> None:
        """Nothing is measured."""

    record_unfound = record

    def count_lost(self, load: object, seconds: float) -> float:
        return 0.0


def draft_always(engine: Engine, *counts: int) -> Engine:
    """`engine`, which drafts `counts` tokens in turn, or always as many as it may."""
    if engine._speculation is not None:
        engine._speculation._pace = Pattern(counts or (engine._speculation.most,))  # type: ignore
    return engine


@dataclass(frozen=True)
class DraftedAnswer:
    """One completion, put together from its events."""

    token_ids: list[int]
    text: str
    finish_reason: str
    usage: object
    logprobs: list[tuple[float, ...]]


def ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    **options: Any,
) -> list[DraftedAnswer]:
    """The completions of all prompts, submitted at once; the books are checked at every step."""
    events: dict[tuple[int, int], list[Event]] = {}
    for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        for index in range(wanted.n):
            events[number, index] = []

        def receive(event: Event, number: int = number) -> None:
            events[number, event.index].append(event)

        engine.submit(Request(str(number), tuple(prompt), wanted, receive, **options))
    drain(engine)
    return [
        _answer(own, read_text(engine.codec, params[number], prompts[number], own))
        for (number, _), own in events.items()
    ]


def _answer(events: Sequence[Event], text: str) -> DraftedAnswer:
    last = events[-1]
    assert last.finish_reason is not None and last.error is None
    return DraftedAnswer(
        [token for event in events for token in event.token_ids],
        text,
        str(last.finish_reason),
        structs.replace(last.usage, drafted=None),
        [
            (step.logprob, *(value for _, value in step.top))
            for event in events
            for step in event.logprobs
        ],
    )
