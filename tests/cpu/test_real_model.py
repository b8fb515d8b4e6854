"""The embedded model, served as users get it: exact at ρ = 1.0, within its promise below, and it
still finds things.
"""

from __future__ import annotations

import random
from pydoc_data.topics import topics

import pytest
import torch

from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.build import engine_of
from tangram.engine.loop import Engine
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.support import run

TEXT = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
PROMPT_TOKENS = (20, 64, 150, 333, 512, 900, 1500, 3000)
TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
# A choice decided by less than this is a tie as far as float32 sums in another order can tell.
NEAR_TIE = 1e-3


def engine(loaded: LoadedModel, retention: float, **options: object) -> Engine:
    """The engine with its defaults, in 1.5 GiB."""
    return engine_of(EngineConfig(kv_retention=retention, kv_cache_gib=1.5, **options), loaded)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    ids = loaded.tokenizer.encode(TEXT[:60_000])
    return [ids[37 * number : 37 * number + length] for number, length in enumerate(PROMPT_TOKENS)]


def generated(loaded: LoadedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """What Transformers' generate continues `prompt` with, and by how much each choice led."""
    loaded.model.set_attn_implementation("sdpa")
    try:
        output = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        loaded.model.set_attn_implementation("tangram")
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def test_uncompressed_greedy_tokens_equal_transformers_generate(
    loaded: LoadedModel, prompts: list[list[int]]
) -> None:
    together = run(engine(loaded, 1.0), prompts, GREEDY)
    lonely = engine(loaded, 1.0, enable_prefix_caching=False)
    for prompt, answer in zip(prompts, together, strict=True):
        expected, leads = generated(loaded, prompt)
        assert min(leads) > NEAR_TIE, "this prompt decides nothing: take another"
        assert answer == expected
        assert run(lonely, [prompt], GREEDY)[0] == expected


@pytest.mark.parametrize("retention", [0.25, 0.5, 0.75])
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


def needle_prompt(loaded: LoadedModel, seed: int) -> tuple[list[dict[str, str]], str]:
    """About 4,000 tokens of documentation with one fact hidden in it, and the fact."""
    rng = random.Random(seed)
    city, code = (
        rng.choice(["Oslo", "Lima", "Cairo", "Quito", "Dakar", "Turin", "Osaka"]),
        rng.randint(10_000, 99_999),
    )
    start = rng.randrange(0, 120_000)
    hay = loaded.tokenizer.decode(loaded.tokenizer.encode(TEXT[start : start + 40_000])[:3_850])
    cut = hay.index(" ", int(len(hay) * (0.2 + 0.65 * seed / 9)))
    fact = f" The secret access code of {city} is {code}."
    question = (
        f"\n\nQuestion: What is the secret access code of {city}? Answer with the number only."
    )
    return [{"role": "user", "content": hay[:cut] + fact + hay[cut:] + question}], str(code)


def test_a_needle_at_4000_tokens_is_found_as_often_as_without_compression(
    loaded: LoadedModel,
) -> None:
    found = {}
    for retention in (1.0, 0.5):
        served = engine(loaded, retention)
        hits = 0
        for seed in range(10):
            messages, code = needle_prompt(loaded, seed)
            prompt = served.codec.chat_prompt(messages)
            assert 3_900 <= len(prompt) <= 4_100
            answer = run(served, [prompt], SamplingParams(temperature=0.0, max_tokens=32))[0]
            hits += code in served.codec.decode(answer)
        found[retention] = hits
    print(f"needles found: {found}")
    assert found == {1.0: 10, 0.5: 10}
