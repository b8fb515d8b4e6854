"""One conversation on a CPU with lookups and without: `python -m bench.speculation cpu`.

Engines with each method and without one answer the same prompts in turns, in one process, with the
embedded model in float32. Every prompt is asked once, so that no answer is remembered from an
earlier repeat. Free prose is written greedily, and once more with seeded sampling at temperature
0.8: a small model soon repeats itself when it is greedy. An answer may end early.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.speculation import figures
from bench.speculation.engines import (
    MeasuredEngine,
    build_measured,
    load_measured,
    with_speculation,
)
from bench.speculation.figures import PLAIN
from bench.speculation.options import make_parser, output_folder
from bench.speculation.runs import GREEDY, find_differences, measure_run
from bench.speculation.tasks import TASKS, WritingTask
from tangram.config import EngineConfig
from tangram.progress import show_progress
from tangram.types import SamplingParams
from tangram_lab.environment import environment
from tangram_lab.load.clock import TimedAnswer

METHODS: Mapping[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
}
SAMPLED = SamplingParams.state_all(temperature=0.8, seed=1)
# A name of the table: a task, and how its tokens are chosen.
ROWS = {
    "edit this file": ("edit", GREEDY),
    "quote the document": ("quote", GREEDY),
    "free prose": ("prose", GREEDY),
    "free prose, sampled": ("prose", SAMPLED),
}
LONGEST = 6000


def main(arguments: Sequence[str]) -> None:
    """Measure all tasks, keep the file after every prompt, print a table."""
    options = _parser().parse_args(arguments)
    loaded = load_measured("smollm2", random=False, device="cpu")
    config = EngineConfig(
        device="cpu", kv_retention=1.0, kv_cache_gib=1.0, max_num_seqs=1, max_model_len=LONGEST
    )
    engines = {
        name: build_measured(with_speculation(config, method), loaded)
        for name, method in METHODS.items()
    }
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.speculation", "cpu", *arguments]),
        "environment": environment(),
        "methods": METHODS,
        "rows": {row: {name: [] for name in METHODS} for row in ROWS},
    }
    path = output_folder(options) / "speculation_cpu.json"
    prompts = 1 if options.small else options.prompts
    # The first prompt of a row warms up its load.
    order = [(row, number) for row in ROWS for number in range(-1, prompts)]
    for row, number in show_progress(order, "Writing"):
        for name, found in _measure(engines, row, number, options).items():
            if number >= 0:
                content["rows"][row][name].append(found)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _print_table(content["rows"])


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("cpu", __doc__)
    parser.add_argument("--prompts", type=int, default=5, help="of each task")
    parser.add_argument("--tokens", type=int, default=192, help="most tokens of an answer")
    return parser


def _measure(
    engines: Mapping[str, MeasuredEngine], row: str, number: int, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The figures of one prompt of `row`, by method."""
    task, sampling = ROWS[row]
    codec = engines[PLAIN].engine.codec
    asked = TASKS[task](codec, number + 1, 16 if options.small else options.tokens)
    found, plain = {}, list[TimedAnswer]()
    for name, measured in engines.items():
        taken, answers = measure_run(
            measured, [asked.prompt], asked.output_tokens, to_the_end=False, sampling=sampling
        )
        plain = plain or answers
        taken["differences"] = find_differences(plain, answers)
        found[name] = taken | _measure_copy(asked, answers[0])
    return found


def _measure_copy(asked: WritingTask, answer: TimedAnswer) -> dict[str, float]:
    """How much of the answer is a copy, if the task is to copy: 1 is all."""
    if not asked.source:
        return {}
    matcher = SequenceMatcher(None, asked.source, answer.token_ids, autojunk=False)
    copied = sum(block.size for block in matcher.get_matching_blocks())
    return {"copied": copied / len(answer.token_ids)}


def _print_table(rows: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    table = Table(title="one conversation on a CPU, float32, median over prompts")
    for column in ("task", "method", "tokens/s", "spread", "of plain", "accepted", "differ"):
        table.add_column(column, justify="left" if column in ("task", "method") else "right")
    for row, methods in rows.items():
        for name, runs in methods.items():
            own, pairs = figures.speeds(runs), figures.paired_times_as_fast(runs, methods[PLAIN])
            share = figures.pool_runs(runs).get("acceptance")
            table.add_row(
                row,
                name,
                f"{statistics.median(own):.1f}" if own else "",
                f"{min(own):.1f} - {max(own):.1f}" if own else "",
                f"{statistics.median(pairs):.2f}" if pairs else "",
                "" if share is None else f"{share:.3f}",
                str(figures.count_differences(runs)),
            )
    Console(width=120).print(table)
