"""Models in which some layers carry a state instead of KV entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from tangram.cache.keys import ChunkKeys, state_key
from tangram.cache.prefix import Link
from tangram.cache.step import Row
from tangram.engine.loop import Engine
from tangram.errors import ConfigError, ModelError
from tangram.model.load import LoadedModel
from tangram.model.recurrent import PassStates
from tangram.types import SamplingParams
from tests.core.cpu.test_purity import DELTA, TINY_CONVOLUTIONS, TINY_DELTA, TINY_MAMBA, LonePrompts
from tests.families import continuations, spread_weights
from tests.mentions import mentioning, mentions
from tests.small_engines import check_books, run, sealed_state, small_engine
from tests.tiny_configs import tiny_config

C = 32
ANSWER = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SMALL: dict[str, Any] = {"max_position_embeddings": 2048}
MIXERS = {
    "delta rule": tiny_config("qwen3_5_text", **SMALL, **DELTA),
    "convolutions": tiny_config("lfm2", **SMALL),
    "mamba": tiny_config("granitemoehybrid", **SMALL),
    "latents": tiny_config("kimi_linear", **SMALL, linear_head_dim=16, linear_num_heads=4),
}

LONGEST = dict.fromkeys(MIXERS, 300) | {"delta rule": 1500}


def snapshots(engine: Engine) -> list[bytes]:
    """The keys of the chunks behind which states are kept."""
    nodes = engine._scheduler.cache.prefix.nodes.values()
    return [node.parent.key for node in nodes if node.link is Link.STATE and node.parent]


@pytest.mark.parametrize("name", MIXERS)
def test_tokens_are_those_of_transformers_together_again_and_alone(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny(MIXERS[name])
    spread_weights(loaded.model)
    prompts = [
        tuple((7 * at * (k + 1) + at * at) % 90 + 3 for at in range(length))
        for k, length in enumerate([3, 17, 33, 64, 65, 130, 200, LONGEST[name]])
    ]
    expected, lead = continuations(loaded.model, prompts, 20)
    assert lead > 1e-4, "a near-tie decides nothing: choose other prompts"
    engine = small_engine(loaded, max_model_len=1600, kv_cache_gib=0.1)
    assert run(engine, prompts, ANSWER) == expected
    before = engine.stats().cached_tokens
    assert run(engine, prompts, ANSWER) == expected
    reused = sum((len(prompt) - 1) // C * C for prompt in prompts)
    assert engine.stats().cached_tokens - before == reused
    for prompt, answer in list(zip(prompts, expected, strict=True))[1::2]:
        assert run(small_engine(loaded, max_model_len=1600), [prompt], ANSWER) == [answer]


@pytest.mark.parametrize("name", MIXERS)
def test_chunks_that_go_through_a_mixer_together_leave_what_each_alone_leaves(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    """Also behind a chunk whose state is kept, which ends a call."""
    loaded = adopt_tiny(MIXERS[name])
    spread_weights(loaded.model)
    shared = [(at * at) % 90 + 3 for at in range(3 * C)]
    prompts = [[*shared, *range(number, 90)] for number in (3, 5, 7)] + [shared * 3]
    engines = [small_engine(loaded, max_num_batched_tokens=8 * C) for _ in range(2)]
    memory = engines[1]._runner.passes.states
    assert memory is not None
    memory._joined, of_pass, calls = 4 * C, memory.of_pass, Counter[int]()

    def see(rows: Sequence[Row], width: int) -> PassStates:
        states = of_pass(rows, width)
        calls.update(part.tokens.stop - part.tokens.start for part in states.parts)
        return states

    memory.of_pass = see  # type: ignore[method-assign]
    for prompt in prompts:
        expected, found = (run(engine, [prompt], ANSWER) for engine in engines)
        assert found == expected
    assert calls[2 * C] and calls[4 * C] and not calls[5 * C]
    kept = [sealed_state(engine) for engine in engines]
    assert kept[0].keys() == kept[1].keys() and snapshots(engines[0]) == snapshots(engines[1])
    for key, pages in kept[0].items():
        torch.testing.assert_close(kept[1][key], pages, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.fixture(scope="module")
def world(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> LonePrompts:
    return LonePrompts(adopt_tiny(TINY_DELTA), tmp_path_factory.mktemp("profiles"), "keydiff")


def test_a_second_turn_computes_its_own_tokens_and_a_chunk_at_most(world: LonePrompts) -> None:
    engine = world.engine()
    history = [3 + (at * at) % 9 for at in range(6 * C + 7)]
    for turn in range(3):
        (answer,) = run(engine, [history], ANSWER)
        before = engine.stats()
        history = [*history, *answer, *range(3, 12 + turn)]
        run(engine, [history], SamplingParams(max_tokens=1))
        stats = engine.stats()
        computed = len(history) - (stats.cached_tokens - before.cached_tokens)
        assert computed <= C + 9 + turn + 1


def test_states_are_kept_where_prompts_may_go_on_and_nowhere_else(world: LonePrompts) -> None:
    engine = world.engine(max_num_batched_tokens=40)
    chunks = 12
    prompt = [3 + (at * 5) % 9 for at in range(chunks * C + 5)]
    long = SamplingParams(temperature=0.0, max_tokens=C * 3, ignore_eos=True)
    (answer,) = run(engine, [prompt], long)
    check_books(engine)
    whole = np.asarray([*prompt, *answer])
    keys = engine._scheduler.cache.prefix.nodes
    cache = engine._scheduler.cache
    sequence = ChunkKeys(engine.admission.retentions[0], "")
    kept = [n for n in range(1, chunks + 4) if state_key(sequence.after(n, whole)) in keys]
    assert kept == [chunks, chunks + 3], "those that decode passed are dropped"
    assert len(snapshots(engine)) == 2 and cache.state_pages > 1


def test_a_prompt_that_leaves_another_within_it_finds_a_state_the_second_time(
    world: LonePrompts,
) -> None:
    engine = world.engine()
    shared = [3 + (at * 5) % 9 for at in range(4 * C)]
    forks = [[*shared, *[token] * (2 * C)] for token in (3, 4, 5)]
    cached = []
    for fork in forks:
        before = engine.stats().cached_tokens
        assert run(engine, [fork], ANSWER) == [world.alone(tuple(fork))[0][:20]]
        cached.append(engine.stats().cached_tokens - before)
    assert cached == [0, 0, 4 * C], "the second leaves a state where the third goes on"
    assert engine.stats().lost_stateless == 4 * C
    assert engine.stats().lost_evicted == 0


def test_scorers_undo_the_rotation_of_layers_that_attend(
    world: LonePrompts, tmp_path: Path
) -> None:
    other = LonePrompts(world.loaded, tmp_path, "expected_attention")
    prompts = [tuple(3 + (at * k) % 9 for at in range(70 + k)) for k in range(1, 4)]
    assert run(other.engine(), prompts, ANSWER) == [other.alone(one)[0][:20] for one in prompts]


def test_states_that_left_for_host_memory_come_back_with_their_chunks(world: LonePrompts) -> None:
    layout = world.engine().admission.retentions[0].layout
    state_pages = world.engine()._scheduler.cache.state_pages
    prompts = [tuple(3 + (at * at * k + at) % 9 for at in range(3 * C + k)) for k in range(1, 6)]
    pages = layout.most_pages(4 * C) + 2 * state_pages
    gib = world.pool_gib(pages + 0.5)
    engine = world.engine(kv_cache_gib=gib, max_model_len=4 * C, kv_offload_gib=0.01)
    expected = [[world.alone(prompt)[0] for prompt in prompts]] * 2
    short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for answers in expected:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert run(engine, [prompt], short) == [answer[:8]]
            check_books(engine)
    stats = engine.stats()
    assert stats.restored_tokens > 0 and stats.cached_tokens >= 4 * 3 * C


def test_pages_that_held_a_state_are_zeros_before_they_hold_entries(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    """The bytes of float32 may read as NaN in 16 bits."""
    loaded = adopt_tiny(TINY_DELTA, dtype=torch.bfloat16)
    engine = small_engine(loaded, dtype="bfloat16")
    cache, pool = engine._scheduler.cache, engine._runner.pool
    run(engine, [[3 + at % 9 for at in range(3 * C)]], ANSWER)
    held = [node.pages for node in cache.prefix.nodes.values() if node.link is Link.STATE]
    pages = np.concatenate(held)
    assert pool[pages].view(torch.uint8).any()
    engine.clear_cache()
    run(engine, [[5]], SamplingParams(max_tokens=1))
    unused = pages[cache.ledger.references[pages] == 0]
    assert len(unused) and not pool[unused].view(torch.uint8).any()


def test_kvzip_repeats_a_chunk_from_the_state_behind_it(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    config = tiny_config("qwen3_5_text", vocab_size=49152, **DELTA)
    world = LonePrompts(adopt_tiny(config), tmp_path, "kvzip", 48)
    prompt = tuple(3 + (at * at) % 9 for at in range(48 + 15))
    answer, decoded = world.alone(prompt)
    again = world.engine()
    run(again, [prompt + tuple(answer)], ANSWER)
    prefilled = sealed_state(again)
    shared = decoded.keys() & prefilled.keys()
    assert len(shared) >= 2 and all(torch.equal(decoded[key], prefilled[key]) for key in shared)
    assert run(again, [prompt], ANSWER) == [answer[:20]]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kv_offload_dtype", "int4"),
        ("compile_decode", True),
        ("save_failed_passes", "somewhere"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
    ],
)
def test_what_such_models_do_not_have_is_refused_by_name(
    option: str, value: object, world: LonePrompts
) -> None:
    with pytest.raises(ConfigError, match=mentioning("recurrent")):
        world.engine(kv_offload_gib=0.01, **{option: value})


def test_the_log_says_what_states_take(
    world: LonePrompts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "tangram"):
        world.engine(max_num_seqs=5)
    size = world.loaded.geometry.state_bytes / (1 << 20)
    assert mentions(caplog.text, f"recurrent {size:.2f} MiB 5")


def test_a_mixer_that_drops_its_state_is_refused(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    """Jamba's, over several tokens: each chunk would begin as if nothing had been before it."""
    with pytest.raises(ModelError, match=mentioning("jamba state")):
        adopt_tiny(tiny_config("jamba"))


def test_each_layer_is_described_by_what_it_keeps(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    for config, kept in (
        (TINY_DELTA, (None, None, None, 0)),
        (TINY_CONVOLUTIONS, (None, 0, None, 1)),
    ):
        geometry = adopt_tiny(config).geometry
        assert geometry.kv_layers == kept
        assert geometry.layers == sum(layer is not None for layer in kept)
        assert geometry.state_bytes > 0
    geometry = adopt_tiny(TINY_MAMBA).geometry
    assert geometry.kv_layers == () and geometry.layers == 4 and geometry.state_bytes > 0
