"""A log line every ten seconds in which the engine worked: load, speed, memory, reuse.

The figures are differences of two readings of the engine's counters. Nothing else is measured.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tangram.metrics import EngineStats

EVERY_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activity:
    """What an engine did between two readings, and what it holds at the second.

    `held_share` is of the pool's pages, by running requests; `cached_share` those kept for reuse.
    `reused_share` is of the prompt tokens that came into the batch; None if there were none.
    """

    requests_running: int
    requests_waiting: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    held_share: float
    cached_share: float
    reused_share: float | None

    @classmethod
    def between(cls, before: EngineStats, now: EngineStats, seconds: float) -> Activity:
        """What it did in so many `seconds`."""
        admitted = now.prompt_tokens - before.prompt_tokens
        reused = now.cached_tokens - before.cached_tokens
        computed = now.computed_prompt_tokens - before.computed_prompt_tokens
        return cls(
            requests_running=now.running,
            requests_waiting=now.waiting,
            prompt_tokens_per_s=computed / seconds,
            generated_tokens_per_s=(now.generated_tokens - before.generated_tokens) / seconds,
            held_share=now.held_share,
            cached_share=now.pages_cached / now.pages_total,
            reused_share=reused / admitted if admitted else None,
        )

    def __str__(self) -> str:
        """One line to read."""
        parts = [
            f"running {self.requests_running}, waiting {self.requests_waiting}",
            (
                f"prompt {self.prompt_tokens_per_s:,.1f} and generated "
                f"{self.generated_tokens_per_s:,.1f} tokens/s"
            ),
            f"KV pages {self.held_share:.1%} held, {self.cached_share:.1%} cached",
        ]
        if self.reused_share is not None:
            parts.append(f"{self.reused_share:.0%} of new prompts reused")
        return " · ".join(parts)

    @property
    def fields(self) -> dict[str, float | None]:
        """The numbers by name, for a JSON log line."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def has_worked(before: EngineStats, now: EngineStats) -> bool:
    """Whether the engine has made a step since `before`, or has requests now."""
    return now.steps != before.steps or now.running > 0 or now.waiting > 0


async def tell_activity(stats: Callable[[], EngineStats]) -> None:
    """Log what the engine does until cancelled; log nothing while it is idle."""
    before, before_s = await asyncio.to_thread(stats), time.monotonic()
    while True:
        await asyncio.sleep(EVERY_S)
        now, now_s = await asyncio.to_thread(stats), time.monotonic()
        if has_worked(before, now):
            activity = Activity.between(before, now, now_s - before_s)
            _log.info("%s", activity, extra={"fields": activity.fields})
        before, before_s = now, now_s
