"""What smaller weights cost in answers, and what they give in memory and speed, on the CPU.

Bfloat16, and each form of `--quantization` beside it, read the same passages of real text as
float32. The cost is the divergence of the probabilities of the next token from those in float32,
and the share of places where both have the same likeliest token. Then engines take turns: prefill of a prompt, and decode behind
another. At ρ 1.0, without the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tangram.config import CHOICES, EngineConfig
from tangram.engine.build import engine_of
from tangram.engine.loop import Engine
from tangram.engine.text import TextCodec
from tangram.lab.accuracy.passages import RealText
from tangram.lab.accuracy.prompts import Alignment, filler_token
from tangram.lab.environment import environment
from tangram.model.load import LoadedModel, load_configured
from tangram.types import Event, Request, SamplingParams

RESULTS = Path(__file__).parent / "results"
PLAIN = "float32"


def next_token_logs(loaded: LoadedModel, passages: list[tuple[int, ...]]) -> list[Tensor]:
    """The log-probabilities [T, V] of the token after each of a passage's, in one pass."""
    loaded.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        found = [
            loaded.model(torch.tensor([passage])).logits[0].float().log_softmax(-1)
            for passage in passages
        ]
    loaded.model.set_attn_implementation("tangram")
    return found


def compare(
    expected: list[Tensor], found: list[Tensor], passages: list[tuple[int, ...]]
) -> dict[str, list[float]]:
    """For each passage the divergence in nats, the share of equal tokens, and nats a token."""
    return {
        "divergence": [
            float((ours.exp() * (ours - theirs)).sum(-1).mean())
            for ours, theirs in zip(expected, found, strict=True)
        ],
        "same_token": [
            float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
            for ours, theirs in zip(expected, found, strict=True)
        ],
        "nats_a_token": [
            float(-logs[:-1].gather(1, torch.tensor(passage)[1:, None]).mean())
            for logs, passage in zip(found, passages, strict=True)
        ],
    }


def time_answer(engine: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and the median seconds of the tokens after it."""
    times = [time.perf_counter()]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def note(event: Event) -> None:
        times.append(time.perf_counter())

    engine.submit(Request("0", prompt, params, note))
    while engine.busy:
        engine.step()
    gaps = [after - before for before, after in pairwise(times[1:])]
    return times[1] - times[0], statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--passage-tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--context-tokens", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    forms = {PLAIN: (PLAIN, None), "bfloat16": ("bfloat16", None)}
    forms |= {form: ("bfloat16", form) for form in CHOICES["quantization"] if form != "fp8"}
    engines, figures = {}, dict[str, dict[str, Any]]()
    expected: list[Tensor] = []
    passages: list[tuple[int, ...]] = []
    for form, (dtype, quantization) in forms.items():
        config = EngineConfig(
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,  # type: ignore[arg-type]
            kv_retention=1.0,
            kv_cache_gib=0.5,
            enable_prefix_caching=False,
            device="cpu",
        )
        loaded = load_configured(config)
        if form == PLAIN:
            text = RealText(options.passages, options.passage_tokens)
            codec = TextCodec(loaded.tokenizer)
            aligned = Alignment(options.passage_tokens, filler_token(codec))
            passages = list(text.prompts(codec, aligned).pieces)
        found = next_token_logs(loaded, passages)
        expected = expected or found
        figures[form] = compare(expected, found, passages) | {"weight_bytes": loaded.weight_bytes}
        figures[form] |= {"prefill_s": [], "token_s": []}
        engines[form] = engine_of(config, loaded)
    long = tuple(token for passage in passages for token in passage)
    if len(long) < options.prompt_tokens:
        parser.error(f"the passages have {len(long)} tokens: ask for more of them")
    for _ in range(options.repeats):
        for form, engine in engines.items():
            prefill_s, _ = time_answer(engine, long[: options.prompt_tokens], 3)
            _, token_s = time_answer(engine, long[: options.context_tokens], options.tokens)
            figures[form]["prefill_s"].append(prefill_s)
            figures[form]["token_s"].append(token_s)
    report(figures, options)


def report(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table and keep the raw figures."""
    table = Table(title="rounded weights of smollm2, median (range)")
    for column in ("weights", "MB", "divergence", "same token", "nats", "prefill/s", "decode/s"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for form, found in figures.items():
        prefill = sorted(options.prompt_tokens / seconds for seconds in found["prefill_s"])
        decode = sorted(1 / seconds for seconds in found["token_s"])
        table.add_row(
            form,
            f"{found['weight_bytes'] / 1e6:.0f}",
            f"{statistics.mean(found['divergence']):.4f}",
            f"{statistics.mean(found['same_token']):.1%}",
            f"{statistics.mean(found['nats_a_token']):.3f}",
            f"{statistics.median(prefill):.0f} ({prefill[0]:.0f}-{prefill[-1]:.0f})",
            f"{statistics.median(decode):.1f} ({decode[0]:.1f}-{decode[-1]:.1f})",
        )
    Console().print(table)
    content = {
        "command": "python -m bench.weights",
        "options": vars(options),
        "environment": environment(),
        "figures": figures,
    }
    (RESULTS / "weights.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
