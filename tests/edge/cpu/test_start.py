"""What stands in the way of a start is named, with what to do; a cache that cannot be written is
not in the way.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tangram.config import EngineConfig
from tangram.engine.setup import memory, ready_runner
from tangram.engine.setup.build import build_engine
from tangram.errors import ConfigError
from tangram.model import convert, load
from tests.mentions import mentioning


def config(folder: Path, **options: float | str) -> EngineConfig:
    return EngineConfig(
        str(folder),
        load_format="dummy",
        kv_retention=1.0,
        chunk_tokens=32,
        page_tokens=8,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        **options,  # type: ignore[arg-type]
    )


def test_more_pages_than_the_machine_has_memory_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_cache_gib 1000000.0 GiB")):
        build_engine(config(folder, kv_cache_gib=1e6))


def test_a_container_counts_as_the_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    limit.write_text(f"{2**29}\n")
    with pytest.raises(ConfigError, match=mentioning("kv_cache_gib 0.6 0.5")):
        build_engine(config(folder, kv_cache_gib=0.6))
    limit.write_text("max\n")
    build_engine(config(folder, kv_cache_gib=0.01))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("gpu0", "auto cpu cuda"),
        ("meta", "cpu cuda"),
        ("cuda", "GPU cpu"),
        ("cuda:1", "CUDA_VISIBLE_DEVICES=1 cuda"),
    ],
)
def test_a_device_that_cannot_be_served_on_is_refused(
    folder: Path, device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda:1")
    with pytest.raises(ConfigError, match=mentioning(f"device '{device}' {reason}")):
        build_engine(config(folder, device=device))


def test_block_tables_that_kernels_cannot_address_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=mentioning("max_num_seqs 8000000 2147483647")):
        build_engine(
            replace(
                config(folder, kv_cache_gib=0.01),
                max_num_seqs=8_000_000,
                max_num_batched_tokens=8_000_100,
            )
        )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("can't allocate memory: 12"),
    ],
)
@pytest.mark.parametrize(("where", "name"), [(ready_runner, "Runner"), (load, "random_model")])
def test_memory_that_runs_out_says_what_to_lower(
    folder: Path, error: Exception, where: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(where, name, full)
    with pytest.raises(ConfigError, match=mentioning("kv_cache_gib 0.01 max_num_seqs 4")):
        build_engine(config(folder, kv_cache_gib=0.01))


def test_other_errors_of_the_start_stay_what_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(ready_runner, "Runner", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        build_engine(config(folder, kv_cache_gib=0.01))


def test_weights_that_cannot_be_kept_are_converted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("file").write_text("not a folder")
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "file"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    made = list[Path]()

    def fail_late(source: Path, digest: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir()
        made.append(target)

    monkeypatch.setattr(convert, "_convert", fail_late)
    assert convert.convert_gguf(gguf) == made[0] and made[0].is_dir()
    shutil.rmtree(made[0].parent)
