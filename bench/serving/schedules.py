"""Continuous against static batching, step by step: `python -m bench.serving.schedules`.

One engine, the same requests at once, of unequal lengths. A static batch ends before the next one
is asked for. Each step's rows and time are recorded. The schedule of the run with the median time
is kept whole.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import load_model
from tangram_lab.environment import environment
from tangram_lab.load.asks import Ask, draw_tokens
from tangram_lab.load.clock import Summary, TimedAnswer, answer_all

RESULTS = Path(__file__).parents[1] / "results"
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


def batches_of(asks: Sequence[Ask], places: int) -> dict[str, list[list[int]]]:
    """The numbers of `asks` that are asked at once: all, or batches that fill the `places`.

    Batches are filled as the scheduler would: the shortest prompts first.
    """
    order = sorted(range(len(asks)), key=lambda number: len(asks[number].tokens))
    filled = [order[at : at + places] for at in range(0, len(order), places)]
    return {"continuous": [list(range(len(asks)))], "static": filled}


def answer_in_turn(
    engine: Engine, asks: Sequence[Ask], batches: Sequence[Sequence[int]]
) -> tuple[list[TimedAnswer], Steps]:
    """The answers to `asks`, one of `batches` after the other, and the steps.

    All are asked when the first batch is.
    """
    answers, steps = dict[int, TimedAnswer](), Steps()
    begin = time.perf_counter()
    for batch in batches:
        waited_s = time.perf_counter() - begin
        with recording(engine, batch) as own:
            found = answer_all(engine, [asks[number] for number in batch])
        steps += [step | {"at": round(step["at"] + waited_s, 4)} for step in own]
        for number, answer in zip(batch, found, strict=True):
            times_s = [waited_s + at_s for at_s in answer.times_s]
            answers[number] = replace(answer, times_s=times_s)
    return [answers[number] for number in range(len(asks))], steps


@contextmanager
def recording(engine: Engine, numbers: Sequence[int]) -> Iterator[Steps]:
    """The steps that `engine` runs inside: when each ended, its seconds, and its rows.

    A row is [request, kind, tokens]; `numbers` are those of the requests.
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
                request = numbers[int(names[row.slot].partition("#")[0])]
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


def measure(engine: Engine, asks: Sequence[Ask], repeats: int) -> dict[str, dict[str, Any]]:
    """For both ways all times, and summary and steps of the run with the median time."""
    ways = batches_of(asks, engine.config.max_num_seqs)
    runs: dict[str, list[tuple[float, dict[str, Any], Steps]]] = {name: [] for name in ways}
    answers: dict[str, list[list[int]]] = {}
    for number in range(repeats + 1):  # the first warms up
        for name, batches in ways.items():
            engine.clear_cache()
            found, steps = answer_in_turn(engine, asks, batches)
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
    engine = engine_of(EngineConfig(max_num_seqs=options.max_num_seqs, **config), loaded)
    asks = unequal(options.requests, loaded.geometry.vocab_size)
    figures = measure(engine, asks, options.repeats)
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
