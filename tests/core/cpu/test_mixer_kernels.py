"""Which kernels recurrent layers compute with: no GPU is needed to choose them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from inspect import unwrap
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

from tangram.cache.step import Row, RowKind
from tangram.engine.setup.memory import _NoAttention
from tangram.model import mixer_kernels
from tangram.model.load import LoadedModel
from tangram.model.mixer_kernels import choose_functions, find_tuners, fix_configs, scan_by_triton
from tangram.model.recurrent import StateMemory, count_state_bytes
from tests.core.cpu.test_purity import DELTA, TINY_CONVOLUTIONS, TINY_DELTA, TINY_MAMBA
from tests.small_engines import small_engine
from tests.tiny_configs import tiny_config

C, SLOTS = 32, 5


def replaced_by_a_kernel(plain: Callable[[], str]) -> Callable[[], str]:
    """As Transformers replaces a function where it can import one that is faster."""

    @wraps(plain)
    def call() -> str:
        return "kernel"

    return call


@replaced_by_a_kernel
def scan() -> str:
    return "torch"


def test_a_mixer_on_a_cpu_takes_no_kernel_that_is_installed() -> None:
    class Mixer:
        def forward(self, *, times: int = 1) -> str:
            return scan() * times

    assert Mixer().forward() == "kernel"
    chosen = choose_functions(Mixer.forward, torch.device("cpu"))
    assert chosen(Mixer(), times=2) == "torchtorch"
    assert chosen(Mixer()) == "torch"
    assert choose_functions(Mixer.forward, torch.device("cuda"))(Mixer()) == "kernel"


def attend_with_decays(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """What fla-core's `simple_gla` computes, token by token."""
    assert scale == 1.0 and state_v_first
    state, made = initial_state, []
    for at in range(q.shape[1]):
        state = g[:, at, :, None, None].exp() * state + v[:, at, :, :, None] * k[:, at, :, None]
        made.append((state * q[:, at, :, None]).sum(-1))
    return torch.stack(made, dim=1), state if output_final_state else None


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_is_a_linear_attention_with_decays(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fla", "fla.ops", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.simple_gla"].chunk_simple_gla = attend_with_decays  # type: ignore[attr-defined]
    rows, tokens, heads, inner, size = 2, 21, 4, 8, 16
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    sizes = (tokens, groups, size)
    hidden, dt = draw(rows, tokens, heads, inner), draw(rows, tokens, heads)
    arguments = hidden, dt, -draw(heads).exp(), draw(rows, *sizes), draw(rows, *sizes)
    options = {
        "D": draw(heads),
        "dt_bias": draw(heads),
        "initial_states": draw(rows, heads, inner, size),
        "dt_limit": (0.2, 1.5),
        "return_final_states": True,
        "dt_softplus": True,
        "chunk_size": 8,
    }
    expected = unwrap(mamba2_chunk_scan)(*arguments, **options)
    torch.testing.assert_close(scan_by_triton(*arguments, **options), expected)
    options["return_final_states"] = False
    torch.testing.assert_close(scan_by_triton(*arguments, **options), expected[0])


@triton.autotune([triton.Config({"SIZE": size}) for size in (16, 32, 64)], key=[])
@triton.jit
def known_kernel(SIZE: tl.constexpr) -> None:
    pass


@triton.heuristics({"EVEN": lambda given: True})
@triton.autotune([triton.Config({"SIZE": size}) for size in (16, 32)], key=[])
@triton.jit
def other_kernel(SIZE: tl.constexpr, EVEN: tl.constexpr) -> None:
    pass


def test_each_kernel_has_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is chosen for it, or else the first, however many modules import it."""
    for name in ("fla.one", "fla.two"):
        module = ModuleType(name)
        vars(module).update(known_kernel=known_kernel, other_kernel=other_kernel)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(mixer_kernels, "_CONFIGS", {"known_kernel": {"SIZE": 32, "num_warps": 4}})
    for _ in range(2):
        fix_configs()
        sizes = {
            name: [one.kwargs["SIZE"] for one in tuner.configs] for name, tuner in find_tuners()
        }
        assert sizes["known_kernel"] == [32] and sizes["other_kernel"] == [16]


class Operations(TorchDispatchMode):
    """Counts what a pass asks of a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.asked[str(function).split(".")[1]] += 1
        return function(*args, **kwargs or {})


# For these the host waits, or sends the device something: no graph can hold them.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh"}


@pytest.mark.parametrize("kind", [RowKind.DECODE, RowKind.SEAL])
@pytest.mark.parametrize(
    "config",
    [
        TINY_DELTA,
        TINY_CONVOLUTIONS,
        TINY_MAMBA,
        tiny_config("kimi_linear", linear_head_dim=16, linear_num_heads=4),
        tiny_config("granitemoehybrid"),
        tiny_config("qwen3_next", **DELTA),
    ],
    ids=lambda config: str(config.model_type),
)
@torch.inference_mode()
def test_a_pass_waits_for_nothing_that_its_states_are(
    config: PretrainedConfig, kind: RowKind, adopt_tiny: Callable[[PretrainedConfig], LoadedModel]
) -> None:
    loaded = adopt_tiny(config)
    retention = small_engine(loaded, chunk_tokens=C).admission.retentions[0]
    memory = StateMemory(loaded.states, SLOTS, torch.zeros(1, 4))
    tokens, rows, width = (1, 3, 4) if kind is RowKind.DECODE else (C, 1, 0)
    made = [
        Row("", slot, retention, kind, C, np.zeros(tokens, np.int64), np.zeros(0, np.int64), False)
        for slot in range(rows)
    ]
    states = memory.of_pass(made, width)
    given = torch.arange(width or C)[None]
    wanted, seen = torch.tensor([0]), Operations()
    with seen:
        loaded.model(
            input_ids=given,
            position_ids=given,
            past_key_values=states,
            use_cache=False,
            logits_to_keep=wanted,
            tangram=_NoAttention(),
        )
    assert seen.asked["index_copy_"] == len(loaded.states)
    assert not WAITS & seen.asked.keys()
    held = memory.read_all(torch.arange(2 * SLOTS + 2))
    changed = [
        sorted({int(place) for place in state.flatten(1).any(1).nonzero()})
        for state in held.values()
    ]
    newest = [SLOTS + 1, SLOTS + 2, SLOTS + 3]
    padding = 2 * SLOTS + 1
    allowed = {*newest, padding} if kind is RowKind.DECODE else {0}
    assert all(set(places) <= allowed for places in changed) and any(changed)
    size = sum(state.numel() * state.itemsize for state in held.values())
    assert size == count_state_bytes(loaded.states, SLOTS)
