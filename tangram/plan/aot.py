"""Ahead-of-time load balancing: splits follow from the budgets alone (Tangram, AOT load balancing).

Budgets do not depend on context length, so neither does the split map: it is computed when the batch changes, and
lengths may grow under it. With Ω_l the summed budget of layer l and N workers, the paper gives each head group
S = max(1, round(Φ / τ_l)) parts of its own length, τ_l = Ω_l / N.

Three things are ours. Heads are split, not groups. Ω_l sums over the R rows of the batch as well as over heads, so that
a batch which fills the workers by itself is hardly split. And N is `workers · tasks_per_worker`: with few workers one
task each balances badly (3 equal heads on 2 workers would be 3 whole tasks, one worker doing twice the other's work).

Worked example: 1 row, 1 layer, 3 heads of budgets 0.8, 0.3, 0.1 and 2 workers with 4 tasks each: Ω = 1.2, τ = 0.15,
S = round([5.33, 2, 0.67]) = [5, 2, 1]: 8 tasks of budget share 0.16, 0.15 and 0.1, started in that order.
"""

from __future__ import annotations

import numpy as np

from tangram.plan.form import DecodeRows, WorkPlan
from tangram.plan.split import require_positive, split_evenly


def plan_aot(rows: DecodeRows, workers: int, *, tasks_per_worker: int = 4, tile_tokens: int = 128) -> WorkPlan:
    """Split each (row, layer, KV head) in proportion to its budget over `workers` threads or CTAs.

    `tile_tokens` (a multiple of 16) is the unit in which shares are dealt out: while a head is short, only as many of
    its shares have work as it has tiles. Raises `ConfigError` naming the argument that is out of range.
    """
    require_positive(workers=workers, tasks_per_worker=tasks_per_worker)
    total = rows.budget.sum(axis=(0, 2), keepdims=True)
    tau = np.maximum(total / (workers * tasks_per_worker), np.finfo(np.float64).tiny)
    parts = np.maximum(1, np.rint(rows.budget / tau)).astype(np.int64)
    return split_evenly(rows, parts, tile_tokens)
