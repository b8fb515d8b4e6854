"""Ahead-of-time load balancing: splits follow from the budgets alone (Tangram, AOT load balancing).

The split map is computed when the batch changes, from the number of entries that each head is
expected to hold. Lengths may grow under it. With Ω_l the summed budget of layer l and N workers,
the paper gives each head group S = max(1, round(Φ / τ_l)) parts of its own length, τ_l = Ω_l / N.

This module differs in six points:

- Parts are rounded up, and τ grows until they fit the workers, because one task too many makes all
  wait. Only a batch that fills the workers by itself is rounded to the nearest.
- Heads are split, not groups.
- A head's share is of its entries, the raw tail included, and not of its budget alone: the tail is
  as long in every head.
- Ω_l sums over the R rows of the batch as well as over heads, so that a batch which fills the
  workers by itself is hardly split.
- N is `workers · tasks_per_worker`. With few workers, one task each balances badly: 3 equal heads
  on 2 workers would be 3 whole tasks, so one worker would do twice the work of the other.
- Short heads are not cut into parts that take longer to start and to merge than to read.

Worked example: 1 row, 1 layer, 3 heads of budgets 800, 300, 100 and 2 workers with 4 tasks each. Ω
= 1200 and τ = 150. Rounding up [5.33, 2, 0.67] would give 9 tasks, so τ grows to 169 and S = [5, 2,
1]: 8 tasks of budget share 160, 150 and 100, started in that order.
"""

from __future__ import annotations

import numpy as np

from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.split import fit_parts, require_positive, split_evenly


def plan_aot(
    rows: DecodeRows,
    workers: int,
    *,
    tasks_per_worker: int = 4,
    tile_tokens: int = 128,
    min_tokens: int = 1,
) -> WorkPlan:
    """Split each (row, layer, KV head) in proportion to its budget over `workers` threads or CTAs.

    Shares consist of whole tiles of `tile_tokens` (a multiple of 16): while a head is short, only
    as many of its shares have work as it has tiles. No part's budget is below `min_tokens`, as in
    `plan_workqueue`. Raises `ConfigError` naming the argument that is out of range.
    """
    require_positive(workers=workers, tasks_per_worker=tasks_per_worker, min_tokens=min_tokens)
    total = rows.budget.sum(axis=(0, 2), keepdims=True)
    tau = np.maximum(total / (workers * tasks_per_worker), np.finfo(np.float64).tiny)
    budget = rows.budget.swapaxes(0, 1)
    parts = fit_parts(
        budget, tau.swapaxes(0, 1), workers * tasks_per_worker, np.floor(budget / min_tokens)
    )
    return split_evenly(rows, np.maximum(parts, 1).swapaxes(0, 1), tile_tokens)
