"""Whole engines, step by step: what the Triton kernels leave in the pool and answer is what the
torch ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
)

from bench.bare_tokenizer import load_tokenizer
from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.engine.loop import Engine
from tangram.engine.passes.device_tables import DeviceTables
from tangram.kernels.interface import KernelChoice, KvPool, PoolKernels
from tangram.kernels.reference_kernels import ReferenceKernels
from tangram.model.load import LoadedModel
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Schedule
from tangram.types import Event, Geometry, Request, SamplingParams
from tangram_lab.baselines.compared_schedules import parse_schedule
from tests.interpreter import interpreter_few
from tests.small_engines import (
    LATENT,
    answer,
    drain,
    profile_file,
    scores_of,
    small_engine,
    tiny_model,
)
from tests.tiny_configs import tiny_config

# What torch's compiler says of torch itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
LLAMA = LlamaConfig(**BASE)
GPT_OSS = GptOssConfig(**BASE, **SLIDING, num_local_experts=2, num_experts_per_tok=1)
GEMMA_2 = Gemma2Config(**BASE, **SLIDING, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)
GEMMA_3 = Gemma3TextConfig(**BASE, **SLIDING, query_pre_attn_scalar=16, tie_word_embeddings=False)
GEMMA_3N = tiny_config(
    "gemma3n_text",
    **{name: BASE[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
    num_hidden_layers=4,
    layer_types=SLIDING["layer_types"] * 2,
    sliding_window=20,
)
GEMMA_4 = tiny_config("gemma4_text", head_dim=16, global_head_dim=32, sliding_window=20)
LLAMA_4 = tiny_config("llama4_text", head_dim=16, num_key_value_heads=2)
# KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there.
LLAMA_WORDS = LlamaConfig(**(BASE | {"vocab_size": 49152}))
CHUNK = 16
LAYOUT = Layout.lay_out_uncompressed(
    Geometry(2, 2, 4, 16, 96, 64, (None, None)),
    chunk_tokens=CHUNK,
    page_tokens=4,
    heads_per_page=2,
    max_tokens=64,
)
# Three chunks are prefilled, tails beside them, and the second answer fills a fourth.
PROMPTS = [[5, 9, 17], [(7 * i) % 90 + 3 for i in range(28)], [(i * i) % 90 + 3 for i in range(40)]]
ANSWER = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)


def on_torch(pool: KvPool) -> PoolKernels:
    return ReferenceKernels(pool)


def on_triton(pool: KvPool, schedule: str = "aot+ctas=16+tile=16+min=16") -> PoolKernels:
    """Short as they are, heads are split."""
    from tangram.kernels.triton.triton_kernels import TritonKernels

    return TritonKernels(pool, parse_schedule(schedule))


def both(
    loaded: LoadedModel, options: dict[str, Any], triton: KernelChoice = on_triton
) -> list[Engine]:
    """Over pools of NaN, of which nothing may be seen: memory holds what was in it before."""
    engines = [small_engine(loaded, kernels, **options) for kernels in (on_torch, triton)]
    for engine in engines:
        engine._runner.pool.fill_(torch.nan)
    return engines


def submit_all(
    engine: Engine, prompts: Sequence[list[int]], scorers: Sequence[str | None] = ()
) -> list[list[Event]]:
    """The events of each prompt, as they will come; `scorers` are theirs, if not the default."""
    events: list[list[Event]] = [[] for _ in prompts]
    for number, (prompt, scorer) in enumerate(zip_longest(prompts, scorers)):
        take = events[number].append
        engine.submit(Request(str(number), tuple(prompt), ANSWER, take, kv_scorer=scorer))
    return events


def log_probabilities(events: list[Event]) -> Tensor:
    return torch.tensor(
        [[value for _, value in step.top] for event in events for step in event.logprobs]
    )


LATENTS = DeepseekV3Config(
    **LATENT,
    **{name: value for name, value in BASE.items() if name != "head_dim"}
    | {"num_key_value_heads": 4},
)
CASES: dict[str, tuple[PretrainedConfig, str, float]] = {
    "llama": (LLAMA, "keydiff", 0.5),
    "llama, uncompressed": (LLAMA, "keydiff", 1.0),
    "llama, another scorer": (LLAMA, "expected_attention", 0.5),
    "llama, second pass": (LLAMA_WORDS, "kvzip", 0.5),
    "gpt-oss, windows and sinks": (GPT_OSS, "keydiff", 0.5),
    "gpt-oss, windows in a second pass": (
        GptOssConfig(**(GPT_OSS.to_dict() | {"vocab_size": 49152})),
        "kvzip",
        0.5,
    ),
    "gemma 2, softcap": (GEMMA_2, "keydiff", 0.5),
    "gemma 3": (GEMMA_3, "keydiff", 0.5),
    "gemma 3n, keys of other layers": (GEMMA_3N, "keydiff", 0.5),
    "gemma 4, heads of two shapes": (GEMMA_4, "keydiff", 0.5),
    "llama 4, chunks": (LLAMA_4, "keydiff", 0.5),
    "latents": (LATENTS, "keydiff", 0.5),
    "latents, uncompressed": (LATENTS, "keydiff", 1.0),
}


@pytest.fixture(scope="module")
def models(device: torch.device) -> dict[int, LoadedModel]:
    tokenizer = load_tokenizer("smollm2")
    configs = {id(config): config for config, _, _ in CASES.values()}
    return {key: tiny_model(config, tokenizer, device) for key, config in configs.items()}


def options_of(case: str, loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    _, scorer, retention = CASES[case]
    options: dict[str, Any] = {
        "kv_retention": retention,
        "scorer": scorer,
        "chunk_tokens": CHUNK,
        "max_num_seqs": 3,
        "kv_cache_gib": 1e-3,
        "max_model_len": 100,
        "max_num_batched_tokens": 50,
    }
    if retention < 1:
        options["profile"] = (profile_file(loaded, folder, scorer=scorer, chunk_tokens=CHUNK),)
    return options


def in_step(
    engines: Sequence[Engine], prompts: Sequence[list[int]], scorers: Sequence[str | None] = ()
) -> None:
    """Both engines answer, in the steps of the second, and are compared after every one."""
    engines[0]._scheduler.passes_apart = engines[1]._runner.passes.takes_apart
    expected, found = (submit_all(engine, prompts, scorers) for engine in engines)
    while any(worked := [engine.step() for engine in engines]):
        assert all(worked)
        pools = [engine._runner.pool for engine in engines]
        torch.testing.assert_close(pools[1], pools[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not pools[0].isnan().all()
    for ours, theirs in zip(found, expected, strict=True):
        assert [event.token_ids for event in ours] == [event.token_ids for event in theirs]
        torch.testing.assert_close(
            log_probabilities(ours), log_probabilities(theirs), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize(
    "case",
    interpreter_few(
        list(CASES),
        "llama, another scorer",
        "gpt-oss, windows in a second pass",
        "gemma 2, softcap",
        "latents",
    ),
)
def test_every_step_leaves_the_pool_and_the_answers_that_torch_leaves(
    case: str, models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    loaded = models[id(CASES[case][0])]
    options = options_of(case, loaded, tmp_path)
    engines = both(loaded, options)
    in_step(engines, PROMPTS)
    assert engines[0].stats().sealed_chunks == 4


def test_prompts_score_as_on_torch(models: dict[int, LoadedModel], tmp_path: Path) -> None:
    """Beside one whose log-probabilities nobody wants."""
    loaded = models[id(LLAMA)]
    params = [replace(ANSWER, prompt_logprobs=2)] * 3 + [ANSWER]
    asked = list(zip([*PROMPTS, PROMPTS[1]], params, strict=True))
    found = [
        answer(engine, *asked) for engine in both(loaded, options_of("llama", loaded, tmp_path))
    ]
    for prompt, ours, theirs in zip(PROMPTS, found[1], found[0], strict=False):
        scores = [scores_of(events) for events in (ours, theirs)]
        assert [token.token_id for token, _ in scores[0]] == prompt[1:]
        values = [[token.logprob for token, _ in entries] for entries in scores]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


def test_chunks_of_several_scorers_in_one_step_leave_what_torch_leaves(
    models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    """Scores of one are fused; the next waits for a second pass; the last is of a layer."""
    loaded = models[id(LLAMA_WORDS)]
    scorers = ("keydiff", "kvzip", "tova")
    options = options_of("llama, second pass", loaded, tmp_path)
    files = [profile_file(loaded, tmp_path, scorer=name, chunk_tokens=CHUNK) for name in scorers]
    engines = both(loaded, options | {"profile": tuple(files), "max_num_batched_tokens": 100})
    in_step(engines, [PROMPTS[2]] * 3, scorers)
    assert engines[0].stats().sealed_chunks == 6
    fingerprints = {entry.fingerprint for entry in engines[0].admission.retentions}
    assert len(fingerprints) == 4, "three profiles and the whole cache"


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tiny models are in float32, which is not gathered"
)
@pytest.mark.parametrize(
    "case",
    interpreter_few(
        ["llama", "llama, uncompressed", "llama, second pass", "gpt-oss, windows and sinks"],
        "gpt-oss, windows and sinks",
    ),
)
def test_chunks_are_gathered_where_nothing_else_is_asked_of_a_layer(
    case: str, models: dict[int, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tangram.kernels.triton import gathered

    layers, attend = list[int](), gathered.attend

    def count_calls(*arguments: Any, **options: Any) -> None:
        layers.append(options["layer"])
        attend(*arguments, **options)

    monkeypatch.setattr(gathered, "attend", count_calls)
    monkeypatch.setattr(gathered, "LEAST_TOKENS", CHUNK)
    monkeypatch.setattr(gathered, "serves", lambda pool, card: True)
    loaded = models[id(CASES[case][0])]
    options = options_of(case, loaded, tmp_path)
    in_step(both(loaded, options), PROMPTS)
    assert set(layers) == (set() if "gpt-oss" in case else {0, 1}), "sinks and windows follow pages"


@pytest.mark.parametrize(
    "case", interpreter_few(["llama", "gpt-oss, windows and sinks"], "gpt-oss, windows and sinks")
)
def test_rows_that_share_a_prefix_read_it_together(
    case: str, models: dict[int, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sealed chunks and a raw page are shared by three rows."""
    loaded = models[id(CASES[case][0])]
    served: list[int] = []
    packed = Schedule.plan

    def see_plan(schedule: Schedule, *arguments: Any) -> WorkPlan:
        plan = packed(schedule, *arguments)
        served.append(int(plan.rows_served.max()))
        return plan

    monkeypatch.setattr(Schedule, "plan", see_plan)
    packing = partial(on_triton, schedule="packing:naive+ctas=8+tile=16+min=16")
    options = options_of(case, loaded, tmp_path) | {"page_tokens": 4}
    engines = both(loaded, options, packing)
    for engine in engines:  # leaves the prefix in the cache
        engine.submit(Request("first", tuple(PROMPTS[2]), ANSWER, lambda event: None))
        while engine.busy:
            engine.step()
    in_step(engines, [[*PROMPTS[2][:38], number] for number in (3, 4, 5)])
    assert max(served) == 3


