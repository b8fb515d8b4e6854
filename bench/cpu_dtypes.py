"""CPU time of one thread in float32 and in bfloat16: `python -m bench.cpu_dtypes`.

One engine a dtype, in turns, with the same weights and prompts. CPU time is that of the process, so
other programs on the machine change it little, which a waiting clock would not allow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tangram.calibrate.texts import make_texts
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import load_model
from tangram.types import Event, Request, SamplingParams
from tangram_lab.environment import environment

RESULT = Path(__file__).parent / "results" / "cpu_dtypes.json"
CONTEXT, SHORT, TURN = 1630, 260, 30  # tokens of prompts; TURN are those of a new message


def ask(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, float, list[list[int]]]:
    """CPU seconds until each prompt has its first token and of a step after that; the answers."""
    answers: list[list[int]] = [[] for _ in prompts]

    def take(event: Event) -> None:
        answers[int(event.request_id)].extend(event.token_ids)

    params = SamplingParams.state_all(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin = time.process_time()
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), params, take))
    while not all(answers):
        engine.step()
    first, had = time.process_time(), sum(map(len, answers))
    while engine.busy:
        engine.step()
    steps = (sum(map(len, answers)) - had) / len(prompts)
    return first - begin, (time.process_time() - first) / max(steps, 1), answers


def measure(engine: Engine, texts: Sequence[Sequence[int]], repeat: int) -> dict[str, float]:
    """CPU seconds of each load; the first token of a prompt is new in each repeat."""
    first = 1000 + repeat
    prompt = [first, *texts[0][: CONTEXT - 1]]
    prefill, step, answers = ask(engine, [prompt], 25)
    turn, _, _ = ask(engine, [[*prompt, *answers[0], *texts[1][:TURN]]], 1)
    _, apart, _ = ask(engine, [[first, *text[: SHORT - 1]] for text in texts], 9)
    _, shared, _ = ask(engine, [[*prompt, *text[:TURN]] for text in texts], 9)
    return {
        f"prefill of {CONTEXT:,} tokens": prefill,
        f"first token of a second turn, {TURN} new tokens": turn,
        f"decode step, batch 1, {CONTEXT:,} tokens of context": step,
        f"decode step, batch 8, {SHORT} tokens of context each": apart,
        f"decode step, batch 8, {CONTEXT:,} tokens of context shared": shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    engines = {}
    for dtype in ("float32", "bfloat16"):
        loaded = load_model("smollm2", dtype=dtype)
        config = EngineConfig(dtype=dtype, scorer="keydiff", kv_cache_gib=0.5, threads=1)
        engines[dtype] = engine_of(config, loaded)
    texts = [
        loaded.tokenizer.encode(text)[:CONTEXT] for text in make_texts(8, min_characters=14_000)
    ]
    found: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in engines}
    for repeat in range(options.repeats):
        for dtype, engine in engines.items():
            found[dtype].append(measure(engine, texts, repeat))
    table = Table(title="CPU seconds of one thread: median (range)")
    for column in ("what", *found):
        table.add_column(column)
    for name in found["float32"][0]:
        cells = []
        for runs in found.values():
            values = [run[name] for run in runs]
            cells.append(f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")
        table.add_row(name, *cells)
    Console(width=120).print(table)
    content = {
        "command": "python -m bench.cpu_dtypes",
        "options": vars(options),
        "environment": environment(),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_seconds": found,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
