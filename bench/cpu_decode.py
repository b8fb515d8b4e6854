"""Decode speed on the CPU, compared with Transformers' own generate.

Both have the same weights and prompts, in one process. Transformers' model is its own, since an
engine packs weights. Prefill is left out on both sides: the time
counts from the last first token to the end. The tokens at ρ = 1.0 must equal generate's in every
repeat, or nothing is reported. N is chosen so that no chunk ends within it. Sealing a chunk that
decode has filled is measured by itself and reported per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import StoppingCriteriaList

from tangram.calibrate.texts import make_texts
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.model.load import LoadedModel, load_model
from tangram.types import Event, Request, SamplingParams
from tangram_lab.environment import environment

RESULTS = Path(__file__).parent / "results"


def generate_seconds(
    loaded: LoadedModel, prompts: list[list[int]], tokens: int
) -> tuple[float, list[list[int]]]:
    """Seconds of `tokens` decode steps of the batch in Transformers' generate, and the tokens."""
    ids = torch.tensor(prompts)
    times: list[float] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    model: Any = loaded.model
    answers = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        do_sample=False,
        max_new_tokens=tokens + 1,
        min_new_tokens=tokens + 1,
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    return times[-1] - times[0], answers[:, ids.shape[1] :].tolist()


def engine_seconds(
    engine: Engine, prompts: list[list[int]], tokens: int
) -> tuple[float, list[list[int]]]:
    """Seconds of `tokens` decode steps of the batch in `engine`, and the tokens."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}

    def take(event: Event) -> None:
        answers[event.request_id].extend(event.token_ids)

    params = SamplingParams.state_all(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), params, take))
    while not all(answers.values()):
        engine.step()
    done = sum(map(len, answers.values()))
    begin = time.perf_counter()
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - begin
    steps = (sum(map(len, answers.values())) - done) / len(prompts)
    return seconds * tokens / steps, list(answers.values())


def seal_seconds(loaded: LoadedModel, config: EngineConfig, prompt: list[int]) -> float:
    """Seconds to seal one chunk that decode has filled.

    It is the step after its last token, or at ρ 1.0 the one after the answer.
    """
    engine = engine_of(config, loaded)
    length = len(prompt) // config.chunk_tokens * config.chunk_tokens - 1
    params = SamplingParams.state_all(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.submit(Request("0", tuple(prompt[:length]), params, lambda event: None))
    slowest, worked = 0.0, True
    while worked:
        sealed = engine.stats().sealed_chunks
        begin = time.perf_counter()
        worked = engine.step()
        if engine.stats().sealed_chunks > sealed:
            # The last chunk counts: decode has filled it
            slowest = time.perf_counter() - begin
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    loaded, plain = (load_model("smollm2", dtype=options.dtype) for _ in range(2))
    plain.model.set_attn_implementation("sdpa")
    prompts = [
        loaded.tokenizer.encode(text)[: options.context]
        for text in make_texts(8, min_characters=16_000)
    ]
    shared = {"scorer": "keydiff", "kv_cache_gib": 2.0, "enable_prefix_caching": False}
    configs = {rho: EngineConfig(kv_retention=rho, **shared) for rho in (1.0, 0.5)}
    rows: list[dict[str, Any]] = []
    full, half = (engine_of(configs[rho], loaded) for rho in (1.0, 0.5))
    for batch in (1, 8):
        own, steps = prompts[:batch], options.tokens
        contenders: dict[str, Callable[[], tuple[float, list[list[int]]]]] = {
            "transformers generate": partial(generate_seconds, plain, own, steps),
            "tangram, ρ 1.0": partial(engine_seconds, full, own, steps),
            "tangram, ρ 0.5": partial(engine_seconds, half, own, steps),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(
            options.repeats
        ):  # in turns, so that a slow minute of the machine affects all
            answers = {}
            for name, measure in contenders.items():
                taken_s, answers[name] = measure()
                seconds[name].append(taken_s)
            if answers["transformers generate"] != answers["tangram, ρ 1.0"]:
                raise SystemExit(
                    f"batch {batch}: answers differ from generate's, nothing is reported"
                )
        for name, taken in seconds.items():
            speeds = [batch * options.tokens / value for value in taken]
            rows.append(
                {
                    "batch": batch,
                    "what": name,
                    "tokens_per_s": statistics.median(speeds),
                    "all": speeds,
                }
            )
    sealing = {
        f"{rho}": seal_seconds(loaded, config, prompts[0]) for rho, config in configs.items()
    }
    report(rows, sealing, configs[0.5].chunk_tokens, options)


def report(
    rows: list[dict[str, Any]], sealing: dict[str, float], chunk_tokens: int, options: Any
) -> None:
    """Print the table and keep the raw figures."""
    table = Table(
        title=f"decode, {options.context} tokens of context, {options.tokens} steps, "
        f"{options.dtype}"
    )
    for column in ("batch", "what", "tokens/s (median)", "spread", "of generate"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        base = next(r["tokens_per_s"] for r in rows if r["batch"] == row["batch"])
        spread = f"{min(row['all']):.1f} - {max(row['all']):.1f}"
        share = f"{row['tokens_per_s'] / base:.2f}"
        table.add_row(str(row["batch"]), row["what"], f"{row['tokens_per_s']:.1f}", spread, share)
    Console().print(table)
    for rho, seconds in sealing.items():
        each = seconds / chunk_tokens * 1e3
        print(
            f"sealing a decode-completed chunk at rho {rho}: {seconds:.2f} s, {each:.1f} ms a token"
        )
    RESULTS.mkdir(exist_ok=True)
    content = {
        "command": "python -m bench.cpu_decode",
        "options": vars(options),
        "environment": environment(),
        "rows": rows,
        "sealing_seconds": sealing,
    }
    kind = "" if options.dtype == "float32" else f"-{options.dtype}"
    (RESULTS / f"cpu_decode{kind}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
