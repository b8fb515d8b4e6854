"""The embedded model answers with drafts what it answers without, greedy and in float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.fixtures.transformers.make_fixture import TEXT
from tests.speculation import METHODS, DraftedAnswer, ask, draft_always, few

ROOT = Path(__file__).parents[3]
LENGTHS = tuple(np.geomspace(20, 7000, 24).astype(int).tolist())
FEW = (20, 560)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
# A choice decided by less, in log-probability, is a tie: sums in another order may decide it.
NEAR_TIE = 1e-4


def texts() -> list[str]:
    """Documentation, source, reference pages, and a list that goes on as it began."""
    docs = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    source = sorted((ROOT / "tangram" / "engine").glob("*.py"))
    return [
        "\n".join(path.read_text() for path in docs),
        "\n".join(path.read_text() for path in source),
        TEXT,
        "\n".join(f"{number}. The square of {number} is {number**2}." for number in range(1000)),
    ]


def prompts_of(loaded: LoadedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of `lengths` tokens, no two of which begin alike."""
    encoded = [loaded.tokenizer.encode(text[:60_000]) for text in texts()]
    return [
        encoded[number % 4][37 * number : 37 * number + length]
        for number, length in enumerate(lengths)
    ]


def engine(loaded: LoadedModel, method: str | None, **options: Any) -> Engine:
    """One that drafts whenever it may."""
    config = EngineConfig(
        kv_retention=1.0,
        kv_cache_gib=3.0,
        max_num_seqs=8,
        speculative_config=None if method is None else METHODS[method],
        **options,
    )
    return draft_always(engine_of(config, loaded))


class Compared:
    """What the engine answers without drafts, for each set of prompts once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.plain = cache(self._plain)

    def _plain(self, lengths: tuple[int, ...]) -> tuple[DraftedAnswer, ...]:
        prompts = prompts_of(self.loaded, lengths)
        return tuple(ask(engine(self.loaded, None), prompts, [GREEDY] * len(prompts)))

    def check(self, method: str, lengths: tuple[int, ...], *, alone: bool) -> None:
        prompts, expected = prompts_of(self.loaded, lengths), self.plain(lengths)
        served = engine(self.loaded, method, enable_prefix_caching=not alone)
        if alone:
            found = [ask(served, [prompt], [GREEDY])[0] for prompt in prompts]
        else:
            found = ask(served, prompts, [GREEDY] * len(prompts))
        for length, ours, theirs in zip(lengths, found, expected, strict=True):
            check_tokens(f"{method}, {length} tokens", ours, theirs)
        assert served._speculation is not None
        counters = served._speculation.counters
        print(f"{method}: {counters}")
        assert counters.accepted > 5 * len(lengths)
        if method in ("compressed_kv", "draft_model"):  # it drafts by the model itself
            assert counters.accepted > 0.8 * counters.drafted


def check_tokens(name: str, ours: DraftedAnswer, theirs: DraftedAnswer) -> None:
    """Equal, or parted at a near-tie, which is printed."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    apart = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if apart is not None:
        _, best, second = theirs.logprobs[apart]
        print(f"{name}: token {apart} differs, decided by {best - second:.2e}")
        assert best - second < NEAR_TIE, f"{name}: token {apart} differs, and it is no tie"


@pytest.fixture(scope="module")
def compared(loaded: LoadedModel) -> Compared:
    return Compared(loaded)


@pytest.mark.parametrize("method", few([*METHODS], "compressed_kv"))
def test_some_answers_are_those_without_drafts(compared: Compared, method: str) -> None:
    """Together, with another sequence's prompt beside drafts."""
    compared.check(method, FEW, alone=False)


@pytest.mark.nightly
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "together"])
@pytest.mark.parametrize("method", [*METHODS])
def test_answers_are_those_without_drafts(compared: Compared, method: str, alone: bool) -> None:
    compared.check(method, LENGTHS, alone=alone)
