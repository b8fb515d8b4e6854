"""The real scheduler without a model, for the cases of /learn: each sampled token is 0."""

from __future__ import annotations

from typing import Literal

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.config import EngineConfig
from tangram.engine.schedule.scheduler import Scheduler, StepLimits
from tangram.engine.schedule.token_sequence import TokenSequence, sequence_of
from tangram.types import Geometry

PROMPT_TOKENS = 4  # less than a chunk: one step computes it whole


def count_steps(
    answers: list[int], most: int, scheduling: Literal["continuous", "static"]
) -> list[list[int]]:
    """The requests of each step; request i generates `answers[i]` tokens.

    A static batch has `most` requests, and ends before the next one comes.
    """
    longest = PROMPT_TOKENS + max(answers)
    layout = Layout.lay_out_uncompressed(
        Geometry(1, 1, 1, 8, 1, longest, (None,)),
        chunk_tokens=64,
        page_tokens=16,
        heads_per_page=1,
        max_tokens=longest,
    )
    retention = Retention(1.0, layout, "")
    cache = CacheManager([retention], total_pages=1000, max_sequences=most, prefix_caching=False)
    scheduler = Scheduler(cache, StepLimits(most, EngineConfig.max_num_batched_tokens))
    steps, size = [], len(answers) if scheduling == "continuous" else most
    for begin in range(0, len(answers), size):
        for number, tokens in enumerate(answers[begin : begin + size], begin):
            limit = PROMPT_TOKENS + tokens - 1
            prompt = (number,) * PROMPT_TOKENS
            scheduler.add(sequence_of(str(number), number, retention, "", prompt, limit))
        while scheduler.running or scheduler.waiting:
            steps.append(sorted(_run_step(scheduler)))
    return steps


def _run_step(scheduler: Scheduler) -> list[int]:
    step = scheduler.schedule()
    if step is None:
        raise RuntimeError("nothing runs though a request waits")
    rows = {row.slot for row in step.rows}
    served = [one for one in scheduler.running if one.cache is not None and one.cache.slot in rows]
    scheduler.commit(step)
    for sequence in served:
        _sample(scheduler, sequence)
    return [int(sequence.request_id) for sequence in served]


def _sample(scheduler: Scheduler, sequence: TokenSequence) -> None:
    sequence.expect()
    sequence.extend([0])
    if sequence.complete:
        scheduler.remove(sequence)
