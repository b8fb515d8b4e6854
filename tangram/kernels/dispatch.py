"""Which kernels execute a decode plan: by where the pool lies and its dtype, decided once per plan."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tangram.kernels import cpu, reference
from tangram.plan.form import DecodeRows, WorkPlan


class PlannedDecode(Protocol):
    """Append and attend for the decode rows of a plan."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Write k, v [R, H, D] as each row's newest entry, then attend q [R, Q, D] → [R, Q, D]."""
        ...


class CpuDecode:
    """Compiled code for float32 pools in host memory."""

    def __init__(self, plan: WorkPlan, rows: DecodeRows, *, pool: Tensor, tables: Tensor, lengths: Tensor) -> None:
        self._plan = cpu.CpuPlan.build(plan, rows)
        self._pool, self._tables, self._lengths = pool, tables, lengths

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """See `PlannedDecode`."""
        return cpu.decode_step(
            q, k, v, self._pool, self._tables, self._lengths, self._plan, layer,
            scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip


class ReferenceDecode:
    """The torch specification: any device, any dtype."""

    def __init__(self, plan: WorkPlan, rows: DecodeRows, *, pool: Tensor, tables: Tensor, lengths: Tensor) -> None:
        self._plan, self._rows = plan, rows
        self._pool, self._tables, self._lengths = pool, tables, lengths

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """See `PlannedDecode`."""
        rows = self._rows
        reference.append(
            k, v, self._pool, self._tables, self._lengths,
            rows.table[:, layer], rows.column[:, layer], rows.length_index[:, layer],
        )  # fmt: skip
        return reference.decode(
            q, self._pool, self._tables, self._lengths, self._plan, layer,
            scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip


def planned_decode(
    plan: WorkPlan, rows: DecodeRows, *, pool: Tensor, tables: Tensor, lengths: Tensor
) -> PlannedDecode:
    """The fastest kernels that can execute `plan` over `pool` [N_pages, Hp, 2, P, D]."""
    compiled = pool.dtype is torch.float32 and pool.device.type == "cpu"
    kernels = CpuDecode if compiled else ReferenceDecode
    return kernels(plan, rows, pool=pool, tables=tables, lengths=lengths)
