"""The loads of `python -m bench.speculation serving`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.speculation.figures import AGAIN, PLAIN
from tangram_lab.load.asks import draw_tokens

METHODS: Mapping[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    AGAIN: None,
    "compressed_kv": {"method": "compressed_kv", "num_speculative_tokens": 8, "kv_retention": 0.25},
    "suffix": {"method": "suffix"},
}


WARM_TOKENS = 16  # of an answer before measured ones, where prompts are cached


@dataclass(frozen=True)
class SpeculationCase:
    """A load, and the methods that are compared under it.

    `apart`: pools do not fit side by side. `cached`: every prompt is in the prefix cache before a
    measured run, so that a run is all decode. `acceptance` is forced. With `places` so many answers
    run at a time, and the next prompt takes the place of one that has ended.
    """

    title: str
    count: int
    context_tokens: int
    output_tokens: int = 512
    methods: tuple[str, ...] = (PLAIN, "compressed_kv")
    prompts: Literal["texts", "repeat", "random"] = "texts"
    apart: bool = False
    cached: bool = False
    acceptance: float | None = None
    places: int | None = None

    @property
    def running(self) -> int:
        """The most sequences that run at a time."""
        return self.places or self.count

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.context_tokens + self.output_tokens + 64

    def of_shape(self) -> bool:
        """Whether the model has random weights."""
        return self.prompts == "random"


_SHAPE: dict[str, Any] = {"prompts": "random", "cached": True, "acceptance": 0.95}
_EVERY = (PLAIN, AGAIN, "compressed_kv", "suffix")
CASES: Mapping[str, SpeculationCase] = {
    "real-64x7k": SpeculationCase("SmolLM2-135M, 64 × 7K", 64, 7000),
    "shape-40x16k": SpeculationCase("Qwen3-4B shape, 40 × 16K", 40, 16384, **_SHAPE, apart=True),
    "shape-1x128k": SpeculationCase("Qwen3-4B shape, 1 × 128K", 1, 131072, **_SHAPE),
    "shape-1x1k": SpeculationCase("Qwen3-4B shape, 1 × 1K", 1, 1024, **_SHAPE),
    "shape-8x1k": SpeculationCase("Qwen3-4B shape, 8 × 1K", 8, 1024, **_SHAPE),
    "real-1x1k": SpeculationCase("SmolLM2-135M, 1 × 1K", 1, 1024, methods=_EVERY),
    "real-8x1k": SpeculationCase("SmolLM2-135M, 8 × 1K", 8, 1024, methods=_EVERY),
    "flow-8x1k": SpeculationCase(
        "SmolLM2-135M, 32 × 1K, 8 at a time", 32, 1024, methods=_EVERY, places=8
    ),
    "repeat-1x1k": SpeculationCase(
        "SmolLM2-135M, a text that repeats, 1 × 1K",
        1,
        1024,
        methods=(PLAIN, "suffix"),
        prompts="repeat",
    ),
    "repeat-8x1k": SpeculationCase(
        "SmolLM2-135M, a text that repeats, 8 × 1K",
        8,
        1024,
        methods=(PLAIN, "suffix"),
        prompts="repeat",
    ),
}


def shrink(case: SpeculationCase) -> SpeculationCase:
    """The case in a form that takes seconds."""
    places = None if case.places is None else 1
    return replace(
        case, count=min(case.count, 2), context_tokens=600, output_tokens=24, places=places
    )


def draw_prompts(case: SpeculationCase, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of random tokens, which share nothing."""
    return [draw_tokens(case.context_tokens, vocab_size, 8, number) for number in range(case.count)]
