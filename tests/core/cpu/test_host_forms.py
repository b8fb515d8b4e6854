"""Forms of host memory: a chunk is rounded when it is sealed, and travel changes no bit of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.errors import ConfigError
from tangram.kernels.dispatch import host_memory
from tangram.kernels.offload.host_forms import GROUP, HOST_FORMS, FormName
from tangram.types import PageMove, SamplingParams
from tests.core.cpu.test_offload import HISTORIES, MODELS, C, collect_events, small
from tests.core.cpu.test_offload import world as world  # the fixture
from tests.core.cpu.test_purity import LonePrompts
from tests.mentions import mentioning
from tests.small_engines import run, sealed_state

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How far a number of a vector may be moved, as a share of the largest of its group or vector.
LARGEST_ERROR = {"fp8": 2**-4, "int4": 2 / 15}


# A cache of 8 bits goes to host memory as it is.
everywhere = pytest.mark.parametrize("world", MODELS, indirect=True)


def vectors(seed: int, size: float, offset: float, dim: int, dtype: torch.dtype) -> Tensor:
    """Pages [6, 2, 2, 4, D] of noise around offsets, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    noise, middle = (torch.randn(6, 2, 2, 4, dim, generator=generator) for _ in range(2))
    noise[0] = 0
    return (size * (noise + offset * middle.mean(-1, keepdim=True))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HOST_FORMS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    size=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 1.0, 40.0]),
    dim=st.sampled_from([16, 32, 64, 96, 80]),
)
def test_what_is_rounded_is_packed_without_loss_and_rounded_no_further(
    name: FormName, dtype: torch.dtype, seed: int, size: float, offset: float, dim: int
) -> None:
    form, entries = HOST_FORMS[name], vectors(seed, size, offset, dim, dtype)
    rounded = form.round(entries)
    packed = form.pack(rounded)
    assert 4 * packed.shape[1] == form.page_bytes(2 * 2 * 4, dim) and len(packed) == 6
    assert form.unpack(packed, entries).equal(rounded) and rounded.dtype is dtype
    assert form.round(rounded).equal(rounded)
    group = dim if name == "fp8" or dim % GROUP else GROUP
    wide, found = (x.float().unflatten(-1, (-1, group)) for x in (entries, rounded))
    largest = wide.abs().amax(-1, keepdim=True)
    allowed = LARGEST_ERROR[name] * largest + 2.0**-23
    assert ((found - wide).abs() <= allowed).all()


@pytest.mark.parametrize("name", HOST_FORMS)
def test_rounding_depends_on_one_vector_alone(name: FormName) -> None:
    form, entries = HOST_FORMS[name], vectors(1, 1.0, 1.0, 64, torch.float32)
    one = form.round(entries[3, 1, 0, 2].clone())
    assert form.round(entries)[3, 1, 0, 2].equal(one)


def test_int4_has_16_values_at_equal_distances_between_the_ends_of_a_group() -> None:
    form = HOST_FORMS["int4"]
    ramp = torch.linspace(-1.0, 14.0, GROUP)
    torch.testing.assert_close(form.round(ramp), ramp.round(), atol=1e-5, rtol=0)
    other = torch.cat([ramp, 100 * ramp])  # another group has other ends
    assert form.round(other)[:GROUP].equal(form.round(ramp))
    assert form.round(ramp)[[0, -1]].equal(ramp[[0, -1]])


@pytest.mark.parametrize("name", HOST_FORMS)
def test_pages_come_back_to_other_places_equal_to_the_bit(name: FormName) -> None:
    pool = HOST_FORMS[name].round(torch.randn(9, 3, 2, 4, 32))
    kept, memory = pool.clone(), host_memory(pool, 5, HOST_FORMS[name])
    there, slots, back = (torch.tensor(x).int().numpy() for x in ([8, 0, 3], [4, 0, 2], [1, 2, 5]))
    memory.move([PageMove(there, slots, inward=False)], awaited=True)
    memory.move([PageMove(back, slots, inward=True)], awaited=True)
    assert pool[[1, 2, 5]].equal(kept[[8, 0, 3]]) and pool[[0, 3, 4, 6, 7, 8]].equal(
        kept[[0, 3, 4, 6, 7, 8]]
    )


def rounding(world: LonePrompts, name: FormName, **options: object) -> Engine:
    """An engine of which nothing is ever evicted."""
    return world.engine(kv_offload_dtype=name, kv_offload_gib=0.01, **options)


@everywhere
@pytest.mark.parametrize("name", HOST_FORMS)
def test_a_prefix_that_came_back_is_that_which_was_never_away(
    world: LonePrompts, name: FormName
) -> None:
    """The law: the state is a function of the tokens, the profile and the dtype of the tier."""
    engine, roomy = small(world, 1.2, kv_offload_dtype=name), rounding(world, name)
    for turn in range(2):
        for history in HISTORIES:
            prompt = history + turn * (7, 8, 9)
            found, expected = collect_events(engine, prompt), collect_events(roomy, prompt)
            assert [event.token_ids for event in found] == [event.token_ids for event in expected]
    stats = engine.stats()
    assert stats.restored_tokens >= len(HISTORIES) * 2 * C
    assert roomy.stats().restored_tokens == 0 and stats.dropped_spans == 0
    kept, state = sealed_state(roomy), sealed_state(engine)
    assert state and all(pages.equal(kept[key]) for key, pages in state.items())
    plain = world.engine()
    run(plain, HISTORIES)
    exact = sealed_state(plain)
    assert not any(pages.equal(kept[key]) for key, pages in exact.items()), "nothing was rounded"


@everywhere
@pytest.mark.parametrize("name", HOST_FORMS)
def test_a_chunk_that_decode_completed_is_rounded_like_a_prefilled_one(
    world: LonePrompts, name: FormName
) -> None:
    prompt, engine = HISTORIES[0][: C + 20], rounding(world, name)
    answer = run(engine, [prompt], LONG)[0]
    other = rounding(world, name)
    run(other, [(*prompt, *answer)], LONG)
    one, two = sealed_state(engine), sealed_state(other)
    shared = one.keys() & two.keys()
    assert len(shared) >= 2 and all(one[key].equal(two[key]) for key in shared)


@everywhere
def test_more_pages_fit_and_are_counted_in_their_bytes(world: LonePrompts) -> None:
    pages = {
        name: world.engine(kv_offload_gib=0.01, kv_offload_dtype=name).stats()
        for name in ("auto", *HOST_FORMS)
    }
    plain = pages["auto"]
    for name, least in {"fp8": 3.7, "int4": 5.3}.items():  # a vector has 16 numbers of 4 bytes
        stats = pages[name]
        assert stats.host_pages_total >= least * plain.host_pages_total
        assert 0.009 * 2**30 < stats.host_pool_bytes <= 0.01 * 2**30
    engine = small(world, 1.2, kv_offload_dtype="int4")
    for history in HISTORIES[:2]:
        collect_events(engine, history)
    stats = engine.stats()
    assert stats.host_bytes_out == stats.host_pages_used * stats.host_page_bytes > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_offload_gib": 0.0}, "kv_offload_dtype int4 kv_offload_gib 0"),
        ({"kv_cache_dtype": "fp8"}, "kv_offload_dtype int4 fp8"),
        ({"kv_cache_dtype": "int8"}, "kv_offload_dtype int4 int8"),
        ({"kv_offload_dtype": "int3"}, "kv_offload_dtype 'int3'"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(named)):
        EngineConfig(**({"kv_offload_gib": 1.0, "kv_offload_dtype": "int4"} | options))
