"""Compiles the loops of planners, or loads them from Numba's cache, before the first step."""

from __future__ import annotations

import numpy as np

from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import build_forest
from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.loops import address_rows
from tangram.plan.packing import plan_packing
from tangram.plan.records import ADDRESS
from tangram.plan.workqueue import Grain
from tangram.types import Int32

SHARED_TOKENS = 1 << 14


def rehearse_planning() -> tuple[WorkPlan, Int32]:
    """A plan of two rows that share a chunk, and their lengths; all loops have run then."""
    address = np.empty((1, 2, 1), ADDRESS)
    rows, budget = np.arange(2), np.empty((2, 1, 1), np.int32)
    heads, entries = np.zeros((1, 1), ADDRESS), np.ones((2, 1), np.int32)
    address_rows(heads, rows, np.zeros_like(rows), rows, entries, address, budget)
    batch = DecodeRows(address, budget, (None,), 16)
    plan_aot(batch, 1)
    lengths = np.full(2, 2 * SHARED_TOKENS, np.int32)
    forest = build_forest(np.ones((2, 1), np.int64), np.ones(2, np.int64), np.ones(2, np.int64))
    kept = np.full((1, 1), SHARED_TOKENS, np.int32)
    return plan_packing(batch, lengths, forest, kept, Grain(4), group=1, cost=CostModel()), lengths
