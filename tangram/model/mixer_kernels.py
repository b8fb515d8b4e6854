"""The kernels of recurrent layers: Triton's on a GPU with fla-core, and torch's elsewhere.

Transformers takes the functions of fla-core when it is imported, if that can be imported, for
tensors on a CPU, too. Mamba-2 and convolutions it computes by torch. Mamba-2 is a linear attention
whose decays depend on the token (Dao and Gu, 2405.21060, section 5), which fla-core has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction, unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_SCAN = "mamba2_chunk_scan"  # as Transformers' modules name it


def choose_functions(forward: Any, device: torch.device) -> FunctionType:
    """`forward` of a mixer, which calls what computes on `device`."""
    inner: Any = unwrap(forward)
    called = {name: inner.__globals__.get(name) for name in inner.__code__.co_names}
    chosen = dict[str, Any]()
    if device.type == "cpu":
        chosen = {name: unwrap(value) for name, value in called.items() if isfunction(value)}
    elif _SCAN in called and find_spec("fla"):
        import_module("fla.ops.simple_gla")  # now, before `fix_configs`
        chosen = {_SCAN: scan_by_triton}
    made = FunctionType(
        inner.__code__,
        inner.__globals__ | chosen,
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


def scan_by_triton(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor | None,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    **options: Any,
) -> tuple[Tensor, Tensor] | Tensor:
    """Mamba-2 over rows, as Transformers' `mamba2_chunk_scan` with the softplus of `dt`.

    `hidden_states` [n, T, H, P], `dt` [n, T, H], `A` [H], `B` and `C` [n, T, groups, N], `D` and
    `dt_bias` [H], states float32 [n, H, P, N]. The output is float32, like that of torch.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    steps = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
    heads, kind = hidden_states.shape[2], hidden_states.dtype
    keys, queries = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (B, C))
    made, states = chunk_simple_gla(
        queries,
        keys,
        (hidden_states * steps[..., None]).to(kind),
        g=A.float() * steps.float(),
        scale=1.0,
        initial_state=initial_states,
        output_final_state=return_final_states,
        state_v_first=True,
    )
    whole = made.float() + D[:, None] * hidden_states.float()
    return (whole, states) if return_final_states else whole


# Of the configurations that fla-core tries; of a kernel that is not named here, its first.
_CONFIGS: Mapping[str, Mapping[str, int]] = {
    "l2norm_fwd_kernel": {"BT": 16, "num_warps": 4},
    "chunk_local_cumsum_scalar_kernel": {"num_warps": 2},
    "chunk_local_cumsum_vector_kernel": {"BS": 32, "num_warps": 4},
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_warps": 2},
    "recompute_w_u_fwd_kernel": {"num_warps": 4, "num_stages": 2},
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 32, "num_warps": 4, "num_stages": 2},
    "chunk_fwd_kernel_h": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 2},
    "chunk_fwd_kernel_o": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
    "chunk_kda_fwd_kernel_inter_solve_fused": {"BK": 64, "num_warps": 4},
    "recompute_w_u_fwd_kda_kernel": {"num_warps": 4, "num_stages": 2},
    "chunk_gla_fwd_kernel_o": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 2},
}


def fix_configs() -> None:
    """Each kernel of fla-core that is imported has one configuration from now on.

    Otherwise Triton times them all at the first call, and takes the fastest: two processes may sum
    in two orders.
    """
    for name, tuner in find_tuners():
        wanted = _CONFIGS.get(name, {}).items()
        tuner.configs = [
            next(
                (config for config in tuner.configs if wanted <= config.all_kwargs().items()), None
            )
            or tuner.configs[0]
        ]


def find_tuners() -> Iterator[tuple[str, Any]]:
    """The names of fla-core's kernels that Triton tunes, each with its `Autotuner`."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fla" and module is not None:
            for part in list(vars(module).values()):
                layers = [part]  # decorators, of which the tuner is one, and the kernel
                while hasattr(layers[-1], "fn"):
                    layers.append(layers[-1].fn)
                yield from (
                    (layers[-1].__name__, layer) for layer in layers if hasattr(layer, "configs")
                )
