"""The law of the house: the KV state of a sequence is a function of its tokens and the profile, and
of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

from tangram.compress.profile import SINK_TOKENS
from tangram.compress.scorers import SCORERS
from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.small_engines import LATENT, check_books, profile_file, run, sealed_state, small_engine
from tests.tiny_configs import tiny_config

TINY = LlamaConfig(
    vocab_size=96,
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
TINY_LATENT = DeepseekV3Config(
    **LATENT,
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# Layers with a gated delta rule (Qwen3.5), short convolutions (LFM2), Mamba-2 beside attention
# (Falcon-H1).
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA |= {"num_attention_heads": 4, "num_key_value_heads": 2}  # no column of a page is unused
TINY_DELTA = tiny_config("qwen3_5_text", **DELTA)
TINY_CONVOLUTIONS = tiny_config("lfm2")
TINY_MAMBA = tiny_config(
    "falcon_h1", mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16
)
# Two heads: no column of a page is unused.
# torch rounds sigmoids and GELU otherwise behind the last whole vectors, of 32 numbers: as many
# experts, and widths that are multiples.
TINY_CHUNKS = tiny_config(
    "llama4_text",
    num_key_value_heads=2,
    num_local_experts=32,
    attention_chunk_size=96,
    no_rope_layers=[1, 0, 1, 0],
)
TINY_SHAPES = tiny_config("gemma4_text", num_key_value_heads=2, hidden_size_per_layer_input=64)
C = 32
ANSWER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROPERTY = settings(
    deadline=None, max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck)
)


class LonePrompts:
    """One tiny model and its profile, with the state and the answers that each prompt has when it
    is alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        folder: Path,
        scorer: str,
        chunk_tokens: int = C,
        sink_tokens: int = SINK_TOKENS,
        kv_retention: float = 0.5,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.kv_retention, self.kv_cache_dtype = kv_retention, kv_cache_dtype
        self.loaded, self.scorer, self.chunk_tokens = loaded, scorer, chunk_tokens
        self.profile = profile_file(
            loaded, folder, scorer=scorer, chunk_tokens=chunk_tokens, sink_tokens=sink_tokens
        )
        self.alone = cache(self._alone)

    def engine(self, **options: object) -> Engine:
        return small_engine(
            self.loaded,
            kv_retention=self.kv_retention,
            scorer=self.scorer,
            profile=(self.profile,) if self.kv_retention < 1.0 else (),
            chunk_tokens=self.chunk_tokens,
            **({"kv_cache_dtype": self.kv_cache_dtype} | options),
        )

    def pool_gib(self, pages: float) -> float:
        """The memory of so many pages."""
        admission = self.engine().admission
        layout = admission.retentions[0].layout
        return pages * layout.page_bytes(admission.element_bytes) / 2**30

    def _alone(self, prompt: tuple[int, ...]) -> tuple[list[int], dict[bytes, Tensor]]:
        engine = self.engine()
        return run(engine, [prompt], ANSWER)[0], sealed_state(engine)


@pytest.fixture(
    scope="module",
    params=[
        (TINY, 0.5, "auto"),
        (TINY_LATENT, 0.5, "auto"),
        (TINY, 1.0, "auto"),
        (TINY, 0.5, "int8"),
        (TINY_DELTA, 0.5, "auto"),
        (TINY_CONVOLUTIONS, 1.0, "auto"),
        (TINY_MAMBA, 0.5, "auto"),
        (tiny_config("gemma3n_text"), 0.5, "auto"),
        (TINY_CHUNKS, 0.5, "auto"),
        (TINY_SHAPES, 0.5, "auto"),
    ],
    ids=[
        *("heads", "latents", "uncompressed", "integers"),
        *("delta rule", "convolutions, uncompressed", "mamba"),
        *("shared layers", "chunks", "two shapes"),
    ],
)
def world(
    request: pytest.FixtureRequest,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> LonePrompts:
    config, kv_retention, dtype = request.param
    folder = tmp_path_factory.mktemp("profiles")
    return LonePrompts(
        adopt_tiny(config), folder, "keydiff", kv_retention=kv_retention, kv_cache_dtype=dtype
    )


tokens = st.integers(3, 12)
shared_prefixes = st.lists(tokens, min_size=C - 5, max_size=2 * C + 10)
forks = st.lists(st.lists(tokens, min_size=1, max_size=2 * C), min_size=2, max_size=4)


@PROPERTY
@given(
    prefix=shared_prefixes,
    forks=forks,
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 70),
    pool_sequences=st.floats(1.0, 2.5),
    prefix_caching=st.booleans(),
)
def test_answers_and_sealed_pages_do_not_depend_on_what_else_runs(
    world: LonePrompts,
    prefix: list[int],
    forks: list[list[int]],
    max_num_seqs: int,
    extra_tokens: int,
    pool_sequences: float,
    prefix_caching: bool,
) -> None:
    prompts = [tuple(prefix + fork) for fork in forks]
    largest = max(map(len, prompts)) + 40
    layout = world.engine().admission.retentions[0].layout
    pages = int(pool_sequences * layout.most_pages(largest))
    engine = world.engine(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=C + max_num_seqs + extra_tokens,
        max_model_len=largest,
        kv_cache_gib=world.pool_gib(pages + 0.5),
        enable_prefix_caching=prefix_caching,
    )
    answers = run(engine, prompts, ANSWER)
    state = sealed_state(engine)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, expected_state = world.alone(prompt)
        assert answer == expected
        for key in expected_state.keys() & state.keys():
            assert torch.equal(state[key], expected_state[key])
    engine.clear_cache()
    stats = engine.stats()
    assert (stats.pages_held, stats.pages_cached) == (0, 0)


