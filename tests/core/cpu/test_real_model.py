"""The embedded model, served as users get it: exact at ρ = 1.0, within its promise below, and it
still finds things.
"""

from __future__ import annotations

import json
import random

import pytest

from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.fixtures.transformers import make_fixture as greedy
from tests.fixtures.transformers.make_fixture import TEXT
from tests.small_engines import run

PROMPT_TOKENS = (20, 64, 150, 333, 512, 900, 1500, 3000)
GREEDY = SamplingParams(temperature=0.0, max_tokens=greedy.ANSWER_TOKENS, ignore_eos=True)
# A choice decided by less than this is a tie as far as float32 sums in another order can tell.
NEAR_TIE = 1e-3


def engine(loaded: LoadedModel, retention: float, **options: object) -> Engine:
    """The engine with its defaults, in 1.5 GiB."""
    return engine_of(EngineConfig(kv_retention=retention, kv_cache_gib=1.5, **options), loaded)  # type: ignore[arg-type]


def test_uncompressed_greedy_tokens_equal_transformers_generate(loaded: LoadedModel) -> None:
    """As Transformers answered when its answers were recorded."""
    entries = json.loads(greedy.PATH.read_text())["entries"]
    assert min(entry["lead"] for entry in entries) > NEAR_TIE
    check(loaded, [(entry["prompt"], entry["answer"]) for entry in entries])


@pytest.mark.nightly
def test_uncompressed_greedy_tokens_equal_transformers_generate_now(loaded: LoadedModel) -> None:
    """Whatever the length, with the Transformers that is installed."""
    recorded = {
        tuple(entry["prompt"]): entry["answer"]
        for entry in json.loads(greedy.PATH.read_text())["entries"]
    }
    prompts = greedy.prompts_of(loaded, PROMPT_TOKENS) + [list(prompt) for prompt in recorded]
    answered = []
    for prompt in prompts:
        expected, lead = greedy.generated(loaded, prompt)
        assert lead > NEAR_TIE, "this prompt decides nothing: take another"
        assert expected == recorded.get(tuple(prompt), expected), "record the answers again"
        answered.append((prompt, expected))
    check(loaded, answered)


def check(loaded: LoadedModel, answered: list[tuple[list[int], list[int]]]) -> None:
    """The engine gives these answers to all prompts together and to each alone."""
    prompts, answers = map(list, zip(*answered, strict=True))
    assert run(engine(loaded, 1.0), prompts, GREEDY) == answers
    lonely = engine(loaded, 1.0, enable_prefix_caching=False)
    for prompt, answer in answered:
        assert run(lonely, [prompt], GREEDY)[0] == answer


@pytest.mark.parametrize("retention", [pytest.param(0.25, marks=pytest.mark.nightly), 0.5, 0.75])
def test_sealed_pages_occupy_no_more_than_was_promised(
    loaded: LoadedModel, retention: float
) -> None:
    served = engine(loaded, retention)
    events: list[Event] = []
    prompt = tuple(loaded.tokenizer.encode(TEXT[:20_000])[: 2 * 512])
    served.submit(
        Request("0", prompt, SamplingParams(temperature=0.0, max_tokens=1), events.append)
    )
    while served.busy:
        served.step()
    usage = events[-1].usage
    assert usage.kv_bytes_uncompressed == 2 * 512 * 30 * 3 * 2 * 64 * 4
    assert 0.95 * retention < usage.kv_bytes / usage.kv_bytes_uncompressed <= retention
    profile = Profile.load(
        find_shipped_profiles() / f"smollm2.fastkvzip.model.c512.r{retention:g}.json"
    )
    assert usage.kv_bytes == 2 * sum(profile.sealed_pages) * 4 * 2 * 16 * 64 * 4


def needle_prompt(loaded: LoadedModel, tokens: int, seed: int) -> tuple[list[dict[str, str]], str]:
    """About `tokens` tokens of documentation with one fact hidden in it, and the fact."""
    rng = random.Random(seed)
    city, code = (
        rng.choice(["Oslo", "Lima", "Cairo", "Quito", "Dakar", "Turin", "Osaka"]),
        rng.randint(10_000, 99_999),
    )
    start = rng.randrange(0, 120_000)
    hay = loaded.tokenizer.decode(
        loaded.tokenizer.encode(TEXT[start : start + 40_000])[: tokens - 150]
    )
    cut = hay.index(" ", int(len(hay) * (0.2 + 0.65 * seed / 9)))
    fact = f" The secret access code of {city} is {code}."
    question = (
        f"\n\nQuestion: What is the secret access code of {city}? Answer with the number only."
    )
    return [{"role": "user", "content": hay[:cut] + fact + hay[cut:] + question}], str(code)


@pytest.fixture(scope="module")
def whole_and_half(loaded: LoadedModel) -> tuple[Engine, Engine]:
    return engine(loaded, 1.0), engine(loaded, 0.5)


@pytest.mark.parametrize(
    ("tokens", "seed"),
    [(1_150, 5), *(pytest.param(4_000, seed, marks=pytest.mark.nightly) for seed in range(10))],
)
def test_a_needle_is_found_with_and_without_compression(
    loaded: LoadedModel, whole_and_half: tuple[Engine, Engine], tokens: int, seed: int
) -> None:
    messages, code = needle_prompt(loaded, tokens, seed)
    for served in whole_and_half:
        prompt = served.codec.chat_prompt(messages)
        assert abs(len(prompt) - tokens) <= 100
        answer = run(served, [prompt], SamplingParams(temperature=0.0, max_tokens=32))[0]
        assert code in served.codec.decode(answer)
