"""Whatever is drafted, requests get what they get without: tokens, text, reasons, figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.small_engines import profile_file, small_engine
from tests.speculation import METHODS, SHARE, DraftedAnswer, ask, draft_always, few, methods_of

# A prompt that repeats itself, and a random model of few words, so that lookups find something.
TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
PROMPTS = [
    [3 + (at * 5) % 9 for at in range(20)],
    [3 + (at * at) % 7 for at in range(45)],
    [4, 5, 6],
    [3 + at % 30 for at in range(70)],
]
# What a cold random model says goes round in circles, which is drafted right; a hot one surprises.
SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=50),
    "warm": SamplingParams(temperature=0.5, seed=7, max_tokens=50),
    "hot, nucleus": SamplingParams(temperature=1.5, top_p=0.9, seed=8, max_tokens=50),
    "few": SamplingParams(temperature=1.0, top_k=3, min_p=0.05, seed=9, max_tokens=50),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        max_tokens=50,
    ),
    "greedy penalties": SamplingParams(
        temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1, max_tokens=50
    ),
    "bias": SamplingParams(
        temperature=0.7, seed=4, logit_bias={5: 4.0, 6: 3.0, 7: -100.0}, max_tokens=50
    ),
    "min_tokens": SamplingParams(
        temperature=0.9,
        seed=5,
        min_tokens=13,
        logit_bias={2: 30.0, 20: 15.0, 21: 15.0},
        max_tokens=50,
    ),
    "logprobs": SamplingParams(temperature=0.6, seed=6, logprobs=4, max_tokens=40),
    "several": SamplingParams(temperature=0.7, seed=11, n=3, max_tokens=30),
    "engine's seed": SamplingParams(temperature=0.7, max_tokens=30),
    "short": SamplingParams(temperature=0.0, max_tokens=7),
    "one": SamplingParams(temperature=0.0, max_tokens=1),
}
ENGINES = few([*METHODS], "ngram", "suffix", "compressed_kv")


class DraftingEngines:
    """Engines of one tiny model, with and without drafts."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded, self.profile = loaded, profile_file(loaded, folder)
        self.methods = methods_of(loaded, folder / "drafts")
        self.plain = cache(self._plain)

    def engine(
        self,
        method: str | None,
        kv_retention: float = 1.0,
        kv_cache_gib: float = 0.01,
        profiles: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Engine:
        profiled = method == "compressed_kv" or kv_retention < 1.0
        given = {"profile": profiles or (self.profile,)} if profiled else {}
        config = None if method is None else self.methods[method]
        return small_engine(
            self.loaded,
            kv_retention=kv_retention,
            speculative_config=config,
            kv_cache_gib=kv_cache_gib + (SHARE if method == "draft_model" else 0.0),
            max_num_batched_tokens=160,
            **given,
            **options,
        )

    def _plain(self, setting: str, kv_retention: float = 1.0) -> list[DraftedAnswer]:
        return self.answers(None, SETTINGS[setting], kv_retention=kv_retention)

    def answers(
        self, method: str | None, params: SamplingParams, *, ahead: bool = False, **options: Any
    ) -> list[DraftedAnswer]:
        engine = draft_always(self.engine(method, **options))
        engine.ahead = ahead
        found = ask(engine, PROMPTS, [params] * len(PROMPTS))
        if method is not None:
            assert engine._speculation is not None
            counters = engine._speculation.counters
            expects = params.max_tokens is not None and params.max_tokens > 10
            assert counters.drafted > 0 or not expects
        return found


@pytest.fixture(scope="module")
def world(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> DraftingEngines:
    return DraftingEngines(adopt_tiny(TINY), tmp_path_factory.mktemp("profiles"))


def check(found: list[DraftedAnswer], expected: list[DraftedAnswer]) -> None:
    """Equal but for the rounding of log-probabilities."""
    assert [replace(one, logprobs=[]) for one in found] == [
        replace(one, logprobs=[]) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        for own, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert own == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "setting"),
    few(
        [*product(METHODS, SETTINGS)],
        *product(["suffix"], SETTINGS),
        *product(["ngram", "compressed_kv"], ["greedy", "penalties", "several"]),
    ),
)
def test_answers_are_those_without_drafts(
    world: DraftingEngines, method: str, setting: str
) -> None:
    check(world.answers(method, SETTINGS[setting]), world.plain(setting))


@pytest.mark.parametrize("seed", range(3))
def test_chunks_that_siblings_fill_are_not_taken_for_each_other(
    world: DraftingEngines, seed: int
) -> None:
    """They share the pages of their prompt, which come last in a chunk that drafts read."""
    params = [replace(SETTINGS["several"], seed=seed)] * len(PROMPTS)
    engine = draft_always(world.engine("compressed_kv"), 0)
    check(ask(engine, PROMPTS, params), ask(world.engine(None), PROMPTS, params))


@pytest.mark.parametrize("setting", ["greedy", "penalties", "several", "short"])
def test_answers_are_the_same_where_a_step_is_launched_ahead(
    world: DraftingEngines, setting: str
) -> None:
    """As on a GPU: accepted tokens are sent while the next step runs."""
    check(world.answers("suffix", SETTINGS[setting], ahead=True), world.plain(setting))


@pytest.mark.parametrize("method", few(["ngram", "suffix", "draft_model"], "ngram", "suffix"))
def test_a_compressed_cache_answers_the_same(world: DraftingEngines, method: str) -> None:
    for setting in ("greedy", "warm", "penalties"):
        found = world.answers(method, SETTINGS[setting], kv_retention=0.5)
        check(found, world.plain(setting, 0.5))


@pytest.mark.parametrize(
    ("method", "apart"),
    few([*product(METHODS, (2, 8))], ("ngram", 8), ("suffix", 8), ("compressed_kv", 8)),
)
def test_an_answer_ends_where_it_would_end_in_the_middle_of_an_accepted_run(
    world: DraftingEngines, method: str, apart: int
) -> None:
    """At places all over an answer: by its length, by a token that stops it, and by a text."""
    params = SETTINGS["greedy"]
    plain = draft_always(world.engine(None))
    whole = ask(plain, PROMPTS[:1], [params])[0]
    accepted, texts = 0, set[str]()
    places = range(15, 49, apart)
    for at in places:
        ends = [
            replace(params, max_tokens=at),
            replace(params, stop_token_ids=(whole.token_ids[at],)),
        ]
        text = plain.codec.decode(whole.token_ids[at : at + 2])
        ends += [replace(params, stop=text)] if text else []
        texts.add(text)
        prompts = [PROMPTS[0]] * len(ends)
        engine = draft_always(world.engine(method))
        check(ask(engine, prompts, ends), ask(world.engine(None), prompts, ends))
        assert engine._speculation is not None
        accepted += engine._speculation.counters.accepted
    assert accepted > 50 * len(places) / 17 and len(texts) > 1


@pytest.mark.parametrize("method", ENGINES)
def test_steps_with_and_without_drafts_mix(world: DraftingEngines, method: str) -> None:
    """Sequences of one step draft different numbers of tokens, or none."""
    params = [SETTINGS[name] for name in ("greedy", "warm", "penalties", "several")]
    expected = ask(world.engine(None), PROMPTS, params)
    engine = draft_always(world.engine(method), 3, 0, 1, 0, 0, 4, 2)
    check(ask(engine, PROMPTS, params), expected)


@pytest.mark.parametrize("method", ENGINES)
def test_preempted_sequences_answer_the_same(world: DraftingEngines, method: str) -> None:
    params = [replace(SETTINGS[name], max_tokens=60) for name in ("greedy", "warm", "bias", "few")]
    expected = ask(world.engine(None), PROMPTS, params)
    layout = world.engine(None).admission.retentions[0].layout
    pages = layout.most_pages(130) + layout.most_pages(60) // 2
    engine = world.engine(
        method, kv_cache_gib=pages * layout.page_bytes(4) / 2**30, max_model_len=130
    )
    found = ask(draft_always(engine), PROMPTS, params)
    assert engine.stats().preemptions > 0
    strip = [[replace(one, usage=None) for one in answers] for answers in (found, expected)]
    check(*strip)
