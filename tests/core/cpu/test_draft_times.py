"""The choice of drafts goes by times of steps that had nothing to wait for from another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from tangram.engine.loop import Engine
from tangram.errors import RequestError
from tangram.model.load import LoadedModel
from tangram.speculate.pace import REST_STEPS
from tangram.types import Matcher, Request, SamplingParams, UInt8
from tests.core.cpu.test_purity import TINY
from tests.small_engines import drain, profile_file, run, small_engine
from tests.speculation import METHODS, Pattern

CHUNK = 128
FEW_TOKENS = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)


class WrittenPattern(Pattern):
    """Writes down what was chosen, and what was told of the steps until the next choice."""

    def __init__(self, *counts: int) -> None:
        super().__init__(counts)
        self.told: list[tuple[int, list[int | None]]] = []

    def choose(self, load: object, acceptances: object, *more: Any) -> list[int]:
        chosen = super().choose(load, acceptances, *more)  # type: ignore[arg-type]
        if chosen:
            self.told.append((max(chosen), []))
        return chosen

    def record(self, *measured: object) -> None:
        _, drafted, seconds = measured
        assert isinstance(drafted, int) and isinstance(seconds, float) and seconds > 0.0
        self.told[-1][1].append(drafted)

    def record_unfound(self, *measured: object) -> None:
        self.told[-1][1].append(None)


def read_times(
    engine: Engine, *counts: int, prompt: list[int]
) -> list[tuple[int, list[int | None]]]:
    pattern = WrittenPattern(*counts)
    assert engine._speculation is not None
    engine._speculation._pace = pattern  # type: ignore[assignment]
    run(engine, [prompt], FEW_TOKENS)
    return pattern.told[:-2]  # drafts never go beyond the end of an answer


def test_a_step_after_one_of_the_other_kind_is_not_told(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    loaded = adopt_tiny(TINY)
    engine = small_engine(
        loaded,
        kv_retention=1.0,
        chunk_tokens=CHUNK,
        max_num_batched_tokens=2 * CHUNK,
        profile=(profile_file(loaded, tmp_path, chunk_tokens=CHUNK),),
        speculative_config=METHODS["compressed_kv"],
    )
    found = read_times(engine, 3, 2, 0, prompt=[5, 6, 7])
    assert len(found) > 9
    before = 0  # the prompt
    for chosen, steps in found:
        if chosen:
            assert steps == ([chosen] if before else [])
        else:  # the first of them follows drafts or the prompt; a choice holds for the others
            assert steps == [0] * REST_STEPS
        before = chosen
    assert {chosen for chosen, _ in found} == {0, 2, 3}


def test_steps_that_find_nothing_to_draft_are_told_as_such(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    engine = small_engine(
        adopt_tiny(TINY),
        chunk_tokens=CHUNK,
        max_num_batched_tokens=2 * CHUNK,
        speculative_config=METHODS["ngram"] | {"prompt_lookup_min": 64, "prompt_lookup_max": 64},
    )
    found = read_times(engine, 4, prompt=[5, 6, 7])
    assert len(found) > 50
    assert all(steps == [None] for _, steps in found[1:])


class AnyToken:
    """A grammar that allows every token of the tiny model."""

    source, field = "", "response_format"
    error: RequestError | None = None

    def begin(self) -> Matcher:
        return self

    def mask_tokens(self) -> UInt8:
        return np.full(TINY.vocab_size // 8, 255, np.uint8)

    def take(self, token: int) -> None:
        """All may follow."""


def test_steps_with_a_row_that_follows_a_grammar_are_told_where_a_step_is_launched_ahead(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    """As on a GPU: such a row has the step before read while its own step is launched."""
    engine = small_engine(
        adopt_tiny(TINY),
        chunk_tokens=CHUNK,
        max_num_batched_tokens=2 * CHUNK,
        speculative_config=METHODS["ngram"],
    )
    engine.ahead = True
    pattern = WrittenPattern(0)
    assert engine._speculation is not None
    engine._speculation._pace = pattern  # type: ignore[assignment]
    for name, grammar in (("with", AnyToken()), ("without", None)):
        engine.submit(Request(name, (5, 6, 7), FEW_TOKENS, lambda event: None, grammar=grammar))
    drain(engine)
    found = pattern.told[1:-1]  # between the prompts and the ends
    assert len(found) > 5
    assert all(steps == [0] * (1 + REST_STEPS) for _, steps in found)
