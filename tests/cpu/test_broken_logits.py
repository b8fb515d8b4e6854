"""NaN in one request's state: it ends alone, and nothing of it is left to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from tangram.engine.loop import Engine
from tangram.kernels.narrow import INT8_NAN
from tangram.model.load import LoadedModel
from tangram.types import Event, FinishReason, Request, SamplingParams
from tests.small_engines import drain, profile_file, run, small_engine

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
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = ANSWER
) -> list[list[Event]]:
    events: list[list[Event]] = [[] for _ in prompts]
    for number, tokens in enumerate(prompts):
        engine.submit(Request(str(number), tuple(tokens), params, events[number].append))
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
    assert "weights are damaged" in str(failed[0].error), "float32 is what it ran with"
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
