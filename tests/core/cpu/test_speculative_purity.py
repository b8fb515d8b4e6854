"""The law of `test_purity.py` for engines that draft: what was drafted leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PretrainedConfig

from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import SamplingParams
from tests.core.cpu.test_purity import ANSWER, TINY, C, forks, shared_prefixes
from tests.small_engines import profile_file, run, sealed_state, small_engine
from tests.speculation import METHODS, SHARE, draft_always, few, methods_of

FEW = settings(
    deadline=None, max_examples=5, derandomize=True, suppress_health_check=list(HealthCheck)
)
# Few tokens are likely, so that lookups are sometimes right.
WARM = SamplingParams(
    temperature=0.6, seed=4, logit_bias={7: 15.0, 8: 15.0}, max_tokens=40, ignore_eos=True
)
# The ratios at which a method serves.
SERVED = [
    (method, retention)
    for method in METHODS
    for retention in ((1.0,) if method == "compressed_kv" else (1.0, 0.5))
]


SOME_SERVED = few(SERVED, ("ngram", 1.0), ("suffix", 0.5), ("compressed_kv", 1.0))


class PureEngines:
    """Engines of one tiny model over one profile."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded, self.profile = loaded, profile_file(loaded, folder)
        self.methods = methods_of(loaded, folder / "drafts")
        self.alone = cache(self._alone)

    def engine(
        self,
        method: str,
        retention: float,
        *,
        drafts: bool,
        kv_cache_gib: float = 0.01,
        **options: Any,
    ) -> Engine:
        """Without `drafts` it stores what one with drafts stores: in the same places, the same."""
        plain = not drafts and method != "compressed_kv"
        shared = SHARE if drafts and method == "draft_model" else 0.0
        engine = small_engine(
            self.loaded,
            kv_retention=retention,
            profile=(self.profile,),
            speculative_config=None if plain else self.methods[method],
            kv_cache_gib=kv_cache_gib + shared,
            **options,
        )
        return engine if plain else draft_always(engine, *(() if drafts else (0,)))

    def _alone(
        self, method: str, retention: float, prompt: tuple[int, ...]
    ) -> tuple[list[int], dict[bytes, Tensor]]:
        engine = self.engine(method, retention, drafts=False)
        return run(engine, [prompt], ANSWER)[0], sealed_state(engine)


@pytest.fixture(scope="module")
def world(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> PureEngines:
    return PureEngines(adopt_tiny(TINY), tmp_path_factory.mktemp("profiles"))


def counters_of(engine: Engine) -> tuple[int, int]:
    """Accepted and refused tokens."""
    assert engine._speculation is not None
    counted = engine._speculation.counters
    return counted.accepted, counted.drafted - counted.accepted


@pytest.mark.parametrize(
    ("method", "retention"), few(SERVED, ("ngram", 0.5), ("compressed_kv", 1.0))
)
@FEW
@given(
    prefix=shared_prefixes,
    forks=forks,
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 70),
    pool_sequences=st.floats(1.0, 2.5),
    prefix_caching=st.booleans(),
)
def test_answers_and_sealed_pages_are_those_without_drafts(
    world: PureEngines,
    method: str,
    retention: float,
    prefix: list[int],
    forks: list[list[int]],
    max_num_seqs: int,
    extra_tokens: int,
    pool_sequences: float,
    prefix_caching: bool,
) -> None:
    """In any batch, through preemption and eviction, bit for bit."""
    prompts = [tuple(prefix + fork) for fork in forks]
    largest = max(map(len, prompts)) + 40
    layout = world.engine(method, retention, drafts=False).admission.retentions[0].layout
    pages = int(pool_sequences * layout.most_pages(largest))
    engine = world.engine(
        method,
        retention,
        drafts=True,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=C + max_num_seqs + extra_tokens,
        max_model_len=largest,
        kv_cache_gib=(pages + 0.5) * layout.page_bytes(4) / 2**30,
        enable_prefix_caching=prefix_caching,
    )
    answers = run(engine, prompts, ANSWER)
    state = sealed_state(engine)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, expected_state = world.alone(method, retention, prompt)
        assert answer == expected
        for key in expected_state.keys() & state.keys():
            assert torch.equal(state[key], expected_state[key])
    engine.clear_cache()
    stats = engine.stats()
    assert (stats.pages_held, stats.pages_cached) == (0, 0)


@pytest.mark.parametrize(("method", "retention"), SOME_SERVED)
@pytest.mark.parametrize("params", [ANSWER, WARM], ids=["greedy", "warm"])
def test_the_cache_holds_what_it_holds_without_drafts(
    world: PureEngines, method: str, retention: float, params: SamplingParams
) -> None:
    """The same links, tails too; sealed pages bit for bit, tails but for rounding."""
    prompts = [tuple(3 + (at * k) % 9 for at in range(20 + 17 * k)) for k in range(1, 5)]
    found, links = [], []
    for drafts in (True, False):
        engine = world.engine(method, retention, drafts=drafts)
        found.append((run(engine, prompts, params), sealed_state(engine)))
        nodes = engine._scheduler.cache.prefix.nodes
        links.append({key: engine._runner.pool[node.pages] for key, node in nodes.items()})
        if drafts:
            accepted, refused = counters_of(engine)
            assert accepted > 10 and refused > 0
    (answers, sealed), (expected, expected_sealed) = found
    assert answers == expected
    assert sealed.keys() == expected_sealed.keys() and len(sealed) >= 8
    assert all(torch.equal(sealed[key], expected_sealed[key]) for key in sealed)
    assert links[0].keys() == links[1].keys() and len(links[0]) > len(sealed)
    for key, pages in links[0].items():
        torch.testing.assert_close(pages, links[1][key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("method", "retention"), SOME_SERVED)
def test_a_prefix_hit_gives_what_a_miss_gives(
    world: PureEngines, method: str, retention: float
) -> None:
    """The answer is the history of the next question: its chunks and its tail are found."""
    engine = world.engine(method, retention, drafts=True)
    history = tuple(3 + (at * 5) % 9 for at in range(3 * C + 20))
    first = run(engine, [history], ANSWER)[0]
    for follow_up in ((*history, *first, 7, 8, 9), (*history, *first[:21], 9, 8, 7)):
        cached = engine.stats().cached_tokens
        warm = run(engine, [follow_up], ANSWER)[0]
        assert engine.stats().cached_tokens - cached >= 3 * C
        assert warm == world.alone(method, retention, follow_up)[0]


def test_the_property_above_meets_preemption(world: PureEngines) -> None:
    prompts = [tuple(3 + (at * k) % 9 for at in range(60 + k)) for k in range(1, 6)]
    for method, retention in (("suffix", 0.5), ("compressed_kv", 1.0)):
        layout = world.engine(method, retention, drafts=False).admission.retentions[0].layout
        pages = layout.most_pages(110) + layout.most_pages(100) // 2
        engine = world.engine(
            method,
            retention,
            drafts=True,
            kv_cache_gib=pages * layout.page_bytes(4) / 2**30,
            max_model_len=110,
        )
        answers = run(engine, prompts, ANSWER)
        assert engine.stats().preemptions > 0 and counters_of(engine)[0] > 10
        assert answers == [world.alone(method, retention, prompt)[0] for prompt in prompts]
