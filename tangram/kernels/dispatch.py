"""Which kernels execute a decode plan: by where the pool lies and its dtype, decided once per plan."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tangram.kernels import cpu, reference
from tangram.plan.form import DecodeRows, WorkPlan


class PlannedDecode(Protocol):
    """Append and attend for the decode rows of a plan, layer by layer."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, *,
        scaling: float, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write k, v [R, H, D] as each row's newest entry, then attend q [R, Q, D] → [R, Q, D].

        `pool` is [N_pages, Hp, 2, P, D]; `tables` and `lengths` are the flat int32 arrays of this step.
        """
        ...


class CpuDecode:
    """Compiled code for float32 pools in host memory."""

    def __init__(self, plan: WorkPlan, rows: DecodeRows) -> None:
        self._plan = cpu.CpuPlan.build(plan, rows)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, *,
        scaling: float, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See `PlannedDecode`."""
        return cpu.decode_step(
            q, k, v, pool, tables, lengths, self._plan, layer, scaling=scaling, softcap=softcap, sinks=sinks
        )


class ReferenceDecode:
    """The torch specification: any device, any dtype."""

    def __init__(self, plan: WorkPlan, rows: DecodeRows) -> None:
        self._plan, self._rows = plan, rows

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, *,
        scaling: float, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See `PlannedDecode`."""
        rows = self._rows
        at = (rows.table[:, layer], rows.column[:, layer], rows.length_index[:, layer])
        reference.append(k, v, pool, tables, lengths, *at)
        return reference.decode(
            q, pool, tables, lengths, self._plan, layer, scaling=scaling, softcap=softcap, sinks=sinks
        )


def _compiled(pool: Tensor) -> bool:
    return pool.dtype is torch.float32 and pool.device.type == "cpu"


def prepare(pool: Tensor) -> None:
    """Compile what decode over `pool` will need."""
    if _compiled(pool):
        cpu.warm_up()


def planned_decode(plan: WorkPlan, rows: DecodeRows, pool: Tensor) -> PlannedDecode:
    """The fastest kernels that can execute `plan` over `pool`."""
    return CpuDecode(plan, rows) if _compiled(pool) else ReferenceDecode(plan, rows)
