"""One engine with profiles of several scorers: each sequence keeps what its own profile keeps.

The law of `test_purity.py` for every profile of the engine, whoever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from tangram.compress.between import derive_profile
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.errors import ProfileError, RequestError
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tangram.watch import News, Readings
from tests.core.cpu.test_purity import ANSWER, PROPERTY, TINY, sealed_state
from tests.mentions import mentioning
from tests.small_engines import drain, profile_file, run, small_engine

C = 48  # SnapKV's window takes 32
# Each needs something else of the engine: rotation, a second pass, queries, nothing but keys.
TINY_PROFILES = (
    ("keydiff", 0.5, "model"),
    ("keydiff", 0.25, "model"),
    ("expected_attention", 0.5, "model"),
    ("kvzip", 0.5, "model"),
    ("snapkv", 0.5, "model"),
    ("tova", 0.25, "layer"),
)
WHOLE = (None, 1.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Way = tuple[str | None, float]  # a scorer and its ρ


def answer(
    engine: Engine, asked: Sequence[tuple[tuple[int, ...], Way]], params: SamplingParams = ANSWER
) -> list[list[int]]:
    """The answers to all prompts at once, each kept in its own way."""
    events: list[list[Event]] = [[] for _ in asked]
    for number, (prompt, (scorer, ratio)) in enumerate(asked):
        request = Request(
            str(number), prompt, params, events[number].append, kv_retention=ratio, kv_scorer=scorer
        )
        engine.submit(request)
    drain(engine)
    return [[token for event in own for token in event.token_ids] for own in events]


def check_common(state: Mapping[bytes, Tensor], alone: Mapping[bytes, Tensor]) -> int:
    """Equal keys name equal bits; returns how many there are."""
    common = state.keys() & alone.keys()
    for key in common:
        assert torch.equal(state[key], alone[key])
    return len(common)


class Mixed:
    """A tiny model with profiles of several scorers, and engines that have one of them."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded = loaded
        self.files: dict[Way, str] = {
            (scorer, ratio): profile_file(
                loaded, folder, scorer=scorer, retention=ratio, scope=scope, chunk_tokens=C
            )
            for scorer, ratio, scope in TINY_PROFILES
        }
        self.alone = cache(self._alone)

    def engine(self, **options: object) -> Engine:
        given = {"kv_retention": 0.5, "profile": tuple(self.files.values()), "kv_cache_gib": 0.02}
        return small_engine(self.loaded, chunk_tokens=C, scorer=None, **(given | options))

    def _alone(self, prompt: tuple[int, ...], way: Way) -> tuple[list[int], dict[bytes, Tensor]]:
        profile = () if way == WHOLE else (self.files[way],)
        engine = self.engine(profile=profile, kv_retention=way[1])
        return run(engine, [prompt], ANSWER)[0], sealed_state(engine)


@pytest.fixture(scope="module")
def mixed(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> Mixed:
    # KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there.
    loaded = adopt_tiny(LlamaConfig(**(TINY.to_dict() | {"vocab_size": 49152})))
    return Mixed(loaded, tmp_path_factory.mktemp("profiles"))


ways = st.sampled_from([*((scorer, ratio) for scorer, ratio, _ in TINY_PROFILES), WHOLE])
forks = st.lists(st.integers(3, 12), min_size=1, max_size=C)


@PROPERTY
@given(
    prefix=st.lists(st.integers(3, 12), min_size=C - 5, max_size=2 * C + 10),
    asked=st.lists(st.tuples(forks, ways), min_size=2, max_size=5),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 2 * C),
)
def test_a_batch_of_several_scorers_changes_nothing(
    mixed: Mixed,
    prefix: list[int],
    asked: list[tuple[list[int], Way]],
    max_num_seqs: int,
    extra_tokens: int,
) -> None:
    together = [(tuple(prefix + fork), way) for fork, way in asked]
    most = C + max_num_seqs + extra_tokens
    engine = mixed.engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=most)
    answers = answer(engine, together)
    state = sealed_state(engine)
    for (prompt, way), found in zip(together, answers, strict=True):
        expected, alone = mixed.alone(prompt, way)
        assert found == expected
        assert check_common(state, alone) == len(alone) > 0