@pytest.mark.parametrize(
    "case",
    interpreter_few(
        [
            "llama",
            "llama, uncompressed",
            "llama, second pass",
            "gpt-oss, windows and sinks",
            "latents",
        ],
        "llama, second pass",
        "gpt-oss, windows and sinks",
        "latents",
    ),
)
def test_an_fp8_cache_holds_what_the_specification_holds(
    case: str, models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    """But for roundings: an entry may be its neighbour in E4M3, which is an eighth of it away."""
    loaded = models[id(CASES[case][0])]
    options = options_of(case, loaded, tmp_path) | {"kv_cache_dtype": "fp8"}
    engines = both(loaded, options)
    for engine in engines:
        submit_all(engine, PROMPTS[2:])
    for _ in range(3):
        for engine in engines:
            engine.step()
        expected, found = (engine._runner.pool.float().cpu() for engine in engines)
        assert engines[0]._runner.pool.dtype is torch.float8_e4m3fn and expected.any()
        apart = (found - expected).abs() > 0.14 * expected.abs() + 0.02
        assert apart.float().mean() < 0.01


def test_tables_on_the_device_follow_what_is_written(device: torch.device) -> None:
    """Pages are taken, sealed chunks replace raw tails in the same places, and a cached prefix is
    entered.
    """
    full = Retention(1.0, LAYOUT, "full")
    cache = CacheManager([full], total_pages=200, max_sequences=2, prefix_caching=True)
    on_device, keys = DeviceTables(cache, device), ChunkKeys(full, "")
    tokens = np.arange(40)
    for _ in range(2):
        seq = cache.admit(keys, tokens, 60)
        assert seq is not None
        while seq.computed_tokens < 32:
            cache.grow(seq, CHUNK - 1)
            cache.seal(seq)
            cache.commit(seq, tokens)
            assert cache.extend(seq, 60)
        cache.grow(seq, 8)
        assert on_device.flat().tolist() == cache.tables.ravel().tolist()


def test_sealing_takes_the_fused_form_of_a_scorer_by_its_name(
    models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    loaded, shapes = models[id(LLAMA)], list[torch.Size]()

    def first_tokens_first(keys: Tensor) -> Tensor:
        shapes.append(keys.shape)
        return -torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device).expand(
            keys.shape[:3]
        )

    def choose(pool: KvPool) -> PoolKernels:
        serving = ReferenceKernels(pool)
        serving.fused_scores = {"keydiff": first_tokens_first}
        return serving

    engine = small_engine(
        loaded, choose, **options_of("llama", loaded, tmp_path) | {"max_num_batched_tokens": 100}
    )
    shapes.clear()  # a GPU's engine has rehearsed
    submit_all(engine, [PROMPTS[2], PROMPTS[2][::-1]])
    engine.step()
    assert shapes == [(4, 2, CHUNK, 16)] * 2, "all chunks of a step together"


@pytest.mark.parametrize("case", interpreter_few(["llama", "gemma 3"]))
def test_what_comes_back_from_host_memory_beside_other_steps_answers_the_same(
    case: str, models: dict[int, LoadedModel], tmp_path: Path
) -> None:
    loaded = models[id(CASES[case][0])]
    options = options_of(case, loaded, tmp_path)
    roomy = small_engine(loaded, on_triton, **options)
    layout = roomy.admission.retentions[0].layout
    pool = (layout.most_pages(70) * 5 // 4 + 0.5) * layout.page_bytes(4) / 2**30
    tight = {"max_model_len": 70, "kv_cache_gib": pool, "kv_offload_gib": 1e-3}
    tight_engine = small_engine(loaded, on_triton, **(options | tight))
    histories = [[(i * i * k + i) % 90 + 3 for i in range(35 + k)] for k in range(1, 4)]
    for turn in range(2):
        prompts = [history + turn * [5, 9] for history in histories]
        found, expected = submit_all(tight_engine, prompts), submit_all(roomy, prompts)
        for engine in (tight_engine, roomy):
            drain(engine)
        for ours, theirs in zip(found, expected, strict=True):
            assert [event.token_ids for event in ours] == [event.token_ids for event in theirs]
            torch.testing.assert_close(
                log_probabilities(ours), log_probabilities(theirs), rtol=1e-3, atol=1e-3
            )
    assert tight_engine.stats().restored_tokens > 0 and roomy.stats().restored_tokens == 0
