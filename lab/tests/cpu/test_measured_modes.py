"""The ways to run an engine that are there to be measured: groupings and schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, PretrainedConfig

from tangram.compress.profile import Profile, ProfileOptions
from tangram.compress.provenance import Calibration
from tangram.compress.scorers import make_scorer
from tangram.engine.loop import Engine
from tangram.engine.setup.profiles import scorer_spec
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tangram_lab.baselines.compared_engines import Baseline, HeadGroups
from tests.mentions import mentioning
from tests.small_engines import drain, run, small_config

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SHAPE)
ANSWER = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True, logprobs=2)
PROMPTS = [[3 + (i * i * k) % 90 for i in range(33 * k)] for k in range(1, 5)]
GROUPS: tuple[HeadGroups, ...] = ("clustered", "adjacent", "monolithic")
Adopt = Callable[[PretrainedConfig], LoadedModel]


def uneven_profile(loaded: LoadedModel, folder: Path, scorer: str = "keydiff") -> str:
    """A profile whose heads need 1/8 to all of a chunk, neighbours never alike; its path."""
    layers = loaded.geometry.full_layers
    need = np.random.default_rng(3).permutation(
        np.linspace(0.1, 0.9, len(layers) * loaded.geometry.kv_heads)
    )
    profile = Profile.from_statistics(
        need.reshape(len(layers), -1),
        np.zeros((len(layers), loaded.geometry.kv_heads)),
        ProfileOptions(
            loaded.fingerprint,
            layers,
            scorer_spec(make_scorer(scorer)),
            "model",
            32,
            page_tokens=4,
            heads_per_page=2,
            window_tokens=2,
        ),
        0.5,
        Calibration(source="made up", samples=1, tokens=1),
    )
    profile.save(folder / f"{scorer}.json")
    return str(folder / f"{scorer}.json")


def engine_of(
    loaded: LoadedModel,
    profile: str | None,
    head_groups: HeadGroups = "clustered",
    decode_schedule: str | None = None,
) -> Engine:
    named: dict[str, Any] = {}
    if profile is not None:
        named = {"kv_retention": 0.5, "profile": (profile,)}
    config = small_config(page_tokens=4, max_model_len=300, kv_cache_gib=0.004, **named)
    return Baseline(head_groups, decode_schedule).engine(config, loaded)


@pytest.fixture(scope="module")
def loaded(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(LLAMA)


@pytest.fixture(scope="module")
def profile(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return uneven_profile(loaded, tmp_path_factory.mktemp("profiles"))


def log_probabilities(engine: Engine, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Of every answer, the sampled tokens and their log-probabilities."""
    events: list[list[Event]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), ANSWER, events[number].append))
    drain(engine)
    return [
        [(token.token_id, token.logprob) for event in own for token in event.logprobs]
        for own in events
    ]


def assert_same(
    found: list[list[tuple[int, float]]], expected: list[list[tuple[int, float]]]
) -> None:
    """Equal tokens, and log-probabilities but for the rounding of decode, which depends on the
    batch.
    """
    for ours, theirs in zip(found, expected, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert np.allclose([value for _, value in ours], [value for _, value in theirs], atol=1e-4)


@pytest.fixture(scope="module")
def ungrouped(loaded: LoadedModel) -> list[list[int]]:
    """What an uncompressed cache answers by default."""
    return run(engine_of(loaded, None), PROMPTS, ANSWER)


@pytest.fixture(scope="module")
def unscheduled(loaded: LoadedModel, profile: str) -> list[list[tuple[int, float]]]:
    """What a compressed cache answers by the default schedule."""
    return log_probabilities(engine_of(loaded, profile), PROMPTS)


def test_groupings_hold_every_head_and_cost_more_the_coarser_they_are(
    loaded: LoadedModel, profile: str
) -> None:
    layouts = {groups: engine_of(loaded, profile, head_groups=groups).layout for groups in GROUPS}
    kept = {groups: layout.head_kept_tokens for groups, layout in layouts.items()}
    assert all((kept["clustered"] <= kept[groups]).all() for groups in GROUPS)
    entries = [layout.span_pages * layout.heads_per_page for layout in layouts.values()]
    assert entries == sorted(entries) and len(set(entries)) == 3
    heads = [(layer, head) for layer in range(4) for head in range(3)]
    for layout in layouts.values():
        assert sorted(head for group in layout.groups for head in group) == heads
    assert layouts["adjacent"].groups[0] == ((0, 0), (0, 1))
    assert layouts["monolithic"].groups[1] == ((1, 0), (1, 1), (1, 2))
    assert (kept["monolithic"] == kept["clustered"].max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("groups", GROUPS)
def test_no_grouping_changes_what_an_uncompressed_cache_answers(
    groups: HeadGroups, loaded: LoadedModel, ungrouped: list[list[int]]
) -> None:
    found = run(engine_of(loaded, None, head_groups=groups), PROMPTS, ANSWER)
    assert found == ungrouped


@pytest.mark.parametrize(
    "schedule", ["uniform", "aot", "plain", "buckets:padded", "workqueue", "packing:thrifty"]
)
def test_no_schedule_changes_an_answer(
    schedule: str, loaded: LoadedModel, profile: str, unscheduled: list[list[tuple[int, float]]]
) -> None:
    found = log_probabilities(engine_of(loaded, profile, decode_schedule=schedule), PROMPTS)
    assert_same(found, unscheduled)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("fastest", "decode_schedule 'fastest'"),
        ("aot+onetile", "decode_schedule 'aot+onetile' GPU"),
        ("aot+serial", "decode_schedule 'serial' 'aot+serial'"),
        ("aot+warps=4", "decode_schedule +warps GPU"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(
    schedule: str, message: str, loaded: LoadedModel
) -> None:
    with pytest.raises(ConfigError, match=mentioning(message)):
        engine_of(loaded, None, decode_schedule=schedule)
