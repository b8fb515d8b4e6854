"""A pass that fails is saved, and computed again by the reference: what is unsound, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from tangram.engine.loop import Engine
from tangram.engine.passes import saved_pass
from tangram.engine.passes.saved_pass import FORMAT, MOST_FILES, load_pass
from tangram.engine.replay import Replay, replay, replay_config
from tangram.errors import ConfigError
from tangram.kernels.cpu.cpu_kernels import CpuKernels, CpuLaunch
from tangram.kernels.reference_kernels import ReferenceKernels
from tangram.model.load import LoadedModel
from tangram.plan.form import WorkPlan
from tangram.plan.schedule import Decoding
from tests.core.cpu.test_broken_logits import ANSWER, BAD, TINY, poison, prompt, submit
from tests.mentions import mentioning
from tests.small_engines import drain, profile_file, small_engine

OPTIONS: dict[str, Any] = {"max_model_len": 200, "kv_retention": 0.5}


@pytest.fixture(scope="module")
def model(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    return adopt_tiny(TINY)


@pytest.fixture
def engine(model: LoadedModel, tmp_path: Path) -> Engine:
    options = OPTIONS | {"profile": profile_file(model, tmp_path)}
    return small_engine(model, save_failed_passes=str(tmp_path / "failed"), **options)


def saved_in(folder: Path) -> list[Path]:
    return sorted((folder / "failed").glob("*"))


def replay_file(path: Path, model: LoadedModel) -> Replay:
    saved = load_pass(path)
    return replay(saved, replay_config(saved, kv_cache_gib=0.01), model)


def answer(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    events = submit(engine, prompts)
    drain(engine)
    return [[token for event in own for token in event.token_ids] for own in events]


def test_what_is_sound_on_the_reference_is_told(
    engine: Engine, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels fail while a sequence decodes behind a sealed chunk, beside another one."""
    prompts = [prompt(70, 3), prompt(41, 5)]
    (expected, _) = answer(engine, prompts)
    decode, calls = CpuLaunch.decode, 0

    def fail_once(launch: CpuLaunch, layer: int, *tensors: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:  # in the fifth step that decodes
            raise RuntimeError("an illegal address")
        decode(launch, layer, *tensors)

    events = submit(engine, prompts)
    monkeypatch.setattr(CpuLaunch, "decode", fail_once)
    with pytest.raises(RuntimeError, match="an illegal address"):
        drain(engine)
    monkeypatch.undo()
    so_far = [token for event in events[0] for token in event.token_ids]
    (path,) = saved_in(tmp_path)
    found = replay_file(path, model)
    assert load_pass(path).error == "RuntimeError: an illegal address"
    assert path.stat().st_mode & 0o077 == 0, "it has what a user wrote"
    assert found.unsound is None
    assert [row.kind for row in found.rows] == ["decode", "decode"]
    assert found.rows[0].next_token == expected[len(so_far)]


def damage(engine: Engine, folder: Path) -> Path:
    """What is saved of a step of two sequences that decode, of which "0" reads a page of NaN."""
    events = submit(engine, [prompt(50, 3), prompt(41, 5)])
    while not (events[0] and events[1]):
        engine.step()
    (cache,) = [
        one.cache for one in engine._scheduler.running if one.request_id == "0" and one.cache
    ]
    tables = engine._scheduler.cache.tables
    engine._runner.pool[tables[cache.slot, 0]] = torch.nan
    drain(engine)
    (path,) = saved_in(folder)
    return path


def test_the_first_layer_that_is_unsound_is_named(
    engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    """In the past of one sequence, whose page is damaged while it decodes."""
    found = replay_file(damage(engine, tmp_path), model)
    assert found.unsound == "layer 0: attention, which reads entries of the past"
    assert [(row.request_id, row.next_token) for row in found.rows] == [("0", None)]


def test_the_plan_that_ran_is_replayed(
    engine: Engine, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what is wrong."""
    plans = list[WorkPlan]()
    plan = CpuKernels.plan

    def note(kernels: CpuKernels, batch: Decoding) -> tuple[WorkPlan, str]:
        plans.append(plan(kernels, batch)[0])
        return plans[-1], "noted"

    monkeypatch.setattr(CpuKernels, "plan", note)
    decode = load_pass(damage(engine, tmp_path)).work.addresses.decode
    assert decode is not None and len(decode.counts) == 2
    (made,) = [one for one in plans if one.entries["row"].max() == 1]
    for part in ("tasks", "entries", "segments", "layer_indptr", "merge_indptr"):
        np.testing.assert_array_equal(getattr(decode.plan, part), getattr(made, part))
    monkeypatch.setattr(ReferenceKernels, "plan", None)
    assert replay_file(saved_in(tmp_path)[0], model).unsound is not None


def test_sequences_whose_pages_fit_no_file_are_not_judged(
    engine: Engine, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_pass, "MOST_BYTES", 1)
    prompts = [prompt(70, 3), prompt(41, 5)]
    expected, events = answer(engine, prompts), submit(engine, prompts)
    while len(events[0]) < 4 or len(events[1]) < 4:
        engine.step()
    so_far = [sum(len(event.token_ids) for event in own) for own in events]
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(CpuLaunch, "decode", None)
        engine.step()
    (row,) = replay_file(saved_in(tmp_path)[0], model).rows
    number = int(row.request_id)
    assert row.next_token == expected[number][so_far[number]]


def test_a_prefill_that_is_unsound_is_saved_with_its_tokens(
    engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    with poison(model):
        answer(engine, [prompt(40, 3, bad_at=36), prompt(41, 5)])
        (path,) = saved_in(tmp_path)
        assert BAD in load_pass(path).work.tokens
        assert replay_file(path, model).unsound == "layer 0: queries, keys or values"
    sound = replay_file(path, model)
    assert sound.unsound is None and sound.rows[-1].next_token is not None


def test_a_folder_is_not_filled(engine: Engine, model: LoadedModel, tmp_path: Path) -> None:
    with poison(model):
        for number in range(MOST_FILES + 2):
            answer(engine, [prompt(20 + number, 3, bad_at=4)])
    assert len(saved_in(tmp_path)) == MOST_FILES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about | {"version": "0.0.0"}, "Tangram 0.0.0"),
        (lambda about: {**about, "config": {"kv_retention": 7.0}}, "kv_retention 7.0"),
        (lambda about: [], "failed pass"),
        (lambda about: {"version": about["version"]}, "failed pass"),
    ],
)
def test_another_file_is_refused(
    change: Callable[[Any], Any], message: str, engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    with poison(model):
        answer(engine, [prompt(20, 3, bad_at=4)])
    (path,) = saved_in(tmp_path)
    tensors = load_file(path)
    about = json.dumps(change(_about(path)))
    save_file(tensors, path, {"format": FORMAT, "about": about})
    with pytest.raises(ConfigError, match=mentioning(message)):
        load_pass(path)


def _about(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["about"])


def test_a_model_of_another_shape_is_refused(
    engine: Engine,
    model: LoadedModel,
    tmp_path: Path,
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    with poison(model):
        answer(engine, [prompt(20, 3, bad_at=4)])
    (path,) = saved_in(tmp_path)
    saved = load_pass(path)
    changed = type(saved)(**{**vars(saved), "pages": saved.pages[..., :8].clone()})
    with pytest.raises(ConfigError, match=mentioning("pages [2, 2, 8, 8] 16]")):
        replay(changed, replay_config(saved, kv_cache_gib=0.01), model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", 10**6),
        ("tables", 10**6),
        ("tables", -1),
        ("lengths", 2**30),
        ("length_index", 10**6),
    ],
)
def test_numbers_that_lead_out_of_arrays_are_refused(
    field: str, value: int, engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    saved = load_pass(damage(engine, tmp_path))
    addresses = saved.work.addresses
    tasks = None if addresses.decode is None else addresses.decode.plan.tasks["length_index"]
    arrays = {**vars(saved), "lengths": addresses.lengths, "length_index": tasks}
    arrays[field].flat[0] = value
    with pytest.raises(ConfigError, match=mentioning(f"{field} {value}")):
        replay(saved, replay_config(saved, kv_cache_gib=0.01), model)


def test_rows_of_another_engine_are_refused(
    engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    saved = load_pass(damage(engine, tmp_path))
    changed = replace(saved, rows=(structs.replace(saved.rows[0], retention=99), *saved.rows[1:]))
    with pytest.raises(ConfigError, match=mentioning("retention 99")):
        replay(changed, replay_config(saved, kv_cache_gib=0.01), model)


def test_a_task_that_reads_outside_of_the_tables_is_refused(
    engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    saved = load_pass(damage(engine, tmp_path))
    decode = saved.work.addresses.decode
    assert decode is not None
    decode.address["table"][:] = 10**6
    with pytest.raises(ConfigError, match="another file"):
        replay(saved, replay_config(saved, kv_cache_gib=0.01), model)


def test_a_disk_that_takes_nothing_costs_no_answer(
    engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    """The failed request ends alone, as without the option."""
    (tmp_path / "failed").write_text("a file where the folder should be")
    with poison(model):
        bad, good = submit(engine, [prompt(20, 3, bad_at=4), prompt(41, 5)])
        drain(engine)
    assert bad[-1].error is not None and good[-1].error is None
    assert sum(len(event.token_ids) for event in good) == ANSWER.max_tokens


def test_a_ratio_that_a_request_brought_costs_no_answer(
    engine: Engine, model: LoadedModel, tmp_path: Path
) -> None:
    """An engine that replays does not have it."""
    saver = engine._runner._saver
    assert saver is not None
    saver._retentions.clear()
    with poison(model):
        bad, good = submit(engine, [prompt(20, 3, bad_at=4), prompt(41, 5)])
        drain(engine)
    assert bad[-1].error is not None and good[-1].error is None and saved_in(tmp_path) == []


def test_nothing_is_saved_that_is_sound(engine: Engine, tmp_path: Path) -> None:
    answer(engine, [prompt(70, 3)])
    assert ANSWER.max_tokens == 12 and saved_in(tmp_path) == []
    assert isinstance(engine._runner.pool, Tensor)
