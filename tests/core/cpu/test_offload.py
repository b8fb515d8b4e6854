"""Engines with host memory behind a small pool: what comes back answers like what was
never away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, PretrainedConfig

from tangram.engine.loop import Engine
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.types import Event, PageMove, Request, SamplingParams
from tests.core.cpu.test_purity import TINY, TINY_LATENT, LonePrompts
from tests.mentions import mentioning, mentions
from tests.small_engines import check_books, drain, run, sealed_state

C = 32
SLIDING = Gemma3TextConfig(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=40,
    query_pre_attn_scalar=16,
    tie_word_embeddings=False,
)
MODELS = {"llama": TINY, "sliding windows": SLIDING, "latents": TINY_LATENT}
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
HISTORIES = [tuple(3 + (i * i * k + i) % 9 for i in range(3 * C + 9 + k)) for k in range(1, 5)]


@pytest.fixture(scope="module", params=[*MODELS, "integers"])
def world(
    request: pytest.FixtureRequest,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> LonePrompts:
    return LonePrompts(
        adopt_tiny(MODELS.get(request.param, TINY)),
        tmp_path_factory.mktemp("profiles"),
        "keydiff",
        kv_cache_dtype="int8" if request.param == "integers" else "auto",
    )


def small(world: LonePrompts, sequences: float, **options: object) -> Engine:
    """An engine whose pool holds so many of the longest sequences, with space for all in host
    memory.
    """
    layout = world.engine().admission.retentions[0].layout
    pages = int(sequences * layout.most_pages(4 * C + 40))
    gib = world.pool_gib(pages + 0.5)
    return world.engine(
        **({"kv_cache_gib": gib, "max_model_len": 4 * C + 40, "kv_offload_gib": 0.01} | options)
    )


def collect_events(
    engine: Engine, prompt: tuple[int, ...], params: SamplingParams = ANSWER
) -> list[Event]:
    """The events of one request on its own."""
    events: list[Event] = []
    engine.submit(Request("one", prompt, params, events.append))
    drain(engine)
    return events


def test_second_turns_come_back_from_host_memory_and_answer_the_same(world: LonePrompts) -> None:
    engine, roomy = small(world, 1.2), world.engine()
    # The raw pages of a tail are dropped here and reused there, where they are rounded.
    near = 1e-5 if world.kv_cache_dtype == "auto" else 0.02
    for turn in range(2):
        for history in HISTORIES:
            prompt = history + turn * (7, 8, 9)
            found, expected = collect_events(engine, prompt), collect_events(roomy, prompt)
            assert [event.token_ids for event in found] == [event.token_ids for event in expected]
            ours, theirs = (
                [log.top for event in each for log in event.logprobs] for each in (found, expected)
            )
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=near, atol=near
            )
    stats, without = engine.stats(), roomy.stats()
    assert stats.restored_tokens >= len(HISTORIES) * 2 * C and without.restored_tokens == 0
    assert stats.cached_tokens >= len(HISTORIES) * 3 * C
    assert 0 < stats.host_pages_used <= stats.host_pages_total and stats.dropped_spans == 0
    assert stats.host_bytes_in > 0 and stats.host_bytes_out > 0
    kept, state = sealed_state(roomy), sealed_state(engine)
    assert state and all(torch.equal(pages, kept[key]) for key, pages in state.items())


def test_a_crowd_over_a_small_pool_and_a_small_host_memory_answers_the_same(
    world: LonePrompts,
) -> None:
    prompts = [history + fork for history in HISTORIES for fork in ((), (5,) * 20)]
    answer = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    layout = world.engine().admission.retentions[0].layout
    some = world.pool_gib(8 * layout.span_pages)
    engine = small(world, 1.7, max_num_seqs=4, kv_offload_gib=some)
    expected = run(world.engine(), prompts, answer)
    assert run(engine, prompts, answer) == expected
    assert run(engine, prompts[::-1], answer) == expected[::-1]
    stats = engine.stats()
    assert stats.restored_tokens > 0 and stats.dropped_spans > 0


def test_a_cleared_cache_is_forgotten_in_host_memory_too(world: LonePrompts) -> None:
    engine = small(world, 1.2)
    for history in HISTORIES[:2]:
        collect_events(engine, history)
    assert engine.stats().host_pages_used > 0
    engine.clear_cache()
    check_books(engine)
    assert engine.stats().host_pages_used == 0
    assert collect_events(engine, HISTORIES[0])[-1].usage.cached_tokens == 0


def test_what_cannot_be_had_is_refused_with_the_limits(world: LonePrompts) -> None:
    for gib in (1e6, 1e-9):
        with pytest.raises(ConfigError, match=mentioning(f"kv_offload_gib {gib} 0")) as told:
            world.engine(kv_offload_gib=gib)
    _, _, least, *_ = map(float, re.findall(r"\b\d[\d.]*(?:e-\d+)?", str(told.value)))
    assert world.engine(kv_offload_gib=least).stats().host_pages_total > 0


def test_the_log_says_how_much_fits(world: LonePrompts, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tangram"):
        engine = world.engine(kv_offload_gib=0.01)
    pages, layout = engine.stats().host_pages_total, engine.layout
    # Chunks go there with their windows' pages, whatever the length of their sequences.
    tokens = pages * layout.chunk_tokens // layout.span_pages
    assert mentions(caplog.messages[-1], f"0.01 {pages} {tokens:,}")


def test_a_page_is_cleared_behind_what_still_arrives_in_it(
    world: LonePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = world.engine()._runner
    pool = runner.pool.view(torch.uint8)

    def arrive(moves: Sequence[PageMove], *, awaited: bool) -> None:
        assert awaited
        pool[1] = 7

    monkeypatch.setattr(runner._host, "move", arrive)
    runner.clear(np.array([1], np.int32))
    assert not pool[1].any()
