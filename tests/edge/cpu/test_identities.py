"""Whatever is kept on disk belongs to the content of the files that it was made of."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase, Qwen2Config

from tangram.engine.llm import LLM
from tangram.errors import ModelError
from tangram.model import file_digest as digests
from tangram.model.file_digest import file_digest
from tangram.model.load import load_model
from tests.edge.cpu.test_model_files import write_llama
from tests.mentions import mentioning, mentions

TINY = LlamaConfig(
    vocab_size=49152,  # of the embedded model's tokenizer
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is ahead of the files by more than a step of their times."""
    now = time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + 10**10)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read as a whole."""
    found: list[str] = []
    whole = hashlib.file_digest

    def record(file: Any, name: str) -> Any:
        found.append(file.name)
        return whole(file, name)

    monkeypatch.setattr(digests.hashlib, "file_digest", record)
    return found


def change_late(path: Path) -> None:
    """Other bytes of a file after its first MiB; its name, size and time stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(os.urandom(64))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap(path: Path) -> None:
    """The same by another file in its place, as `cp -p` and `mv` do."""
    other = path.with_suffix(".new")
    shutil.copy2(path, other)
    change_late(other)
    other.replace(path)


@pytest.mark.parametrize("replace", [change_late, swap, lambda path: path.write_bytes(b"b" * 3)])
@pytest.mark.usefixtures("later")
def test_a_file_that_was_replaced_is_another(
    replace: Callable[[Path], object], tmp_path: Path, reads: list[str]
) -> None:
    path, notes = tmp_path / "a.gguf", tmp_path / "notes"
    path.write_bytes(bytes(3 * 2**20))
    first = file_digest(path, notes)
    assert first == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (file_digest(path, notes), len(reads)) == (first, 1), "it is read once"
    replace(path)
    second = file_digest(path, notes)
    assert second == hashlib.sha256(path.read_bytes()).hexdigest() != first
    assert (file_digest(path, notes), len(reads)) == (second, 2)


def test_a_digest_of_a_file_just_written_is_not_remembered(
    tmp_path: Path, reads: list[str]
) -> None:
    """It may change again within one step of the file system's clock."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"a" * 5000)
    os.utime(path, (time.time() + 60, time.time() + 60))
    file_digest(path, tmp_path / "notes")
    file_digest(path, tmp_path / "notes")
    assert len(reads) == 2


@pytest.mark.usefixtures("later")
def test_a_pipe_in_the_place_of_a_note_is_not_waited_for(tmp_path: Path, reads: list[str]) -> None:
    path, notes = tmp_path / "a.gguf", tmp_path / "notes"
    path.write_bytes(b"a" * 5000)
    digest = file_digest(path, notes)
    (note,) = notes.iterdir()
    note.unlink()
    os.mkfifo(note)
    assert (file_digest(path, notes), len(reads)) == (digest, 2)


@pytest.mark.usefixtures("later")
def test_images_with_fixed_times_are_told_apart_by_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SquashFS and the like give every file the same times, and inodes by position."""
    path, notes = tmp_path / "a.gguf", tmp_path / "notes"
    path.write_bytes(os.urandom(2**20))
    fixed = path.stat()
    monkeypatch.setattr(digests.os, "fstat", lambda number: fixed)
    first = file_digest(path, notes)
    path.write_bytes(os.urandom(2**20))
    assert file_digest(path, notes) != first


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"a")
    whole = hashlib.file_digest

    def grow(file: Any, name: str) -> Any:
        path.write_bytes(b"aa")
        return whole(file, name)

    monkeypatch.setattr(digests.hashlib, "file_digest", grow)
    with pytest.raises(ModelError, match=mentioning(f"{path} again")):
        file_digest(path, tmp_path / "notes")


@pytest.mark.usefixtures("later")
def test_a_gguf_file_with_other_weights_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name, size, time and the first MiB are the same."""
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    path = write_llama(tmp_path / "model.gguf")
    first = load_model(str(path), dtype="float32").weights_digest
    assert load_model(str(path), dtype="float32").weights_digest == first
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-4096] + data[-2048:] + data[-4096:-2048])  # of the last matrix
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert load_model(str(path), dtype="float32").weights_digest != first
    path.write_bytes(data)
    assert load_model(str(path), dtype="float32").weights_digest == first


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def change_a_matrix(folder: Path) -> None:
    """As a merged adapter does: norms and biases stay."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name] * 1.02
    save_file(weights, path, {"format": "pt"})


def test_a_digest_of_weights_covers_matrices_and_no_dtype(folder: Path) -> None:
    forms = ("float32", "bfloat16")
    (first,) = {load_model(str(folder), dtype=form).weights_digest for form in forms}
    before = load_model(str(folder))
    change_a_matrix(folder)
    after = load_model(str(folder))
    assert after.weights_digest != first == before.weights_digest
    assert after.fingerprint == before.fingerprint, "profiles fit other forms of the same weights"


def test_kept_profiles_are_those_of_the_same_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"kv_cache_gib": 0.02, "chunk_tokens": 128, "kv_retention": 0.5}

    def count_kept() -> int:
        LLM(str(folder), **options)
        return len(list((tmp_path / "cache").glob("weights/*/profiles/*.json")))

    assert (count_kept(), count_kept()) == (1, 1)
    change_a_matrix(folder)
    assert count_kept() == 2


def test_a_pipe_in_the_place_of_a_kept_profile_is_not_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"kv_cache_gib": 0.02, "chunk_tokens": 128, "kv_retention": 0.5}
    LLM(str(folder), **options)
    (kept,) = (tmp_path / "cache").glob("weights/*/profiles/*.json")
    kept.unlink()
    os.mkfifo(kept)
    LLM(str(folder), **options)
    assert mentions(caplog.text, f"{kept} regular")


def test_kept_profiles_are_those_of_the_same_config(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights do not tell how many layers have windows, and budgets are those of the others."""
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"kv_cache_gib": 0.02, "chunk_tokens": 128, "kv_retention": 0.5}
    fields = TINY.to_dict() | {"model_type": "qwen2", "sliding_window": 40}
    folders = {}
    for windows in (0, 1):
        folders[windows] = str(tmp_path / f"windows{windows}")
        torch.manual_seed(0)
        switch = {"use_sliding_window": bool(windows), "max_window_layers": 1}
        model = AutoModelForCausalLM.from_config(Qwen2Config(**fields | switch))
        model.save_pretrained(folders[windows])
        tokenizer.save_pretrained(folders[windows])
    layouts = [LLM(folders[windows], **options).engine.layout for windows in (0, 1, 0)]
    compressed = [layout.groups[: layout.full_groups] for layout in layouts]
    assert [len({layer for group in groups for layer, _ in group}) for groups in compressed] == [
        2,
        1,
        2,
    ]
    assert len(list((tmp_path / "cache").glob("weights/*/profiles/*.json"))) == 2


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from loops import add
print(add(1))
"""
SOURCE = """
from tangram.numba_cache import compile_kept
@compile_kept()
def add(x):
    return x + {number}
"""


def test_compiled_code_is_that_of_its_source(tmp_path: Path, python: list[str]) -> None:
    """Tools that unpack archives may give another version of a file the same size and time."""

    def answer(number: int) -> str:
        path = tmp_path / "loops.py"
        path.write_text(SOURCE.format(number=number))
        os.utime(path, (10**9, 10**9))
        command = [*python, "-B", "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert (answer(1), answer(2)) == ("2", "3")
    assert list(tmp_path.rglob("*.nbi")), "it is kept"
