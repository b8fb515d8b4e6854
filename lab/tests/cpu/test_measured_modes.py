"""The ways to run an engine that are there to be measured: groupings, schedules, reclamation after
the fact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig

from tangram.compress.profile import Profile
from tangram.compress.provenance import Calibration
from tangram.compress.scorers import make_scorer
from tangram.engine.loop import Engine
from tangram.engine.profiles import scorer_spec
from tangram.errors import ConfigError
from tangram.kernels import reference
from tangram.kernels.narrow import NARROW
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tangram_lab.baselines.reclaim import compact
from tests.examples import examples
from tests.small_engines import drain, run, small_engine

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
LLAMA_WORDS = LlamaConfig(**(SHAPE | {"vocab_size": 49152}))  # KVzip asks in words
WINDOWS = GptOssConfig(
    **SHAPE,
    num_local_experts=2,
    num_experts_per_tok=1,
    sliding_window=20,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
ANSWER = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True, logprobs=2)
PROMPTS = [[3 + (i * i * k) % 90 for i in range(33 * k)] for k in range(1, 5)]
GROUPS = ("clustered", "adjacent", "monolithic")
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
        model=loaded.fingerprint,
        layers=layers,
        scorer=scorer_spec(make_scorer(scorer)),
        scope="model",
        kv_retention=0.5,
        chunk_tokens=32,
        page_tokens=4,
        heads_per_page=2,
        window_tokens=2,
        calibration=Calibration(source="made up", samples=1, tokens=1),
    )
    profile.save(folder / f"{scorer}.json")
    return str(folder / f"{scorer}.json")


def engine_of(loaded: LoadedModel, profile: str | None, **options: Any) -> Engine:
    named = {} if profile is None else {"kv_retention": 0.5, "profile": (profile,)}
    defaults = {"page_tokens": 4, "max_model_len": 300, "kv_cache_gib": 0.004}
    return small_engine(loaded, **(defaults | named | options))


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
    groups: str, loaded: LoadedModel, ungrouped: list[list[int]]
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
        ("fastest", "decode_schedule: planner is 'fastest'"),
        ("aot+onetile", r"the schedule is 'aot\+onetile': \+onetile is an option of the GPU"),
        ("aot+serial", r"decode_schedule: option 'serial' of 'aot\+serial' is not known"),
        ("aot+warps=4", r"\+warps is an option of the GPU"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(
    schedule: str, message: str, loaded: LoadedModel
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(loaded, None, decode_schedule=schedule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_groups": "paired"}, "head_groups is 'paired'"),
        ({"reclamation": "lazy"}, "reclamation is 'lazy'"),
        ({"decode_schedule": "aot", "decode_policy": "a.json"}, "give one of them"),
    ],
)
def test_an_option_out_of_range_is_refused(
    options: dict[str, str], message: str, loaded: LoadedModel
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(loaded, None, **options)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("config", "scorer"), [(LLAMA, "keydiff"), (WINDOWS, "keydiff"), (LLAMA_WORDS, "kvzip")]
)
def test_reclamation_ends_where_reservation_begins(
    config: PretrainedConfig, scorer: str, groups: str, adopt_tiny: Adopt, tmp_path: Path
) -> None:
    """The same sealed pages for the same tokens, to the bit, and the same log-probabilities."""
    model = adopt_tiny(config)
    profile = uneven_profile(model, tmp_path, scorer)
    options = {"scorer": scorer, "head_groups": groups, "kv_cache_gib": 0.02}
    engines = [
        engine_of(model, profile, reclamation=mode, **options) for mode in ("reserved", "dynamic")
    ]
    assert_same(*(log_probabilities(engine, PROMPTS) for engine in engines))
    state, found = (
        {node.key: engine._runner.pool[node.pages] for node in nodes if not node.transient}
        for engine in engines
        for nodes in [engine._scheduler.cache.prefix.nodes.values()]
    )
    assert state.keys() == found.keys() and len(state) > 8
    for key, pages in state.items():
        assert torch.equal(pages, found[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *NARROW.values()])
def test_compacting_moves_what_is_kept_to_the_front(dtype: torch.dtype) -> None:
    pool = torch.randn(6, 2, 2, 4, 8).to(dtype)
    tables = torch.tensor([3, 0, 5, 1, 2, 4], dtype=torch.int32)
    # Table, column, first entry
    place = [np.array(values, np.int32) for values in ((0, 3), (1, 0), (4, 2))]
    kept = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 1, 1, 1, 0]], dtype=torch.bool)
    spans = [
        (table, column, first, first + 8)
        for table, column, first in zip(*(values.tolist() for values in place), strict=True)
    ]
    before = [torch.stack(reference.gather(pool.float(), tables, *span)) for span in spans]
    compact(pool, tables, *place, kept, 8)
    for head, span in enumerate(spans):
        after = torch.stack(reference.gather(pool.float(), tables, *span))
        assert torch.equal(after[:, :4], before[head][:, kept[head]])


@settings(
    deadline=None,
    max_examples=examples(12),
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    pool_sequences=st.floats(1.0, 2.5),
    prefix_caching=st.booleans(),
    groups=st.sampled_from(GROUPS),
)
def test_reclamation_keeps_the_books_however_tight_the_pool(
    loaded: LoadedModel,
    profile: str,
    lengths: list[int],
    pool_sequences: float,
    prefix_caching: bool,
    groups: str,
) -> None:
    """`run` checks the books after every step."""
    prompts = [[3 + i % 7 for i in range(length)] for length in lengths]
    layout = engine_of(loaded, profile, head_groups=groups).layout
    pages = int(pool_sequences * layout.most_pages(max(lengths) + 45))
    options: dict[str, Any] = {
        "head_groups": groups,
        "enable_prefix_caching": prefix_caching,
        "max_model_len": max(lengths) + 45,
        "kv_cache_gib": (pages + 0.5) * layout.page_bytes(4) / 2**30,
    }
    engine = engine_of(loaded, profile, reclamation="dynamic", **options)
    expected = engine_of(loaded, profile, **options)
    assert run(engine, prompts, ANSWER) == run(expected, prompts, ANSWER)
    engine.clear_cache()
    assert engine.stats().pages_free == engine.stats().pages_total