def test_preempted_sequences_keep_their_own_scorers(mixed: Mixed) -> None:
    several: list[Way] = [("keydiff", 0.5), ("kvzip", 0.5), ("tova", 0.25), ("snapkv", 0.5)]
    asked = [
        (tuple(3 + (i * k) % 9 for i in range(2 * C - 8 + k)), way)
        for k, way in enumerate(several, 1)
    ]
    layout = mixed.engine().admission.retentions[0].layout
    pages = layout.most_pages(140) * 8 // 5
    gib = pages * layout.page_bytes(4) / 2**30
    engine = mixed.engine(kv_cache_gib=gib, max_model_len=140, max_num_seqs=4)
    found = answer(engine, asked)
    assert engine.stats().preemptions > 0
    assert found == [mixed.alone(prompt, way)[0] for prompt, way in asked]


def test_prefixes_are_shared_within_a_profile_only(mixed: Mixed) -> None:
    prompt = tuple(3 + (i * 7) % 9 for i in range(3 * C))
    engine, known = mixed.engine(), 0
    for way in (*mixed.files, WHOLE):
        assert answer(engine, [(prompt, way)])[0] == mixed.alone(prompt, way)[0]
        assert engine.stats().cached_tokens == known, "nothing of another profile is reused"
        answer(engine, [(prompt, way)])
        reused = engine.stats().cached_tokens - known
        assert reused >= 2 * C
        known += reused


def test_demand_is_counted_by_scorer_with_its_own_scope(mixed: Mixed) -> None:
    prompt = tuple(3 + (i * 7) % 9 for i in range(C + 5))
    engine = mixed.engine(overflow_every=1)
    for way in (("tova", 0.25), ("keydiff", 0.25), ("keydiff", 0.25)):
        answer(engine, [((*prompt, len(way[0])), way)], GREEDY)
    counted = {(line.kv_scorer, line.kv_retention): line.chunks for line in engine.stats().overflow}
    assert counted == dict.fromkeys(mixed.files, 0) | {("tova", 0.25): 1, ("keydiff", 0.25): 1}
    budgets, alone = (
        engine.stats().overflow,
        mixed.engine(overflow_every=1, profile=(mixed.files["tova", 0.25],), kv_retention=0.25),
    )
    answer(alone, [((*prompt, 4), (None, 0.25))], GREEDY)
    assert [line for line in budgets if line.kv_scorer == "tova"] == list(alone.stats().overflow)


# -- ratios of which there is no profile ---------------------------------------------------------


def test_a_derived_ratio_serves_as_an_engine_does_that_is_started_with_its_profile(
    mixed: Mixed, tmp_path: Path
) -> None:
    """The same answers and the same bits under the same prefix keys, whatever else is served."""
    prompt = tuple(3 + at * at % 10 for at in range(2 * C + 7))
    engine = mixed.engine()
    ways: list[Way] = [("keydiff", 0.3), ("tova", 0.5), WHOLE, ("keydiff", 0.3)]
    answers = answer(engine, [(prompt, way) for way in ways])
    assert answers[0] == answers[3]
    state = sealed_state(engine)
    for way, own_answer in zip(ways[:2], answers, strict=False):
        served = engine.check(request(kv_scorer=way[0], kv_retention=way[1]))[0]
        own = [Profile.load(file) for (scorer, _), file in mixed.files.items() if scorer == way[0]]
        shape = {"page_tokens": own[0].page_tokens, "heads_per_page": own[0].heads_per_page}
        profile = derive_profile(own, way[1], **shape)
        profile.save(tmp_path / "derived.json")
        started = mixed.engine(profile=(str(tmp_path / "derived.json"),), kv_retention=way[1])
        assert answer(started, [(prompt, (None, way[1]))]) == [own_answer]
        assert served.fingerprint == profile.fingerprint()
        assert check_common(state, sealed_state(started)) == len(sealed_state(started)) > 0


def test_a_derived_ratio_is_made_once_and_shown(mixed: Mixed) -> None:
    engine = mixed.engine()
    shape = engine.watch(_Deaf()).shape
    first = engine.check(request(kv_retention=0.3))[0]
    assert engine.check(request(kv_retention=0.3))[0] is first
    assert (first.scorer, first.kv_retention) == ("keydiff", 0.3)
    known = engine.watch(_Deaf()).shape.retentions
    assert len(known) == len(shape.retentions) + 1
    assert (known[-1].budgets == first.layout.head_kept_tokens).all()


class _Deaf:
    def observe(self, news: News, readings: Readings) -> None: ...


# -- which profile serves a request ----------------------------------------------------------------


def request(**fields: object) -> Request:
    return Request("0", (3, 4, 5), GREEDY, lambda event: None, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({}, ("keydiff", 0.5)),
        ({"kv_retention": 0.25}, ("keydiff", 0.25)),
        ({"kv_scorer": "kvzip"}, ("kvzip", 0.5)),
        ({"kv_scorer": "tova", "kv_retention": 0.25}, ("tova", 0.25)),
        ({"kv_retention": 1.0}, WHOLE),
    ],
)
def test_a_request_chooses_by_ratio_and_scorer(
    mixed: Mixed, fields: dict[str, object], served: Way
) -> None:
    retention, _ = mixed.engine().check(request(**fields))
    assert (retention.scorer, retention.kv_retention) == served


