"""Latent attention (MLA): what pages hold, which scorers serve it, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from tangram.compress.scorers import SCORERS, ChunkView, make_scorer
from tangram.errors import ConfigError, ModelError
from tangram.kernels import latents
from tangram.kernels.reference import append
from tangram.model.attention import IMPLEMENTATION
from tangram.model.latent import join_entries, latent_heads
from tangram.model.load import LoadedModel, adopt
from tangram.model.modules import derive, remake
from tangram.model.quantized import quantize
from tangram.sizing.cache_size import kv_size
from tangram.types import Event, Request, SamplingParams
from tests.core.cpu.test_purity import TINY_LATENT
from tests.core.cpu.test_quantized import needs_products
from tests.mentions import mentioning, mentions
from tests.paged import make_batch
from tests.small_engines import GREEDY, drain, profile_file, run, small_engine
from tests.speculation import draft_always

# Layers enough for budgets to differ.
CONFIG = DeepseekV3Config(**(TINY_LATENT.to_dict() | {"num_hidden_layers": 4}))
PROMPTS = [[5, 9, 17, 3], list(range(3, 93)), [(7 * i) % 90 + 3 for i in range(150)]]


@pytest.fixture(scope="module")
def tiny(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(CONFIG)


def test_size_and_log_say_what_is_held(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """One vector of 32 + 8 elements for each token and layer."""
    with caplog.at_level(logging.INFO, "tangram"):
        engine = small_engine(tiny, kv_cache_gib=0.001)
    size = kv_size(
        CONFIG.to_dict(), 96, dtype="fp32", page_tokens=8, heads_per_page=2, chunk_tokens=32
    )
    pool, (retention,) = engine._runner.pool, engine.admission.retentions
    assert pool[0].nbytes == size.page_bytes == 2 * 8 * 40 * 4
    assert retention.layout.count_held_pages(3, 0) == size.pages
    assert size.pages * size.page_bytes == 96 * size.bytes_per_token == 96 * 4 * 40 * 4
    tokens = len(pool) * 8 // 2
    assert any(mentions(line, f"{len(pool)} {tokens:,} 1.0") for line in caplog.messages)


@pytest.mark.parametrize("retention", [0.25, 0.5])
def test_layers_keep_different_shares_and_all_of_them_rho(
    tiny: LoadedModel, tmp_path: Path, retention: float
) -> None:
    pages = {"heads_per_page": 1, "chunk_tokens": 64}
    path = profile_file(tiny, tmp_path, retention=retention, **pages)
    engine = small_engine(tiny, kv_retention=retention, profile=(path,), **pages)
    layout = engine.admission.retentions[0].layout
    assert len(set(layout.sealed_pages.tolist())) > 1
    assert layout.sealed_pages.sum() <= retention * 4 * layout.chunk_pages
    events: list[Event] = []
    prompt = [(7 * i) % 90 + 3 for i in range(130)]
    once = SamplingParams(temperature=0.0, max_tokens=1)
    engine.submit(Request("one", tuple(prompt), once, events.append))
    drain(engine)
    usage, token_bytes = events[-1].usage, 4 * 40 * 4
    assert usage.kv_bytes_uncompressed == 130 * token_bytes
    assert usage.kv_bytes <= (retention * 128 + 8) * token_bytes


SERVED = [name for name in SCORERS if name not in ("expected_attention", "fastkvzip", "kvzip")]


@pytest.mark.parametrize("scorer", SERVED)
def test_scorers_serve_latents(tiny: LoadedModel, tmp_path: Path, scorer: str) -> None:
    options = {
        "kv_retention": 0.5,
        "scorer": scorer,
        "chunk_tokens": 48,
        "profile": (profile_file(tiny, tmp_path, scorer=scorer, chunk_tokens=48),),
    }
    together = run(small_engine(tiny, **options), PROMPTS)
    assert together == [run(small_engine(tiny, **options), [prompt])[0] for prompt in PROMPTS]
    assert together != run(small_engine(tiny, chunk_tokens=48), PROMPTS)


def test_a_scorer_that_reads_each_head_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=mentioning("expected_attention head latent keydiff")):
        profile_file(tiny, tmp_path, scorer="expected_attention")


@pytest.mark.parametrize("scorer", ["tova", "snapkv"])
def test_scores_by_attention_are_those_of_the_expanded_heads(
    tiny: LoadedModel, scorer: str
) -> None:
    """On average over all heads, since a latent is kept or dropped for all of them."""
    module = tiny.model.get_decoder().layers[1].self_attn  # type: ignore[no-untyped-call]
    heads = latent_heads(module)
    assert heads is not None
    torch.manual_seed(0)
    q, latent, rotary = torch.randn(48, 4, 24), torch.randn(48, 1, 32), torch.randn(48, 1, 8)
    entries, means = join_entries(latent, rotary)
    keys, values = heads.expand(entries[:, 0])
    method = make_scorer(scorer)

    def score(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        view = ChunkView(queries.transpose(0, 1), keys, values, start=0, layer=1, scaling=0.2)
        return method.score(view)[:, :16].mean(0)

    ours = score(heads.absorb(q), entries.transpose(0, 1), means.transpose(0, 1))
    torch.testing.assert_close(ours, score(q, keys, values), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("queries", [40, 13])
def test_a_past_expanded_in_parts_is_attended_to_as_a_whole(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 queries of 40 new tokens: the second pass of KVzip asks for a part."""
    batch = make_batch(1, 1, 1, 40, longest=200, seed=3, value_dim=32)
    place = batch.address(0)
    append(batch.k, batch.v, batch.pool, batch.tables, batch.lengths, *place)
    address = int(place[0][0, 0]), int(place[1][0, 0]), int(batch.lengths[place[2][0, 0]])
    up, new = torch.randn(6, 40, 24), torch.randn(40, 40)
    asked = torch.randn(queries, 6, 24)

    def expand(entries: Tensor) -> tuple[Tensor, Tensor]:
        both = entries @ up
        return both, both[..., :20]

    whole = torch.cat([batch.kv[0][0][0][0], new])
    keys, values = expand(whole)
    mask = torch.ones(queries, len(whole), dtype=torch.bool).tril(len(whole) - queries)
    expected = functional.scaled_dot_product_attention(
        asked.transpose(0, 1), keys, values, attn_mask=mask, scale=0.2
    ).transpose(0, 1)
    for most_bytes in (1 << 29, 7 * 6 * 44 * 4, 1):
        monkeypatch.setattr(latents, "EXPANDED_BYTES", most_bytes)
        out = latents.prefill(
            asked, new, batch.pool, batch.tables, address, expand=expand, scaling=0.2
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["ngram", "compressed_kv"])
def test_drafts_change_no_answer(tiny: LoadedModel, tmp_path: Path, method: str) -> None:
    drafts: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
    options: dict[str, object] = {}
    if method == "compressed_kv":
        drafts["kv_retention"] = 0.5
        options["profile"] = (profile_file(tiny, tmp_path),)
    engine = draft_always(small_engine(tiny, speculative_config=drafts, **options))
    prompts = [[5, 6, 7, 8] * 20, PROMPTS[2]]
    assert run(engine, prompts) == run(small_engine(tiny), prompts)
    speculation = engine.stats().speculation
    assert speculation is not None and speculation.accepted > 0


