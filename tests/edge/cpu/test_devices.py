"""Accelerators without kernels: one line says so, and the CPU serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tangram.errors import ConfigError
from tangram.kernels.triton import card
from tangram.model.device import find_device
from tangram.model.load import load_model
from tests.mentions import mentioning, mentions


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a T4."""
    properties = SimpleNamespace(
        name="Tesla T4",
        major=7,
        minor=5,
        shared_memory_per_block_optin=64 << 10,
        multi_processor_count=40,
        shared_memory_per_multiprocessor=64 << 10,
        clock_rate=1590000,
        memory_bus_width=256,
        memory_clock_rate=5001000,
        L2_cache_size=4 << 20,
    )
    card._ask_driver.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield
    card._ask_driver.cache_clear()


def test_an_old_gpu_is_left_alone_and_named(turing: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tangram"):
        assert find_device("auto") == torch.device("cpu")
    (line,) = caplog.messages
    assert mentions(line, "7.5 8.0 CPU")
    with pytest.raises(ConfigError, match=mentioning("device 'cuda' 7.5 cpu")):
        find_device("cuda")


def test_an_amd_gpu_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with caplog.at_level(logging.WARNING, "tangram"):
        assert find_device("auto") == torch.device("cpu")
    (line,) = caplog.messages
    assert mentions(line, "AMD 7.1 CPU")


def test_apples_gpu_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING, "tangram"):
        assert find_device("auto") == torch.device("cpu")
    (line,) = caplog.messages
    assert mentions(line, "Apple CPU")


def test_a_gpu_that_the_kernels_run_on_is_taken_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, turing: None
) -> None:
    properties = torch.cuda.get_device_properties(0)
    properties.major, properties.minor = 8, 6
    assert find_device("auto") == torch.device("cuda") == find_device("cuda")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("avx512", "amx", "expected"),
    [(False, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.bfloat16)],
)
def test_auto_is_bfloat16_where_a_cpu_multiplies_it(
    avx512: bool, amx: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert load_model(str(folder), device="cpu", load_format="dummy").dtype is expected
    plain = load_model(str(folder), device="cpu", load_format="dummy", dtype="float32")
    assert plain.dtype is torch.float32
