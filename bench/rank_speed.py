"""One model on one device and on several CPU processes: `python -m bench.rank_speed`.

The processes share the cores of one machine, so this cannot show a gain. It shows what the
collectives and the second process cost. The model has random weights, since the embedded one has
three KV heads, which two ranks cannot share. All engines have the same weights and profile, and
their answers must agree before the clock starts. Each repeat asks all of them in turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from bench.stress.server import surroundings
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import build_engine
from tangram.types import Event, Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "rank_speed.json"
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PROMPT, CONTEXT, BATCH, ANSWER = 512, 100, 8, 9


@dataclass(frozen=True)
class RankCase:
    """`ranks` processes with `threads` each."""

    ranks: int
    threads: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''} of {self.threads} thread(s)"


CASES = (RankCase(1, 1), RankCase(1, 2), RankCase(2, 1))


def save_checkpoint(folder: Path) -> None:
    """Random weights and the embedded model's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SHAPE), dtype=torch.float32, trust_remote_code=False
    )
    model.save_pretrained(folder)
    load_tokenizer("smollm2").save_pretrained(folder)


def ask(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, float, list[list[int]]]:
    """Seconds until each prompt has its first token and of a step after that; the answers."""
    answers: list[list[int]] = [[] for _ in prompts]

    def take(event: Event) -> None:
        answers[int(event.request_id)].extend(event.token_ids)

    params = SamplingParams.state_all(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), params, take))
    while not all(answers):
        engine.step()
    first = time.perf_counter()
    while engine.busy:
        engine.step()
    return first - begin, (time.perf_counter() - first) / (tokens - 1), answers


def measure(engine: Engine, seed: int) -> tuple[dict[str, float], list[list[int]]]:
    """Seconds of each load, and the answers to its prompts, which are new with each seed."""
    random = np.random.default_rng(seed)
    engine.clear_cache()
    prefill, _, one = ask(engine, [random.integers(3, 49000, PROMPT).tolist()], 2)
    batch = [random.integers(3, 49000, CONTEXT).tolist() for _ in range(BATCH)]
    _, step, several = ask(engine, batch, ANSWER)
    found = {
        f"prefill of {PROMPT:,} tokens": prefill,
        f"decode step, batch {BATCH}, {CONTEXT} tokens of context each": step,
    }
    return found, [*one, *several]


def serve(pipe: Connection, folder: str, case: RankCase) -> None:
    """Measure one engine whenever asked, in a process that has no other."""
    engine = build_engine(
        EngineConfig(
            folder,
            dtype="float32",
            device="cpu",
            kv_retention=1.0,
            kv_cache_gib=0.25,
            threads=case.threads,
            tensor_parallel_size=case.ranks,
        )
    )
    pipe.send(None)
    while (seed := pipe.recv()) is not None:
        pipe.send(measure(engine, seed))
    engine.stop()


def compare(folder: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The seconds of each case and repeat; the first answers are compared and not counted."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for case in CASES:
        pipes[case.name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, folder, case)).start()
        pipes[case.name].recv()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pipes}
    for seed in range(repeats + 1):
        answers = []
        for name, pipe in pipes.items():
            pipe.send(seed)
            seconds, answer = pipe.recv()
            answers.append(answer)
            if seed:
                found[name].append(seconds)
        if any(answer != answers[0] for answer in answers):
            raise RuntimeError(f"the answers of {', '.join(pipes)} differ")
    for pipe in pipes.values():
        pipe.send(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    where = surroundings()
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder))
        found = compare(folder, options.repeats)
    table = Table(title="Seconds: median (range)")
    names = list(next(iter(found.values()))[0])
    for column in ("processes", *names):
        table.add_column(column)
    for case, runs in found.items():
        values = [[run[name] for run in runs] for name in names]
        table.add_row(
            case, *(f"{statistics.median(v):.3f} ({min(v):.3f}-{max(v):.3f})" for v in values)
        )
    Console(width=120).print(table)
    content = {
        "command": "python -m bench.rank_speed",
        "options": vars(options),
        "environment": where,
        "shape": SHAPE,
        "seconds": found,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