def test_rows_that_share_a_prefix_read_it_together(tiny: LoadedModel) -> None:
    history = [(7 * i) % 90 + 3 for i in range(200)]
    forks = [[*history, 4 + fork] for fork in range(4)]
    engine = small_engine(tiny)
    run(engine, [history])
    answers = run(engine, forks)
    assert engine.stats().plans.get("packing:thrifty")
    assert answers == [run(small_engine(tiny), [fork])[0] for fork in forks]


def test_an_fp8_cache_takes_a_quarter_of_float32_and_says_much_the_same(tiny: LoadedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)

    def first(dtype: str) -> dict[int, float]:
        events: list[Event] = []
        engine = small_engine(tiny, kv_cache_dtype=dtype)
        assert engine._runner.pool.itemsize == {"fp8": 1, "auto": 4}[dtype]
        engine.submit(Request("one", tuple(PROMPTS[2]), params, events.append))
        drain(engine)
        return dict(events[0].logprobs[0].top)

    plain, fp8 = first("auto"), first("fp8")
    shared = plain.keys() & fp8.keys()
    assert len(shared) >= 3
    assert all(abs(plain[token] - fp8[token]) < 0.5 for token in shared)


def test_integers_of_latents_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_cache_dtype int8 latent fp8")):
        small_engine(tiny, kv_cache_dtype="int8")


class _OtherLinear(nn.Linear):
    """As a quantised checkpoint has it."""


def _quantise(module: nn.Module) -> nn.Module:
    module.kv_b_proj = _OtherLinear(32, 4 * 28, bias=False)
    return module


def _square(module: nn.Module) -> nn.Module:
    def square(kind: Any) -> type[nn.Module]:
        return derive(
            kind, expand_kv=lambda self, one, other: kind.expand_kv(self, one.square(), other)
        )

    return remake(module, square)


@pytest.mark.parametrize(
    ("change", "message"),
    [(_quantise, "model.layers.1.self_attn.kv_b_proj"), (_square, "layer 1 attention")],
)
def test_what_decode_could_not_absorb_is_refused(
    tokenizer: PreTrainedTokenizerBase, change: Callable[[nn.Module], nn.Module], message: str
) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=IMPLEMENTATION)
    layer = model.get_decoder().layers[1]
    layer.self_attn = change(layer.self_attn)
    with pytest.raises(ModelError, match=mentioning(message)):
        adopt("tiny", model, tokenizer)


@needs_products
def test_quantisation_leaves_the_map_that_decode_absorbs(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    dense = {"first_k_dense_replace": 4, "q_lora_rank": 32}
    loaded = adopt_tiny(DeepseekV3Config(**(CONFIG.to_dict() | dense)))
    quantize(loaded.model, "int8")
    module = loaded.model.get_decoder().layers[1].self_attn  # type: ignore[no-untyped-call]
    assert type(module.o_proj) is not nn.Linear and type(module.kv_b_proj) is nn.Linear
    (answer,) = run(small_engine(loaded), PROMPTS[:1], GREEDY)
    loaded.model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPTS[0] + answer[:-1]])
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0]
    assert logits[len(PROMPTS[0]) - 1 :].argmax(-1).tolist() == answer


def test_answers_are_those_of_transformers_where_values_are_wider_than_keys(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    loaded = adopt_tiny(DeepseekV3Config(**(CONFIG.to_dict() | {"v_head_dim": 40})))
    found = run(small_engine(loaded), PROMPTS[:2], GREEDY)
    loaded.model.set_attn_implementation("eager")
    for prompt, answer in zip(PROMPTS, found, strict=False):
        ids = torch.tensor([prompt + answer[:-1]])
        with torch.inference_mode():
            logits = loaded.model(input_ids=ids, use_cache=False).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
