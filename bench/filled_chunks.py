"""How long rows wait for chunks that decode has filled: `python -m bench.filled_chunks`.

The real scheduler and cache manager run a load in which every request decodes, under a clock of
their own: a step takes --decode-ms, --chunk-ms more for each chunk that it computes, and --token-us
for each other token of a prompt. So it shows what scheduling makes of given times. The figures are
the time between two tokens of a request, behind its first, and of its longest wait. The shape is
that of Qwen3-4B with a profile for ρ 0.25. The default times are
estimates for an H200, made of steps that were measured there as a whole.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import numpy as np

from bench.host_steps import PROFILE
from bench.kernels.budgets import load
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.step import RowKind, Step
from tangram.config import EngineConfig
from tangram.engine.schedule.scheduler import Scheduler, StepLimits
from tangram.engine.schedule.token_sequence import TokenSequence, sequence_of
from tangram.types import Float64, Geometry


@dataclass(frozen=True)
class SimulatedTimes:
    """Milliseconds of a step that decodes, of each chunk in it, and of each token of a tail."""

    decode_ms: float
    chunk_ms: float
    token_ms: float

    def of(self, step: Step) -> float:
        """Milliseconds of `step`."""
        taken_ms = self.decode_ms if step.decode_rows else 0.0
        for row in step.rows[step.decode_rows :]:
            whole = row.kind is RowKind.SEAL
            taken_ms += self.chunk_ms if whole else self.token_ms * len(row.tokens)
        return taken_ms


@dataclass
class SimulatedLoad:
    """`rows` requests at once, and when each of their tokens came."""

    scheduler: Scheduler
    times: SimulatedTimes
    now_ms: float = 0.0
    came_ms: dict[TokenSequence, list[float]] = field(default_factory=dict)

    def run(self) -> list[Float64]:
        """The times between tokens of each request, in ms."""
        scheduler = self.scheduler
        while (step := scheduler.schedule()) is not None:
            self.now_ms += self.times.of(step)
            sampled = {row.slot for row in step.rows if row.sample}
            served = [
                one
                for one in scheduler.running
                if one.cache is not None and one.cache.slot in sampled
            ]
            scheduler.commit(step)
            for sequence in served:
                self.came_ms.setdefault(sequence, []).append(self.now_ms)
                sequence.expect()
                sequence.extend([0])
                if sequence.complete:
                    scheduler.remove(sequence)
        return [np.diff(came) for came in self.came_ms.values()]


def make_load(rows: int, prompt: int, answer: int, times: SimulatedTimes) -> SimulatedLoad:
    """`rows` requests of `prompt` tokens for `answer` tokens each, all waiting."""
    profile = load(PROFILE, None, page_tokens=None, heads_per_page=None)
    shape, windows = profile.model, (None,) * len(profile.layers)
    heads = shape.kv_heads, shape.query_heads, shape.head_dim
    layout = Layout.build(
        Geometry(len(windows), *heads, 64, prompt + answer, windows),
        chunk_tokens=profile.chunk_tokens,
        page_tokens=profile.page_tokens,
        heads_per_page=profile.heads_per_page,
        max_tokens=prompt + answer,
        groups=profile.groups,
        sealed_pages=profile.sealed_pages,
    )
    retention = Retention(profile.kv_retention, layout, "profile", scorer="keydiff")
    pages = rows * layout.most_pages(prompt + answer)
    cache = CacheManager([retention], total_pages=pages, max_sequences=rows, prefix_caching=True)
    # Few chunks are computed in passes of their own.
    limits = StepLimits(rows, EngineConfig.max_num_batched_tokens, EngineConfig.prompt_patience)
    scheduler = Scheduler(cache, limits, passes_apart=lambda prefill: len(prefill) <= 4)
    for number in range(rows):
        tokens = np.full(prompt, number)
        limit = prompt + answer - 1
        scheduler.add(sequence_of(str(number), number, retention, "", tokens, limit))
    return SimulatedLoad(scheduler, times)


def main() -> None:
    """Simulate the load and print its times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"rows": 128, "prompt": 512, "answer": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, estimate in {"decode-ms": 7.5, "chunk-ms": 11.0, "token-us": 20.0}.items():
        parser.add_argument(f"--{name}", type=float, default=estimate)
    options = parser.parse_args()
    times = SimulatedTimes(options.decode_ms, options.chunk_ms, options.token_us / 1e3)
    simulated = make_load(options.rows, options.prompt, options.answer, times)
    gaps = simulated.run()
    every = np.concatenate(gaps)
    median, most = np.median(every), np.quantile(every, 0.99)
    longest = [own.max() for own in gaps]
    print(
        f"between tokens: median {median:.1f} ms, p99 {most:.1f} ms ({most / median:.2f} x), "
        f"longest {np.median(longest):,.0f} ms in half of the answers, "
        f"{max(longest):,.0f} ms in one; all answers took {simulated.now_ms / 1e3:.1f} s"
    )


if __name__ == "__main__":
    main()
