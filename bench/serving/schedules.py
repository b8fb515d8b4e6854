"""Continuous against static batching, step by step: `python -m bench.serving.schedules`.

One engine for each, one model, the same requests at once, of unequal lengths. Each step's rows and
time are recorded. The schedule of the run with the median time is kept whole.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tangram.config import EngineConfig
from tangram.engine.build import engine_of
from tangram.engine.loop import Engine
from tangram.model.load import load_model
from tangram_lab.environment import environment
from tangram_lab.load.asks import Ask, draw_tokens
from tangram_lab.load.clock import Summary, answer_all

RESULTS = Path(__file__).parents[1] / "results"
KINDS = ("continuous", "static")
Steps = list[dict[str, Any]]


def unequal(requests: int, vocab_size: int) -> list[Ask]:
    """Requests at once, with prompts of 32 to 640 tokens and answers of 8 to 96."""
    rng = np.random.default_rng(7)
    prompts = np.exp(rng.uniform(np.log(32), np.log(640), requests)).astype(int)
    answers = np.exp(rng.uniform(np.log(8), np.log(96), requests)).astype(int)
    return [
        Ask(draw_tokens(int(prompt), vocab_size, 8, number), int(answer))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


@contextmanager
def recording(engine: Engine) -> Iterator[Steps]:
    """The steps that `engine` runs inside: when each ended, its seconds, and its rows.

    A row is [request, kind, tokens].
    """
    steps: Steps = []
    scheduler, inner, begin = engine._scheduler, engine.step, time.perf_counter()
    schedule = scheduler.schedule
    rows: list[list[Any]] = []

    def note() -> Any:
        step = schedule()
        rows.clear()
        if step is not None:
            names = {one.cache.slot: one.request_id for one in scheduler.running if one.cache}
            for row in step.rows:
                request = int(names[row.slot].partition("#")[0])
                rows.append([request, row.kind.name.lower(), len(row.tokens)])
        return step

    def run() -> bool:
        from_s = time.perf_counter()
        ran = inner()
        to_s = time.perf_counter()
        if rows:
            timed = {"at": round(to_s - begin, 4), "seconds": round(to_s - from_s, 4)}
            steps.append(timed | {"rows": list(rows)})
        return ran

    scheduler.schedule, engine.step = note, run
    try:
        yield steps
    finally:
        del scheduler.schedule, engine.step


def measure(
    engines: dict[str, Engine], asks: Sequence[Ask], repeats: int
) -> dict[str, dict[str, Any]]:
    """For each engine all times, and summary and steps of the run with the median time."""
    runs: dict[str, list[tuple[float, dict[str, Any], Steps]]] = {name: [] for name in engines}
    answers: dict[str, list[list[int]]] = {}
    for number in range(repeats + 1):  # the first warms up
        for name, engine in engines.items():
            engine.clear_cache()
            with recording(engine) as steps:
                found = answer_all(engine, asks)
            answers[name] = [one.token_ids for one in found]
            if number:
                summary = asdict(Summary.of(found))
                runs[name].append((summary["seconds"], summary, steps))
        first, *others = answers.values()
        if any(other != first for other in others):
            raise SystemExit("the answers differ, nothing is reported")
    return {name: keep(found) for name, found in runs.items()}


def keep(runs: list[tuple[float, dict[str, Any], Steps]]) -> dict[str, Any]:
    seconds = [run[0] for run in runs]
    median = statistics.median_low(seconds)
    _, summary, steps = runs[seconds.index(median)]
    return {"seconds": seconds, "summary": summary, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "schedules.json")
    options = parser.parse_args()
    loaded = load_model("smollm2")
    config = {"kv_retention": 1.0, "kv_cache_gib": 1.0, "enable_prefix_caching": False}
    engines = {
        kind: engine_of(
            EngineConfig(scheduling=kind, max_num_seqs=options.max_num_seqs, **config), loaded
        )
        for kind in KINDS
    }
    asks = unequal(options.requests, loaded.geometry.vocab_size)
    figures = measure(engines, asks, options.repeats)
    content = {
        "command": shlex.join(["python", "-m", "bench.serving.schedules", *sys.argv[1:]]),
        "environment": environment(),
        "model": "smollm2",
        "options": {"max_num_seqs": options.max_num_seqs, "repeats": options.repeats} | config,
        "requests": [[len(ask.tokens), ask.output_tokens] for ask in asks],
        "schedules": figures,
    }
    options.output.write_text(json.dumps(content) + "\n")
    for kind, found in figures.items():
        low, high = min(found["seconds"]), max(found["seconds"])
        median = statistics.median(found["seconds"])
        print(f"{kind}: {median:.2f} s ({low:.2f}–{high:.2f}), {len(found['steps'])} steps")


if __name__ == "__main__":
    main()
