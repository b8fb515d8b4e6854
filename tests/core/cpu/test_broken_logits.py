"""NaN in one request's state: it ends alone, and nothing of it is left to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from tangram.engine.loop import Engine
from tangram.kernels.narrow import INT8_NAN
from tangram.model.load import LoadedModel
from tangram.types import Event, FinishReason, Request, SamplingParams
from tests.small_engines import drain, profile_file, run, small_engine
from tests.speculation import METHODS, draft_always

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
C = 32
BAD = 90
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(TINY)


@pytest.fixture(scope="module")
def profile(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return profile_file(model, tmp_path_factory.mktemp("profiles"))


@contextmanager
def poison(model: LoadedModel, value: float = torch.nan) -> Iterator[None]:
    """Within, the embedding of token BAD is `value`."""

    def hook(
        module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        return torch.where((inputs[0] == BAD)[..., None], value, output)

    handle = model.model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def prompt(length: int, step: int, bad_at: int | None = None) -> list[int]:
    tokens = [3 + (at * step) % 11 for at in range(length)]
    if bad_at is not None:
        tokens[bad_at] = BAD
    return tokens


def submit(
    engine: Engine, prompts: Sequence[Sequence[int]], *params: SamplingParams
) -> list[list[Event]]:
    """The events of each prompt, which are still to come; one of `params` is for all."""
    events: list[list[Event]] = [[] for _ in prompts]
    for number, tokens in enumerate(prompts):
        own = params[number % len(params)] if params else ANSWER
        engine.submit(Request(str(number), tuple(tokens), own, events[number].append))
    return events


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.fixture(
    params=[
        (False, 1.0, "auto"),
        (True, 1.0, "auto"),
        (False, 0.5, "auto"),
        (True, 0.5, "auto"),
        (True, 0.5, "int8"),
    ],
    ids=str,
)
def build(
    request: pytest.FixtureRequest, model: LoadedModel, profile: str
) -> Callable[..., Engine]:
    """Makes engines that read a step's tokens before or after the next is launched, at two
    retentions, and with a cache of integers.
    """
    ahead, retention, dtype = request.param
    given: dict[str, Any] = {"kv_retention": retention, "kv_cache_dtype": dtype}
    given |= {"profile": (profile,)} if retention < 1 else {}

    def make(**options: Any) -> Engine:
        engine = small_engine(model, **given, **options)
        engine.ahead = ahead
        # What memory happens to hold must not matter.
        engine._runner.pool.fill_(INT8_NAN if dtype == "int8" else torch.nan)
        return engine

    return make


@pytest.mark.parametrize("bad_at", [5, C + 3, 2 * C + 6])
def test_one_request_ends_and_the_others_answer_as_if_it_had_not_been_there(
    build: Callable[..., Engine], model: LoadedModel, bad_at: int
) -> None:
    others = [prompt(2 * C + 7, 2), prompt(C + 9, 5), prompt(3 * C, 3)[:-4]]
    expected = run(build(), others, ANSWER)
    engine = build()
    with poison(model):
        *events, failed = submit(engine, [*others, prompt(2 * C + 7, 7, bad_at)])
        drain(engine)
    assert [tokens_of(each) for each in events] == expected
    assert [event.finish_reason for event in failed] == [FinishReason.ABORT]
    assert "NaN" in str(failed[0].error)
    assert "weights" in str(failed[0].error), "float32 is what it ran with"
    assert engine.stats().pages_held == 0


def test_of_a_request_that_failed_nothing_is_found_again(
    build: Callable[..., Engine], model: LoadedModel
) -> None:
    asked = prompt(3 * C + 5, 7, C + 3)
    (expected,) = run(build(), [asked], ANSWER)
    engine = build(kv_offload_gib=0.01)
    with poison(model):
        run(engine, [asked], ANSWER)
    assert engine.stats().pages_cached == engine.stats().host_pages_used == 0
    assert run(engine, [asked], ANSWER) == [expected]
    assert engine.stats().cached_tokens == 0


def test_other_prefixes_stay_cached(build: Callable[..., Engine], model: LoadedModel) -> None:
    good = prompt(2 * C + 5, 2)
    engine = build()
    (expected,) = run(engine, [good], ANSWER)
    with poison(model):
        run(engine, [prompt(2 * C + 5, 7, 1)], ANSWER)
    assert run(engine, [good], ANSWER) == [expected]
    assert engine.stats().cached_tokens >= 2 * C


def test_who_shares_a_broken_chunk_is_computed_anew(
    build: Callable[..., Engine], model: LoadedModel
) -> None:
    first = prompt(C, 7, 3)
    asked = [[*first, *prompt(12, 2)], [*first, *prompt(3 * C, 5)]]
    expected = run(build(), asked, ANSWER)[1]
    engine = build(max_num_batched_tokens=C + 8)
    broken, shared = submit(engine, asked)
    with poison(model):
        engine.step()  # seals the chunk that both begin with
    drain(engine)
    assert broken[-1].finish_reason is FinishReason.ABORT
    assert engine.stats().preemptions > 0
    assert tokens_of(shared) == expected


def test_what_breaks_while_decoding_ends_after_the_tokens_before_it(
    build: Callable[..., Engine], model: LoadedModel
) -> None:
    asked, other = prompt(C + 5, 7), prompt(C + 6, 5)
    expected, untouched = run(build(), [asked, other], ANSWER)
    bad = expected[3]
    assert bad not in untouched and bad not in expected[:3]
    engine = build()
    events, others = submit(engine, [asked, other])
    with pytest.MonkeyPatch.context() as patch, poison(model):
        patch.setitem(globals(), "BAD", bad)
        drain(engine)
    assert tokens_of(events) == expected[:4]
    assert events[-1].finish_reason is FinishReason.ABORT
    assert tokens_of(others) == untouched


@pytest.fixture(params=[("ngram", False), ("ngram", True), ("compressed_kv", True)], ids=str)
def draft(request: pytest.FixtureRequest, model: LoadedModel, profile: str) -> Callable[[], Engine]:
    """Makes engines that always draft, and read tokens before or after the next step begins."""
    method, ahead = request.param

    def make() -> Engine:
        engine = small_engine(model, speculative_config=METHODS[method], profile=(profile,))
        engine.ahead = ahead
        return draft_always(engine)

    return make


def break_first(engine: Engine, model: LoadedModel, after: int) -> int:
    """Step until all is done. Once the first request has `after` tokens, its newest one breaks.

    Returns how many tokens it had then.
    """
    engine.step()
    first = engine._scheduler.running[0]
    while first.read_tokens < after:
        engine.step()
    had = first.read_tokens
    with pytest.MonkeyPatch.context() as patch, poison(model):
        patch.setitem(globals(), "BAD", int(first.known_tokens[-1]))
        engine.step()
    drain(engine)
    return had


@pytest.mark.parametrize("after", [4, 13, 25])
def test_who_shares_a_broken_prefix_keeps_what_was_drafted_for_it(
    draft: Callable[[], Engine], model: LoadedModel, after: int
) -> None:
    """The step that breaks one request verifies drafts of the other, too."""
    asked = [[*prompt(C, 7), *prompt(6, 2)], [*prompt(C, 7), *prompt(9, 5)]]
    params = replace(ANSWER, max_tokens=60)
    (expected,) = run(draft(), asked[1:], params)
    own = next(token for token in range(20, BAD) if token not in expected)
    engine = draft()
    broken, other = submit(engine, asked, replace(params, logit_bias={own: 100.0}), params)
    had = break_first(engine, model, after)
    assert tokens_of(broken) == [own] * had
    assert broken[-1].finish_reason is FinishReason.ABORT and "NaN" in str(broken[-1].error)
    assert tokens_of(other) == expected
    assert [event.finish_reason for event in other if event.finish_reason] == [FinishReason.LENGTH]
    assert engine.stats().preemptions == 1 and engine.stats().pages_held == 0


def test_answers_with_drafts_end_with_the_one_of_their_request_that_breaks(
    draft: Callable[[], Engine], model: LoadedModel
) -> None:
    likely = dict.fromkeys(range(50, 60), 100.0)  # so that not all have the one that breaks
    params = SamplingParams(seed=1, n=3, max_tokens=60, ignore_eos=True, logit_bias=likely)
    engine = draft()
    (events,) = submit(engine, [prompt(C + 5, 7)], params)
    break_first(engine, model, 8)
    assert [event.index for event in events if event.finish_reason] == [0, 1, 2]
    assert run(engine, [prompt(C + 5, 7)], ANSWER) == run(draft(), [prompt(C + 5, 7)], ANSWER)


def test_all_answers_of_a_request_end_with_it(
    build: Callable[..., Engine], model: LoadedModel
) -> None:
    engine = build()
    with poison(model):
        (events,) = submit(engine, [prompt(C + 5, 7, C + 2)], SamplingParams(n=3, max_tokens=4))
        drain(engine)
    assert sorted(event.index for event in events if event.finish_reason is FinishReason.ABORT) == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_logits_without_a_finite_sum_end_a_request(value: float, model: LoadedModel) -> None:
    engine = small_engine(model)

    def hook(
        module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        return torch.full_like(output, value)

    handle = model.model.get_output_embeddings().register_forward_hook(hook)
    try:
        (events,) = submit(engine, [prompt(9, 2)], SamplingParams(temperature=1.0, max_tokens=4))
        drain(engine)
    finally:
        handle.remove()
    assert [event.finish_reason for event in events] == [FinishReason.ABORT]
