"""Caches of 8 bits with calibrated scales: the law holds, and faint values are not lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from tangram.calibrate.measure import Magnitudes
from tangram.compress.entry_scales import choose_scales
from tangram.compress.profile import Profile
from tangram.compress.scorers import make_scorer
from tangram.config import EngineConfig
from tangram.engine.setup.memory import check_cache_device
from tangram.engine.setup.observe import score_source
from tangram.errors import ConfigError
from tangram.kernels.narrow import NARROW, as_entries, as_numbers, stored_scales
from tangram.model.load import LoadedModel, adopt
from tangram.types import SamplingParams
from tests.core.cpu.test_offload import SLIDING
from tests.core.cpu.test_purity import TINY, LonePrompts
from tests.mentions import mentioning
from tests.small_engines import run, sealed_state, small_engine

C = 32
ANSWER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
MODELS: dict[str, PretrainedConfig] = {"llama": TINY, "sliding windows": SLIDING}
PROMPT = tuple(3 + (i * i) % 9 for i in range(3 * C + 20))
FAINT = 2.0**-14  # E4M3 has nothing between 0 and 2⁻⁹


def magnitudes_of(loaded: LoadedModel, sample: list[int]) -> Magnitudes:
    found = Magnitudes()
    list(score_source(loaded, make_scorer("keydiff"), chunk_tokens=C, magnitudes=found)(sample))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_calibration_sees_the_magnitudes_that_transformers_stores(
    name: str, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded, config = adopt_tiny(MODELS[name]), MODELS[name]
    sample = np.random.default_rng(0).integers(3, 90, 4 * C + 9).tolist()
    theirs = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
    theirs.load_state_dict(loaded.model.state_dict())
    cache = DynamicCache()  # not the config's: it would drop what left a window
    with torch.inference_mode():
        theirs.eval()(torch.tensor([sample[: 4 * C]]), past_key_values=cache)
    largest = [
        [x[0].abs().amax((1, 2)) for x in (layer.keys, layer.values)] for layer in cache.layers
    ]
    expected = torch.stack([torch.stack(pair, 1) for pair in largest])
    found = magnitudes_of(loaded, sample).largest
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def narrow_world(loaded: LoadedModel, folder: Path, dtype: str = "fp8") -> LonePrompts:
    """A world whose cache has 8 bits a number, with the scales of its profile."""
    return LonePrompts(loaded, folder, "keydiff", kv_cache_dtype=dtype)


def with_faint_values(loaded: LoadedModel) -> LoadedModel:
    """The same function with smaller values: the output projection makes up for them exactly."""
    model = AutoModelForCausalLM.from_config(
        deepcopy(loaded.model.config), attn_implementation="tangram", dtype=torch.float32
    )
    model.load_state_dict(loaded.model.state_dict())
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data *= FAINT
        layer.self_attn.o_proj.weight.data /= FAINT
    return adopt("llama", model, loaded.tokenizer)


@pytest.fixture
def tiny(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    """For one test: an engine joins the maps of its model."""
    return adopt_tiny(TINY)


@pytest.mark.parametrize("dtype", NARROW)
def test_faint_values_are_stored_as_well_as_others(
    dtype: str, tiny: LoadedModel, tmp_path: Path
) -> None:
    """What makes them faint is a power of two, so pages and answers are equal to the bit."""
    found = []
    for name, loaded in {"plain": tiny, "faint": with_faint_values(tiny)}.items():
        (tmp_path / name).mkdir()
        found.append(narrow_world(loaded, tmp_path / name, dtype).alone(PROMPT))
    (answer, state), (other, others) = found
    pages, their_pages = (torch.cat([*one.values()]) for one in (state, others))
    assert answer == other and bits(pages).equal(bits(their_pages)) and pages.float().any()


def test_scales_of_1_lose_faint_values(tiny: LoadedModel, tmp_path: Path) -> None:
    world = narrow_world(with_faint_values(tiny), tmp_path)
    Profile.load(world.profile).with_scales(None).save(world.profile)
    _, state = world.alone(PROMPT)
    assert state and not any(pages[:, :, 1].float().any() for pages in state.values())


@pytest.mark.parametrize("options", [{}, {"kv_retention": 1.0, "profile": ()}])
def test_integers_without_scales_are_refused(
    options: dict[str, object], tiny: LoadedModel, tmp_path: Path
) -> None:
    """An old profile, or none."""
    world = narrow_world(tiny, tmp_path, "int8")
    Profile.load(world.profile).with_scales(None).save(world.profile)
    given = {"kv_cache_dtype": "int8", "scorer": "keydiff", "profile": (world.profile,)}
    with pytest.raises(ConfigError, match=mentioning("kv_cache_dtype int8 profile --profile")):
        small_engine(tiny, chunk_tokens=C, **(given | options))


def test_integers_are_for_a_cpu() -> None:
    config = EngineConfig(kv_cache_dtype="int8")
    check_cache_device(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=mentioning("kv_cache_dtype int8 cuda fp8")):
        check_cache_device(config, torch.device("cuda"))


def test_scales_bring_magnitudes_to_the_end_of_each_range() -> None:
    largest = torch.logspace(-6, 6, 3000, dtype=torch.float64)
    (scales,) = choose_scales(largest.view(1, -1, 2))
    for dtype, least, most in ((torch.int8, 125, 127), (torch.float8_e4m3fn, 224, 448)):
        stored = stored_scales(torch.tensor(scales), dtype)
        ends = largest.float().view(-1, 2) / stored
        assert least <= ends.min() and ends.max() <= most
        assert stored.bfloat16().float().equal(stored)
    assert (torch.frexp(stored)[0] == 0.5).all(), "products with scales of FP8 are exact"
    powers = 2.0 ** torch.arange(-9.0, 3)
    assert stored_scales(powers, torch.float8_e4m3fn).equal(powers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_integers_are_the_nearest_ones_ties_to_even(dtype: torch.dtype) -> None:
    """Also where what is read has the odd length at which vector code ends."""
    given = {0.5: 0, 1.5: 2, -2.5: -2, 2.51: 3, 126.5: 126, 127.5: 127, -128: -127, 4e4: 127}
    given |= {math.inf: 127, -math.inf: -127, -0.0: 0, 1e-7: 0}
    x = torch.tensor(list(given), dtype=dtype).repeat(5)
    expected = torch.tensor(list(given.values()), dtype=torch.int8).repeat(5)
    assert as_entries(x, torch.int8).equal(expected)
    assert all(as_entries(one, torch.int8) == code for one, code in zip(x, expected, strict=True))
    every = torch.arange(-127, 128, dtype=torch.int8)
    assert as_entries(every.to(dtype), torch.int8).equal(every)
    two = torch.stack([x, x.index_fill(0, torch.tensor([3]), math.nan)])
    assert as_numbers(as_entries(two, torch.int8)).isnan().all(1).tolist() == [False, True]


@pytest.fixture(scope="module", params=product(MODELS, NARROW), ids="-".join)
def world(
    request: pytest.FixtureRequest,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> LonePrompts:
    model, dtype = request.param
    return narrow_world(adopt_tiny(MODELS[model]), tmp_path_factory.mktemp("profiles"), dtype)


def test_a_prefix_hit_gives_what_a_miss_gives(world: LonePrompts) -> None:
    engine = world.engine()
    first = run(engine, [PROMPT], ANSWER)[0]
    follow_up = (*PROMPT, *first, 7, 8, 9)
    warm = run(engine, [follow_up], ANSWER)[0]
    assert engine.stats().cached_tokens >= 3 * C
    expected, expected_state = world.alone(follow_up)
    assert warm == expected
    state = sealed_state(engine)
    shared = expected_state.keys() & state.keys()
    assert shared and all(bits(state[key]).equal(bits(expected_state[key])) for key in shared)


def test_what_keeps_everything_has_the_same_scales(world: LonePrompts) -> None:
    """A pool has one set of them. The first chunk reads no page, so it is rounded once."""
    narrow, wide = world.engine(), world.engine(kv_cache_dtype="auto")
    for engine in (narrow, wide):
        run(engine, [PROMPT[: C + 5]], SHORT, kv_retention=1.0)
    ((key, stored),), exact = sealed_state(narrow).items(), sealed_state(wide)
    layout, scales = narrow.admission.retentions[1].layout, Profile.load(world.profile).scales
    heads = [layout.groups[group] for group in layout.span_group[: len(stored)]]
    own = torch.tensor([[scales[layer][head] for layer, head in page] for page in heads])
    assert layout.keeps_everything and not (own == 1).all()
    divided = exact[key] / stored_scales(own, NARROW[world.kv_cache_dtype])[..., None, None]
    if world.kv_cache_dtype == "int8":  # this prompt has larger magnitudes than the sample
        divided = divided.round().clamp(-127, 127)
    assert bits(stored).equal(bits(divided.to(NARROW[world.kv_cache_dtype])))


def test_sealed_chunks_have_the_same_bytes_whatever_filled_them(world: LonePrompts) -> None:
    """Prefill of several chunks or of one, decode token by token, and drafts."""
    answer, expected = world.alone(PROMPT)
    whole, given = (*PROMPT, *answer), {"speculative_config": {"method": "ngram"}}
    for options in ({}, given, {"max_num_batched_tokens": C + 32}):
        engine = world.engine(**options)
        assert run(engine, [PROMPT, whole[: 2 * C]], ANSWER)[0] == answer
        state = sealed_state(engine)
        shared = expected.keys() & state.keys()
        assert len(shared) >= 3
        assert all(bits(state[key]).equal(bits(expected[key])) for key in shared)


def bits(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8)
