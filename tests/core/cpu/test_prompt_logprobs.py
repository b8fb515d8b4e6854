"""Log-probabilities of a prompt are those of the state that serves: a token's is the one that it
would have had as the answer to the tokens before it, whatever else runs and is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.passes.saved_pass import load_pass
from tangram.engine.replay import replay, replay_config
from tangram.engine.setup.build import engine_of
from tangram.errors import RequestError
from tangram.model.load import LoadedModel
from tangram.types import DraftedTokens, Event, FinishReason, Request, SamplingParams
from tests.fixtures.transformers.make_fixture import TEXT
from tests.small_engines import answer, drain, scores_of, small_engine
from tests.speculation import METHODS, draft_always

from .test_purity import ANSWER, PROPERTY, TINY, C, LonePrompts

SCORED = replace(ANSWER, prompt_logprobs=3)
ALONE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=3)


@pytest.fixture(scope="module", params=[0.5, 1.0])
def world(
    request: pytest.FixtureRequest,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> LonePrompts:
    folder = tmp_path_factory.mktemp("profiles")
    return LonePrompts(adopt_tiny(TINY), folder, "keydiff", kv_retention=request.param)


def make_prompt(length: int, factor: int = 5) -> tuple[int, ...]:
    return tuple(3 + (i * i * factor + i) % 87 for i in range(length))


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def values_of(events: Sequence[Event], prompt: Sequence[int]) -> list[float]:
    """The log-probabilities of the prompt, of which each token but the first is there once."""
    scores = scores_of(events)
    assert [token.token_id for token, _ in scores] == list(prompt[1:])
    return [token.logprob for token, _ in scores]


def answered_values(engine: Engine, prompt: Sequence[int]) -> list[float]:
    """The log-probability of each token as the answer to those before it, forced by a bias."""
    forced = [
        (prompt[:cut], SamplingParams(max_tokens=1, logprobs=0, logit_bias={prompt[cut]: 100.0}))
        for cut in range(1, len(prompt))
    ]
    found = answer(engine, *forced)
    assert [tokens_of(events) for events in found] == [[token] for token in prompt[1:]]
    return [events[0].logprobs[0].logprob for events in found]


@pytest.mark.parametrize("length", [1, 2, C - 1, C, C + 1, C + 2, 2 * C, 3 * C + 9])
def test_a_prompt_scores_as_if_it_were_answered(world: LonePrompts, length: int) -> None:
    prompt = make_prompt(length)
    events = answer(world.engine(), (prompt, SCORED))[0]
    expected = answered_values(world.engine(), prompt)
    assert values_of(events, prompt) == pytest.approx(expected, abs=2e-4)
    assert tokens_of(events) == world.alone(prompt)[0], "the answer is what it was"


def test_alternatives_and_ranks_are_of_the_same_distribution(world: LonePrompts) -> None:
    prompt = make_prompt(2 * C + 5)
    everything = replace(ALONE, prompt_logprobs=20)
    scores = scores_of(answer(world.engine(), (prompt, everything))[0])
    for token, rank in scores:
        values = [value for _, value in token.top]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        if rank <= 20:
            assert token.top[rank - 1] == (token.token_id, token.logprob)
        else:
            assert token.logprob < values[-1]
    assert any(rank > 20 for _, rank in scores)


tokens = st.integers(3, 12)


@PROPERTY
@given(
    prefix=st.lists(tokens, min_size=C - 5, max_size=2 * C + 10),
    forks=st.lists(st.lists(tokens, min_size=1, max_size=2 * C), min_size=2, max_size=4),
    plain=st.integers(0, 3),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 70),
    pool_sequences=st.floats(1.0, 2.5),
    ahead=st.booleans(),
)
def test_scores_do_not_depend_on_what_else_runs(
    world: LonePrompts,
    prefix: list[int],
    forks: list[list[int]],
    plain: int,
    max_num_seqs: int,
    extra_tokens: int,
    pool_sequences: float,
    ahead: bool,
) -> None:
    """Nor does anything else depend on them."""
    prompts = [tuple(prefix + fork) for fork in forks]
    largest = max(map(len, prompts)) + 40
    layout = world.engine().admission.retentions[0].layout
    engine = world.engine(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=C + max_num_seqs + extra_tokens,
        max_model_len=largest,
        kv_cache_gib=world.pool_gib(int(pool_sequences * layout.most_pages(largest)) + 0.5),
    )
    engine.ahead = ahead
    asks = [ANSWER if number == plain else SCORED for number in range(len(prompts))]
    found = answer(engine, *zip(prompts, asks, strict=True))
    for prompt, ask, events in zip(prompts, asks, found, strict=True):
        assert tokens_of(events) == world.alone(prompt)[0]
        if ask is SCORED:
            alone = answer(world.engine(), (prompt, SCORED))[0]
            expected = values_of(alone, prompt)
            assert values_of(events, prompt) == pytest.approx(expected, abs=2e-4)
    engine.clear_cache()
    assert (engine.stats().pages_held, engine.stats().pages_cached) == (0, 0)


def test_a_preempted_prompt_has_each_token_once(world: LonePrompts) -> None:
    prompts = [make_prompt(60 + k, k) for k in range(1, 6)]
    layout = world.engine().admission.retentions[0].layout
    pages = layout.most_pages(110) + layout.most_pages(100) // 2
    engine = world.engine(kv_cache_gib=world.pool_gib(pages), max_model_len=110)
    found = answer(engine, *((prompt, SCORED) for prompt in prompts))
    assert engine.stats().preemptions > 0
    for prompt, events in zip(prompts, found, strict=True):
        expected = values_of(answer(world.engine(), (prompt, ALONE))[0], prompt)
        assert values_of(events, prompt) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_preempted_on_its_way_goes_on_where_it_was(
    world: LonePrompts, prefix_caching: bool, ahead: bool
) -> None:
    prompt = make_prompt(4 * C + 9)
    engine = world.engine(enable_prefix_caching=prefix_caching)
    engine.ahead = ahead
    events = list[Event]()
    engine.submit(Request("0", prompt, ALONE, events.append))
    engine.step()
    engine.step()
    scheduler = engine._scheduler
    scheduler._preempt(scheduler.running[0])
    drain(engine)
    expected = values_of(answer(world.engine(), (prompt, ALONE))[0], prompt)
    assert values_of(events, prompt) == pytest.approx(expected, abs=2e-4)
    computed = scheduler.counters.computed_prompt_tokens
    assert computed == len(prompt) + (0 if prefix_caching else 2 * C)


def test_what_is_cached_is_computed_again_and_stays_good_for_others(world: LonePrompts) -> None:
    prompt, engine = make_prompt(3 * C + 20), world.engine()
    expected = values_of(answer(world.engine(), (prompt, ALONE))[0], prompt)
    answer(engine, (prompt, ANSWER))
    (scored,) = answer(engine, (prompt, SCORED), before=1)
    assert values_of(scored, prompt) == pytest.approx(expected, abs=2e-4)
    assert scored[-1].usage.cached_tokens == 0
    assert scored[0].lost is None, "it was not looked for"
    fresh = world.engine()
    answer(fresh, (prompt, SCORED))
    (reused,) = answer(fresh, (prompt, ANSWER), before=1)
    assert reused[-1].usage.cached_tokens >= 3 * C
    assert tokens_of(reused) == tokens_of(scored) == world.alone(prompt)[0]


def test_a_step_has_logits_of_a_chunk_at_most(
    world: LonePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts, beside one for each sequence."""
    engine = world.engine(max_num_batched_tokens=8 * C)
    sizes, forward = list[int](), engine._runner.passes.forward

    def measure(*arguments: torch.Tensor) -> torch.Tensor:
        sizes.append(len(arguments[-1]))
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._runner.passes, "forward", measure)
    prompts = [make_prompt(3 * C), *(make_prompt(C // 2 + k, k) for k in range(1, 5))]
    found = answer(engine, *((prompt, ALONE) for prompt in prompts), (make_prompt(9, 7), ANSWER))
    for prompt, events in zip(prompts, found, strict=False):
        values_of(events, prompt)
    assert C <= max(sizes) <= C + 6


def test_completions_of_one_prompt_score_it_once(world: LonePrompts) -> None:
    prompt = make_prompt(C + 7)
    events = answer(world.engine(), (prompt, replace(SCORED, n=3)))[0]
    of = [[event for event in events if event.index == index] for index in range(3)]
    assert len(scores_of(of[0])) == len(prompt) - 1
    assert [tokens_of(part) for part in of] == [world.alone(prompt)[0]] * 3
    assert not any(event.prompt_logprobs for part in of[1:] for event in part)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_may_be_all_that_is_asked_for(world: LonePrompts, n: int, ahead: bool) -> None:
    prompt, engine = make_prompt(2 * C + 3), world.engine()
    engine.ahead = ahead
    events = answer(engine, (prompt, replace(ALONE, n=n)))[0]
    assert [event.finish_reason for event in events] == [FinishReason.LENGTH] * n
    assert [(event.token_ids, event.usage.completion_tokens) for event in events] == [((), 0)] * n
    assert len(scores_of(events[:1])) == len(prompt) - 1
    assert (engine.waiting, engine.stats().generated_tokens) == (0, 0)
    longest = engine.max_model_len - 1
    assert len(answer(engine, (make_prompt(longest), ALONE), before=1)[0]) == 1


def test_drafts_change_nothing(world: LonePrompts) -> None:
    prompts = [tuple([3, 4, 5, 6] * 20), make_prompt(C + 9), make_prompt(3 * C, 7)]
    engine = draft_always(world.engine(speculative_config=METHODS["ngram"]))
    found = answer(engine, *((prompt, SCORED) for prompt in prompts))
    assert any(events[-1].usage.drafted != DraftedTokens(0, 0) for events in found)
    for prompt, events in zip(prompts, found, strict=True):
        expected = values_of(answer(world.engine(), (prompt, ALONE))[0], prompt)
        assert values_of(events, prompt) == pytest.approx(expected, abs=2e-4)
        assert tokens_of(events) == world.alone(prompt)[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_within_the_prompt_leaves_nothing(world: LonePrompts, ahead: bool) -> None:
    engine, events, other = world.engine(), list[Event](), list[Event]()
    engine.ahead = ahead
    engine.submit(Request("0", make_prompt(5 * C), SCORED, events.append))
    engine.submit(Request("1", make_prompt(9), ANSWER, other.append))
    engine.step()
    engine.step()
    engine.abort("0")
    drain(engine)
    assert [event.finish_reason for event in events] == [FinishReason.ABORT]
    assert tokens_of(other) == world.alone(make_prompt(9))[0]
    engine.clear_cache()
    assert (engine.stats().pages_held, engine.stats().pages_cached) == (0, 0)


def break_token(loaded: LoadedModel, token: int) -> None:
    """Have the model make NaN of `token`."""
    embedding = loaded.model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    with torch.no_grad():
        embedding.weight[token] = float("nan")


@pytest.mark.parametrize("ahead", [False, True])
def test_unsound_logits_of_a_prompt_end_the_request(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], ahead: bool
) -> None:
    """Token 50 breaks the model: where it stands, the log-probabilities behind it are NaN."""
    loaded = adopt_tiny(TINY)
    break_token(loaded, 50)
    prompt = [50 if at == 7 else 3 + at % 9 for at in range(C + 5)]
    engine = small_engine(loaded)
    engine.ahead = ahead
    found = answer(engine, (prompt, SCORED), (prompt[:7], SCORED))
    assert found[0][-1].finish_reason is FinishReason.ABORT
    assert "logits" in (found[0][-1].error or "")
    assert len(scores_of(found[1])) == 6


def test_a_failed_pass_is_saved_with_what_it_scores(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path
) -> None:
    loaded = adopt_tiny(TINY)
    break_token(loaded, 50)
    engine = small_engine(loaded, save_failed_passes=str(tmp_path))
    prompt = [3 + at % 9 for at in range(20)] + [50]
    answer(engine, (prompt, SCORED))
    (saved,) = map(load_pass, tmp_path.glob("*"))
    (row,) = saved.rows
    assert row.targets is not None and row.targets.tolist() == prompt[1:]
    assert saved.work.wanted.tolist() == [20, *range(20)]
    assert len(replay(saved, replay_config(saved, kv_cache_gib=0.01), loaded).rows) == 21


@pytest.mark.parametrize("value", [-1, 21, 10**40])
def test_values_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)


def test_uncompressed_scores_are_those_of_transformers(loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.encode(TEXT[:20_000])[:1300]
    engine = engine_of(EngineConfig(kv_retention=1.0, kv_cache_gib=0.5), loaded)
    scores = scores_of(answer(engine, (prompt, replace(ALONE, prompt_logprobs=5)))[0])
    loaded.model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([prompt])).logits[0, :-1].float()
    finally:
        loaded.model.set_attn_implementation("tangram")
    expected = logits.log_softmax(-1)
    known = torch.tensor(prompt[1:])[:, None]
    found = np.array([token.logprob for token, _ in scores])
    assert found == pytest.approx(expected.gather(1, known)[:, 0].numpy(), abs=2e-3)
    assert np.exp(-found.mean()) == pytest.approx(
        float(torch.exp(nn.functional.cross_entropy(logits, known[:, 0]))), rel=1e-4
    )
    best = expected.topk(5)
    values = np.array([[value for _, value in token.top] for token, _ in scores])
    assert values == pytest.approx(best.values.numpy(), abs=2e-3)
    ranks = (expected >= expected.gather(1, known)).sum(-1)
    assert np.mean(ranks.numpy() == [rank for _, rank in scores]) > 0.99