def test_the_property_above_meets_preemption_and_eviction(world: LonePrompts) -> None:
    prompts = [tuple(3 + (i * k) % 9 for i in range(60 + k)) for k in range(1, 6)]
    layout = world.engine().admission.retentions[0].layout
    pages = layout.most_pages(110) + layout.most_pages(100) // 2
    engine = world.engine(kv_cache_gib=world.pool_gib(pages), max_model_len=110)
    answers = run(engine, prompts, ANSWER)
    assert engine.stats().preemptions > 0
    assert answers == [world.alone(prompt)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("scorer", "sink_tokens"),
    [*((name, SINK_TOKENS) for name in SCORERS if name != "fastkvzip"), ("kvzip", 2), ("kvzip", 0)],
)
def test_a_chunk_that_decode_completed_is_sealed_like_a_prefilled_one(
    scorer: str,
    sink_tokens: int,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path: Path,
) -> None:
    chunk_tokens = 48  # SnapKV's window takes 32
    # KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there.
    config = LlamaConfig(**(TINY.to_dict() | {"vocab_size": 49152})) if scorer == "kvzip" else TINY
    world = LonePrompts(adopt_tiny(config), tmp_path, scorer, chunk_tokens, sink_tokens)
    prompt = tuple(3 + (i * i) % 9 for i in range(chunk_tokens + 15))
    answer, decoded = world.alone(prompt)
    engine = world.engine()
    run(engine, [prompt + tuple(answer)], ANSWER)
    prefilled = sealed_state(engine)
    shared = decoded.keys() & prefilled.keys()
    assert len(shared) == 2, "the answer completes the second chunk"
    for key in shared:
        assert torch.equal(decoded[key], prefilled[key])


def test_a_chunk_that_decode_filled_is_sealed_when_there_is_time(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    """At ρ 1.0. Nobody gets it before, and what comes meanwhile goes first."""
    world = LonePrompts(adopt_tiny(TINY), tmp_path, "keydiff", kv_retention=1.0)
    prompt = tuple(3 + (i * i) % 9 for i in range(C + 15))
    engine, events = world.engine(), list[Event]()
    engine.submit(Request("first", prompt, ANSWER, events.append))
    while engine.busy:
        engine.step()
        check_books(engine)
    answer = [token for event in events for token in event.token_ids]
    conversation = (*prompt, *answer)
    assert len(sealed_state(engine)) == 1, "the chunk of the prompt"
    state, steps = engine.stats(), 0
    assert state.pages_held == 0
    assert (
        run(engine, [prompt[:C]], SamplingParams(max_tokens=1)) and len(sealed_state(engine)) == 2
    )
    while engine.step():
        steps += 1
    assert steps == 0, "drain has sealed it"
    other = world.engine()
    run(other, [conversation], ANSWER)
    prefilled, decoded = sealed_state(other), sealed_state(engine)
    assert decoded.keys() <= prefilled.keys()
    assert all(torch.equal(decoded[key], prefilled[key]) for key in decoded)
    before = engine.stats().cached_tokens
    assert run(engine, [conversation], ANSWER) == [world.alone(conversation)[0]]
    assert engine.stats().cached_tokens - before >= 2 * C


def test_a_prefix_hit_gives_what_a_miss_gives(world: LonePrompts) -> None:
    history = tuple(3 + (i * 5) % 9 for i in range(3 * C + 20))
    engine = world.engine()
    first = run(engine, [history], ANSWER)[0]
    follow_up = (*history, *first, 7, 8, 9)
    warm = run(engine, [follow_up], ANSWER)[0]
    assert engine.stats().cached_tokens >= 4 * C
    assert warm == world.alone(follow_up)[0]


def test_forked_conversations_do_not_disturb_each_other(world: LonePrompts) -> None:
    history = tuple(3 + (i * 5) % 9 for i in range(2 * C + 9))
    forks = [(*history, 4, 4, 4), (*history, 9, 8, 7)]
    engine = world.engine()
    run(engine, [history], ANSWER)
    assert run(engine, forks, ANSWER) == [world.alone(fork)[0] for fork in forks]


def test_salts_share_nothing(world: LonePrompts) -> None:
    prompt = tuple(3 + (i * 5) % 9 for i in range(3 * C))
    engine = world.engine()
    salted = [run(engine, [prompt], ANSWER, cache_salt=salt)[0] for salt in ("", "a", "b")]
    assert engine.stats().cached_tokens == 0
    assert salted == [world.alone(prompt)[0]] * 3
    run(engine, [prompt], ANSWER, cache_salt="a")
    assert engine.stats().cached_tokens >= 2 * C
