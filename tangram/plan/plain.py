"""The planner that does not split: one task for each (row, layer, KV head).

Every other planner is compared with it. Worked example: 2 rows, 1 full layer, 2 KV heads give 4
tasks `OPEN [0, length)`, each writing its output directly. In a layer with a window of 128 tokens
the same tasks read `WINDOW 128`.
"""

from __future__ import annotations

import numpy as np

from tangram.plan.form import TILE_MULTIPLE, DecodeRows, WorkPlan
from tangram.plan.split import split_evenly


def plan_plain(rows: DecodeRows) -> WorkPlan:
    """One task for each (row, layer, KV head): no partial results, no merge."""
    return split_evenly(rows, np.ones(rows.shape, np.int64), TILE_MULTIPLE)
