"""Token ids through an engine, the way a test wants them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from tangram.calibrate.measure import Magnitudes, calibrate
from tangram.compress.profile import SINK_TOKENS, ProfileOptions
from tangram.compress.scorers import make_scorer
from tangram.config import EngineConfig, Scope
from tangram.engine.loop import Engine
from tangram.engine.sampling.filters import pick, weights_of
from tangram.engine.sampling.sampler import SampleRow, _change, _mask_forbidden
from tangram.engine.setup.build import engine_of
from tangram.engine.setup.observe import score_source
from tangram.engine.setup.profiles import scorer_spec
from tangram.kernels.interface import KernelChoice
from tangram.model.load import LoadedModel, adopt
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Decoding, Schedule
from tangram.types import Event, Request, SamplingParams, TokenLogprob

# What a config with latent attention has besides: entries have 32 + 8 elements.
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def tiny_model(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    """A random model of a config, small enough to run in milliseconds."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="tangram", dtype=torch.float32
        )
    for parameter in model.parameters():
        # The default initialisation makes attention all but uniform, which would hide a wrong mask.
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return adopt(config.model_type, torch.nn.Module.to(model, device, dtype), tokenizer)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    **options: Any,
) -> list[list[int]]:
    """The token ids each prompt is completed with, all submitted at once; the books are checked
    after every step.
    """
    answers: dict[str, list[Event]] = {}
    for number, prompt in enumerate(prompts):
        events = answers.setdefault(str(number), [])
        engine.submit(Request(str(number), tuple(prompt), params, events.append, **options))
    drain(engine)
    return [[token for event in events for token in event.token_ids] for events in answers.values()]


def answer(
    engine: Engine, *asked: tuple[Sequence[int], SamplingParams], before: int = 0
) -> list[list[Event]]:
    """The events of each prompt, all submitted at once; `before` others had names already."""
    events: list[list[Event]] = [[] for _ in asked]
    for number, (prompt, params) in enumerate(asked):
        name = str(before + number)
        engine.submit(Request(name, tuple(prompt), params, events[number].append))
    drain(engine)
    return events


def scores_of(events: Sequence[Event]) -> list[tuple[TokenLogprob, int]]:
    """The prompt's tokens but the first and their ranks, which come with the first event."""
    assert not any(event.prompt_logprobs for event in events[1:])
    return [entry for part in events[0].prompt_logprobs for entry in part.read()]


def check_books(engine: Engine) -> None:
    """Raise `IntegrityError` unless every page is accounted for, between two steps."""
    engine._between_steps(engine._check_pages)


def drain(engine: Engine) -> None:
    """Step until nothing is left to do, for those that come later either, checking the books."""
    while engine.step():
        check_books(engine)
    assert not engine.busy


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[Decoding]:
    """The batches that are planned from now on, one for each plan."""
    made = list[Decoding]()
    plan = Schedule.plan

    def count(schedule: Schedule, batch: Decoding, *arguments: Any) -> WorkPlan:
        made.append(batch)
        return plan(schedule, batch, *arguments)

    monkeypatch.setattr(Schedule, "plan", count)
    return made


def sealed_state(engine: Engine) -> dict[bytes, Tensor]:
    """What the cache holds of sealed chunks, by the key of their tokens: page contents [pages, Hp,
    2, P, D].
    """
    nodes = engine._scheduler.cache.prefix.nodes.values()
    return {
        node.key: engine._runner.pool[node.pages].clone() for node in nodes if not node.transient
    }


def small_engine(
    loaded: LoadedModel,
    kernels: KernelChoice | None = None,
    *,
    records: bool = False,
    **options: Any,
) -> Engine:
    """An engine of `loaded` and `small_config`. With `records` it notes kept positions."""
    return engine_of(small_config(**options), loaded, kernels, records=records)


def small_config(**options: Any) -> EngineConfig:
    """A chunk of 32 tokens and pages of 8, unless told otherwise."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_retention": 1.0,
        "chunk_tokens": 32,
        "page_tokens": 8,
        "heads_per_page": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "kv_cache_gib": 0.01,
        "scorer": "keydiff",
    }
    return EngineConfig(**(defaults | options))


def probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[R, V] float64: the distribution that `sample` draws from.

    A greedy row has a single 1.
    """
    changed = _change(_mask_forbidden(logits.float(), rows), rows)
    result = torch.zeros(changed.shape, dtype=torch.float64, device=changed.device)
    result.scatter_(1, changed.argmax(dim=-1, keepdim=True), 1.0)
    random = [index for index, row in enumerate(rows) if not row.greedy]
    if random:
        weights = weights_of(pick(changed, random), [rows[i].values for i in random])
        result[random] = weights.double() / weights.sum(dim=-1, keepdim=True)
    return result


def profile_file(
    loaded: LoadedModel,
    folder: Path,
    *,
    scorer: str = "keydiff",
    retention: float = 0.5,
    scope: Scope = "model",
    heads_per_page: int = 2,
    chunk_tokens: int = 32,
    gate: Path | None = None,
    sink_tokens: int = SINK_TOKENS,
) -> str:
    """A profile of a tiny model for `small_engine`, calibrated on random tokens; its path."""
    method = make_scorer(scorer, gate=gate)
    rng = np.random.default_rng(0)
    samples = [rng.integers(3, loaded.geometry.vocab_size, 130).tolist() for _ in range(3)]
    magnitudes = Magnitudes() if loaded.geometry.takes_scales else None
    options = ProfileOptions(
        loaded.fingerprint,
        loaded.geometry.full_layers,
        scorer_spec(method),
        scope,
        chunk_tokens,
        8,
        heads_per_page,
        sink_tokens=sink_tokens,
        window_tokens=2,
    )
    profile = calibrate(
        score_source(loaded, method, chunk_tokens=chunk_tokens, magnitudes=magnitudes),
        samples,
        options,
        [retention],
        max_positions=loaded.geometry.max_positions,
        source="random tokens",
        magnitudes=magnitudes,
    )[0]
    path = folder / f"{scorer}.{scope}.{retention}.json"
    profile.save(path)
    return str(path)