@pytest.mark.parametrize(
    ("fields", "words", "blamed"),
    [
        (("snap", None), "kv_scorer 'snap' kv_retention 0.5 keydiff", "kv_scorer"),
        (("snap", 0.25), "kv_scorer 'snap' kv_retention 0.25", "kv_scorer"),
        (("tova", 0.33), "'tova' kv_retention 0.33 0.25", "kv_retention"),
        ((None, 0.33), "kv_retention 0.33 0.5, 1.0 0.05 calibrate", "kv_retention"),
        ((None, 1.5), "kv_retention 1.5", "kv_retention"),
        (("kvzip", 1.0), "kv_retention 1.0, kv_scorer", "kv_retention"),
        (("x" * 5000, None), "kv_scorer", "kv_scorer"),
    ],
)
def test_what_no_profile_has_is_refused(
    mixed: Mixed, fields: tuple[str | None, float | None], words: str, blamed: str
) -> None:
    with pytest.raises(RequestError, match=mentioning(words)) as refused:
        mixed.engine().check(request(kv_scorer=fields[0], kv_retention=fields[1]))
    assert refused.value.field == blamed and len(str(refused.value)) < 400


def test_a_ratio_alone_prefers_the_default_scorer(mixed: Mixed) -> None:
    names: list[Way] = [("tova", 0.25), ("keydiff", 0.5), ("keydiff", 0.25)]
    engine = mixed.engine(profile=tuple(mixed.files[way] for way in names))
    retention, _ = engine.check(request(kv_retention=0.25))
    assert (engine.config.scorer, retention.scorer) == ("keydiff", "keydiff")
    small = mixed.engine(profile=tuple(mixed.files[way] for way in names[:2]))
    assert small.check(request(kv_retention=0.25))[0].scorer == "tova", "it is the only one"


def test_without_profiles_a_scorer_is_refused(mixed: Mixed) -> None:
    with pytest.raises(RequestError, match=mentioning("kv_scorer --profile")):
        mixed.engine(profile=(), kv_retention=1.0).check(request(kv_scorer="keydiff"))


def test_the_first_profile_of_the_default_ratio_has_the_default_scorer(mixed: Mixed) -> None:
    files = (mixed.files["tova", 0.25], mixed.files["kvzip", 0.5], mixed.files["keydiff", 0.5])
    engine = mixed.engine(profile=files)
    assert (engine.config.scorer, engine.config.scope) == ("kvzip", "model")
    assert mixed.engine(profile=files, kv_retention=1.0).config.scorer == "tova"
    with pytest.raises(ProfileError, match=mentioning("0.3, tova 0.25")):
        mixed.engine(profile=files, kv_retention=0.3)


# -- the embedded model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ways",
    [
        [("fastkvzip", 0.5), ("keydiff", 0.5)],
        pytest.param(
            [("fastkvzip", 0.5), ("keydiff", 0.5), ("keydiff", 0.25)], marks=pytest.mark.nightly
        ),
    ],
    ids=["two ways", "three ways"],
)
def test_the_embedded_model_serves_two_scorers_as_each_alone(
    loaded: LoadedModel, ways: list[Way]
) -> None:
    folder, text = find_shipped_profiles(), (Path(__file__).parents[3] / "README.md").read_text()
    files: dict[Way, str] = {
        (scorer, ratio): str(folder / f"smollm2.{scorer}.model.c512.r{ratio}.json")
        for scorer, ratio in ways
    }

    def serve(*profiles: str) -> Engine:
        ratio = Profile.load(profiles[0]).kv_retention
        sizes = {"kv_cache_gib": 0.3, "max_model_len": 1024, "max_num_batched_tokens": 1200}
        return engine_of(EngineConfig(kv_retention=ratio, profile=profiles, **sizes), loaded)  # type: ignore[arg-type]

    prompt = tuple(loaded.tokenizer.encode(text)[:530])
    engine = serve(*files.values())
    answers = answer(engine, [(prompt, way) for way in files], GREEDY)
    state = sealed_state(engine)
    for way, found in zip(files, answers, strict=True):
        alone = serve(files[way])
        assert answer(alone, [(prompt, way)], GREEDY) == [found]
        assert check_common(state, sealed_state(alone)) == 1
    assert len(state) == len(files)
