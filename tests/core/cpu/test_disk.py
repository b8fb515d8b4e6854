"""Engines over a folder of chunks: after a restart they answer as if there had been none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, PretrainedConfig

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.option_checks import check_options
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.types import Event, Request
from tests.core.cpu.test_broken_logits import BAD, poison
from tests.core.cpu.test_offload import HISTORIES, MODELS, SLIDING, C, collect_events
from tests.core.cpu.test_purity import TINY, TINY_DELTA, LonePrompts
from tests.mentions import mentioning
from tests.small_engines import GREEDY, check_books, run, sealed_state, small_engine


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "auto", "auto"),
        ("llama", "fp8", "auto"),
        ("llama", "int4", "auto"),
        ("sliding windows", "int4", "auto"),
        ("latents", "fp8", "auto"),
        ("llama", "auto", "int8"),
    ],
    ids=lambda value: "-".join(value),
)
def start(
    request: pytest.FixtureRequest,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Engine]:
    """Makes engines of one model with host memory in a form; `kv_disk_path` is up to the test."""
    model, form, dtype = request.param
    world = LonePrompts(
        adopt_tiny(MODELS[model]),
        tmp_path_factory.mktemp("profiles"),
        "keydiff",
        kv_cache_dtype=dtype,
    )
    return partial(world.engine, kv_offload_gib=0.01, kv_offload_dtype=form)


def with_disk(start: Callable[..., Engine], folder: Path, **options: object) -> Engine:
    return start(**({"kv_disk_path": str(folder), "kv_disk_gib": 0.01} | options))


def test_the_second_turn_after_a_restart_answers_as_without_one(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    never, first = start(), with_disk(start, tmp_path)
    for history in HISTORIES:
        collect_events(first, history)
        collect_events(never, history)
    first.stop()
    again = with_disk(start, tmp_path)
    for history in HISTORIES:
        prompt = (*history, 7, 8, 9)
        # Without the raw pages of its tail, as after a restart: these are not on disk.
        found, expected = collect_events(again, prompt), collect_events(never, prompt)
        assert found[-1].usage.cached_tokens == 3 * C
        assert [event.token_ids for event in found] == [event.token_ids for event in expected]
    kept, state = sealed_state(never), sealed_state(again)
    assert state and all(torch.equal(pages, kept[key]) for key, pages in state.items())
    stats = again.stats()
    assert stats.disk_hits >= 3 * len(HISTORIES) and stats.disk_corrupt == stats.disk_dropped == 0
    again.stop()
    check_books(again)


def test_a_damaged_file_costs_time_and_nothing_else(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    first = with_disk(start, tmp_path)
    expected = run(first, HISTORIES)
    first.stop()
    files = sorted(path for path in tmp_path.rglob("*/*/*") if path.is_file())
    sound = files[0].parent
    for number, path in enumerate(path for path in files if path.parent != sound):
        whole = bytearray(path.read_bytes())
        if number % 3 == 0:
            whole[len(whole) // 2] ^= 1
        elif number % 3 == 1:
            del whole[-1]
        path.write_bytes(whole)
    again = with_disk(start, tmp_path)
    assert run(again, HISTORIES) == expected
    assert again.stats().disk_corrupt > 0 and again.stats().disk_hits > 0
    again.stop()


def test_two_engines_share_a_folder(start: Callable[..., Engine], tmp_path: Path) -> None:
    one, other = with_disk(start, tmp_path), with_disk(start, tmp_path)
    expected = run(one, HISTORIES)
    one.stop()
    assert run(other, HISTORIES) == expected and other.stats().disk_hits > 0
    other.stop()


def test_a_cleared_cache_is_forgotten_on_disk_too(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = with_disk(start, tmp_path)
    collect_events(engine, HISTORIES[0])
    engine.clear_cache()
    assert collect_events(engine, HISTORIES[0])[-1].usage.cached_tokens == 0
    engine.stop()


@pytest.fixture(scope="module")
def tiny(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(TINY)


def whole(tiny: LoadedModel, folder: Path, **options: object) -> Engine:
    given = {"kv_retention": 1.0, "kv_offload_gib": 0.01, "kv_disk_gib": 0.01}
    return small_engine(tiny, kv_disk_path=str(folder), **(given | options))


def test_other_options_have_stores_of_their_own(tiny: LoadedModel, tmp_path: Path) -> None:
    for options in ({}, {"kv_offload_dtype": "fp8"}, {"kv_offload_dtype": "int4"}):
        engine = whole(tiny, tmp_path, **options)
        assert collect_events(engine, HISTORIES[0])[-1].usage.cached_tokens == 0
        engine.stop()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("change", ["one row", "rounded"])
def test_nearly_the_same_weights_have_a_store_of_their_own(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path, change: str
) -> None:
    """Samples of the weights, by which profiles know a model, are the same."""
    models = [adopt_tiny(TINY) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].model.parameters():
            if change == "rounded":
                parameter.copy_(parameter.bfloat16())
            elif len(parameter) == TINY.vocab_size:
                parameter[BAD] += 1.0
    stores = set[str]()
    for loaded in models:
        engine = whole(loaded, tmp_path)
        assert collect_events(engine, HISTORIES[0])[-1].usage.cached_tokens == 0
        engine.stop()
        stores |= {found.name for found in tmp_path.iterdir()}
    assert len(stores) == 2


def test_nothing_unsound_stays_on_disk(tiny: LoadedModel, tmp_path: Path) -> None:
    history = list(HISTORIES[0])
    history[C + 3] = BAD
    engine = whole(tiny, tmp_path)
    with poison(tiny):
        collect_events(engine, tuple(history))
    engine.stop()
    again = whole(tiny, tmp_path)
    assert collect_events(again, tuple(history))[-1].usage.cached_tokens == 0
    again.stop()


@pytest.mark.parametrize("form", ["auto", "int4"])
def test_a_model_whose_layers_all_have_windows_finds_its_chunks_again(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel], tmp_path: Path, form: str
) -> None:
    """Its chunks have no pages, but for their windows."""
    layers = {"layer_types": ["sliding_attention"] * SLIDING.num_hidden_layers}
    model = adopt_tiny(Gemma3TextConfig.from_dict(SLIDING.to_dict() | layers))
    first = whole(model, tmp_path, kv_offload_dtype=form)
    expected = run(first, HISTORIES)
    first.stop()
    again = whole(model, tmp_path, kv_offload_dtype=form)
    assert run(again, HISTORIES) == expected
    stats = again.stats()
    assert stats.disk_hits >= 4 * len(HISTORIES) and stats.disk_corrupt == stats.disk_dropped == 0
    again.stop()


@pytest.mark.parametrize("ending", ["abort", "stop", "stop the thread"])
def test_what_an_unfinished_request_has_sealed_is_found_again(
    tiny: LoadedModel, tmp_path: Path, ending: str
) -> None:
    engine, computed = whole(tiny, tmp_path), threading.Event()
    tell: Callable[[Event], None] = lambda event: event.finish_reason or computed.set()  # noqa: E731
    prompt = HISTORIES[0][: 3 * C]  # the step that seals its last chunk has its first token
    request = Request("one", prompt, replace(GREEDY, max_tokens=64), tell)
    engine.submit(request)
    if ending == "stop the thread":
        engine.start()
        assert computed.wait(60)
    else:
        while not computed.is_set():
            engine.step()
    if ending == "abort":
        engine.abort("one")
        engine.step()
        assert engine._scheduler.cache.take_moves(())[0] == ()
    engine.stop()
    again = whole(tiny, tmp_path)
    assert collect_events(again, (*prompt, 7))[-1].usage.cached_tokens == 3 * C
    again.stop()


def test_what_the_disk_refuses_is_counted_and_the_answer_is_the_same(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = whole(tiny, tmp_path)

    def refuse(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tangram.cache.disk_store.DiskStore.write", refuse)
    expected = run(small_engine(tiny, kv_retention=1.0), HISTORIES)
    assert run(engine, HISTORIES) == expected
    engine.stop()
    assert engine.stats().disk_dropped > 0 and engine.stats().disk_hits == 0


def test_a_disk_smaller_than_two_chunks_is_refused_with_the_least(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_disk_gib 1e-07")):
        whole(tiny, tmp_path, kv_disk_gib=1e-7)


def test_what_is_not_served_with_a_disk_is_named(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_disk_path recurrent")):
        whole(adopt_tiny(TINY_DELTA), tmp_path)
    monkeypatch.setattr(
        "tangram.engine.setup.option_checks.find_device", lambda _: torch.device("cuda")
    )
    config = EngineConfig(kv_disk_path=str(tmp_path), kv_disk_gib=1.0, kv_offload_gib=1.0)
    with pytest.raises(ConfigError, match=mentioning("kv_disk_path cuda")):
        check_options(config)
