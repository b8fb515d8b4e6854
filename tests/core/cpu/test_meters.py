"""What the engine measures about itself: that it is measured, that it adds up, and that measuring
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tangram.calibrate.measure import measure_kept_fractions
from tangram.compress.profile import Profile
from tangram.compress.scorers import make_scorer
from tangram.engine.loop import Engine
from tangram.engine.setup.observe import score_source
from tangram.errors import ConfigError
from tangram.kernels.stopwatch import Stopwatch
from tangram.model.load import LoadedModel
from tangram.types import Request, SamplingParams
from tests.core.cpu.test_purity import TINY
from tests.small_engines import count_plans, drain, profile_file, run, small_engine
from tests.speculation import METHODS, draft_always

C = 32
PROMPT = [3 + (i * i * 7 + i) % 80 for i in range(3 * C + 5)]


@pytest.fixture(scope="module")
def tiny(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(TINY)


@pytest.fixture(scope="module", params=["model", "layer"])
def profile(
    request: pytest.FixtureRequest, tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> str:
    return profile_file(tiny, tmp_path_factory.mktemp("profile"), scope=request.param)


def engine_for(tiny: LoadedModel, profile: str, **options: Any) -> Engine:
    scope = Profile.load(profile).scope
    return small_engine(tiny, kv_retention=0.5, profile=(profile,), scope=scope, **options)


def test_clocks_run_while_there_is_work_and_only_then(tiny: LoadedModel, profile: str) -> None:
    engine = engine_for(tiny, profile)
    before = engine.stats()
    assert before.step_s == before.device_s == before.sealing_s == 0 and before.plans == {}
    assert not engine.step(), "there is nothing to do"
    assert engine.stats().step_s == 0
    run(engine, [PROMPT])
    stats = engine.stats()
    assert 0 < stats.sealing_s < stats.device_s < stats.step_s
    assert stats.host_share == pytest.approx(1 - stats.device_s / stats.step_s)


def test_a_prompt_shorter_than_a_chunk_seals_nothing_and_costs_no_sealing(
    tiny: LoadedModel, profile: str
) -> None:
    engine = engine_for(tiny, profile)
    run(engine, [PROMPT[: C // 2]], max_tokens_of(4))
    assert engine.stats().sealing_s == 0 < engine.stats().device_s


def test_plans_are_counted_when_who_decodes_changes(tiny: LoadedModel, profile: str) -> None:
    engine = engine_for(tiny, profile)
    run(engine, [PROMPT[:9]], max_tokens_of(6))
    assert engine.stats().plans == {"aot": 1}, "lengths grow, the plan stays"
    run(engine, [PROMPT[:9], PROMPT[:11]], max_tokens_of(6))
    assert sum(engine.stats().plans.values()) > 1


def test_a_batch_is_planned_once_however_many_tokens_are_drafted(
    tiny: LoadedModel, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = {"kv_retention": 1.0, "speculative_config": METHODS["compressed_kv"]}
    engine = small_engine(tiny, profile=(profile,), scope=Profile.load(profile).scope, **drafts)
    planned = count_plans(monkeypatch)
    run(draft_always(engine, 3, 1, 2, 0), [PROMPT[:9], PROMPT[:11]], max_tokens_of(14))
    assert engine.stats().speculation.drafts > 4
    assert len(planned) == len(set(planned))


def test_slots_bytes_and_pages_of_a_running_request(tiny: LoadedModel, profile: str) -> None:
    engine = engine_for(tiny, profile)
    engine.submit(Request("one", tuple(PROMPT), max_tokens_of(20), lambda event: None))
    while not (stats := engine.stats()).generated_tokens:
        engine.step()
    entry_bytes = 2 * engine.geometry.head_dim * 4
    assert stats.kv_bytes_held == stats.slots_held * entry_bytes
    assert 0 < stats.slots_empty == stats.slots_held - stats.slots_used < stats.slots_held
    assert stats.bytes_saved == stats.kv_bytes_uncompressed - stats.kv_bytes_held > 0
    assert stats.pages_held + stats.pages_cached + stats.pages_free == stats.pages_total
    assert stats.pages_promised > 0
    drain(engine)
    assert engine.stats().slots_held == engine.stats().pages_promised == 0


def test_overflow_is_what_calibration_would_say_of_the_same_chunks(
    tiny: LoadedModel, profile: str
) -> None:
    """The first chunk depends on no compressed past, so calibration sees the same scores."""
    engine = engine_for(tiny, profile, overflow_every=1)
    run(engine, [PROMPT[: C + 5]])
    made = Profile.load(profile)
    (scores,) = score_source(tiny, make_scorer("keydiff"), chunk_tokens=C)(PROMPT[:C])
    (shares,) = measure_kept_fractions(
        scores, [0.5], made.scope, sink_tokens=made.sink_tokens, window_tokens=made.window_tokens
    )
    wishes, layout = np.round(shares * C).astype(int), engine.layout
    assert len(engine.stats().overflow) == layout.full_groups
    for line in engine.stats().overflow:
        own = layout.head_group == line.group
        lost = np.maximum(wishes - layout.head_kept_tokens, 0)[own]
        assert (line.kv_retention, line.chunks) == (0.5, 1)
        assert (line.wished, line.lost, line.exceeded) == (
            wishes[own].sum(),
            lost.sum(),
            (lost > 0).sum(),
        )
    assert sum(line.lost for line in engine.stats().overflow) > 0, (
        "budgets that fit every chunk show nothing"
    )


@pytest.mark.parametrize("every", [2, 3])
def test_overflow_looks_at_some_chunks_and_changes_no_token(
    tiny: LoadedModel, profile: str, every: int
) -> None:
    plain, measured = engine_for(tiny, profile), engine_for(tiny, profile, overflow_every=every)
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
    assert run(plain, prompts) == run(measured, prompts)
    sealed = measured.stats().sealed_chunks
    assert {line.chunks for line in measured.stats().overflow} == {sealed // every}
    assert plain.stats().overflow == ()


@pytest.mark.parametrize(("every", "why"), [(0, "1"), (3, "kv_retention 1.0")])
def test_overflow_that_could_never_be_seen_is_refused(
    tiny: LoadedModel, every: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"overflow_every is {every}, .*{why}"):
        small_engine(tiny, overflow_every=every)


def test_a_stopwatch_adds_blocks_up_and_can_begin_anew() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.timing():
            _work(torch.ones(200, 200))
    first = watch.seconds
    assert first > 0
    watch.collect()
    assert watch.seconds == first
    watch.clear()
    assert watch.seconds == 0


def _work(matrix: Tensor) -> Tensor:
    return matrix @ matrix


def max_tokens_of(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
