"""An estimate of a grid's duration, from the time of one passage."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tangram_lab.accuracy.engines import ModelBench
from tangram_lab.accuracy.forced import ForcedText
from tangram_lab.accuracy.methods import Method
from tangram_lab.accuracy.passages import TAIL_TOKENS
from tangram_lab.accuracy.run import PlannedCell


def minutes(bench: ModelBench, plans: Sequence[PlannedCell]) -> float:
    """The estimated time of `plans`: their work, at the speed of one chunk computed now."""
    config = Method("full").config(bench.base)
    tokens = [
        (7 * place) % bench.loaded.geometry.vocab_size
        for place in range(config.chunk_tokens + TAIL_TOKENS)
    ]
    forced = ForcedText(config, bench.loaded)
    forced.logits(tokens)  # compiles
    begin = time.perf_counter()
    forced.logits(tokens)
    pace = (time.perf_counter() - begin) / len(tokens)
    return sum(plan.work for plan in plans) * pace / 60
