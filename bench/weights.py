"""What smaller weights cost in answers, and what they give in memory and speed.

On a CPU bfloat16, and each form of `--quantization` beside it, are compared with float32; on a GPU
each form with bfloat16. All read the same passages of real text. The cost is the divergence of the
probabilities of the next token, and the share of places where both have the same likeliest token.
A model with a shape alone (`--model bench/models/qwen3-4b`) has random weights, and no cost. Then
engines take turns: prefill of a prompt, and decode behind another. At ρ 1.0, without the prefix
cache.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tangram.config import EngineConfig
from tangram.engine.build import engine_of
from tangram.engine.loop import Engine
from tangram.engine.text import TextCodec
from tangram.lab.accuracy.passages import RealText
from tangram.lab.accuracy.sample_prompts import Alignment, filler_token
from tangram.lab.environment import environment
from tangram.lab.load.asks import draw_tokens
from tangram.model.load import LoadedModel, load_configured
from tangram.types import Event, Request, SamplingParams

RESULTS = Path(__file__).parent / "results"
# Of each device: the dtype that the others are compared with, and the forms of its products.
CPU_FORMS = {"float32": None, "bfloat16": None, "int8": "int8", "int4": "int4"}
GPU_FORMS = {"bfloat16": None, "fp8": "fp8", "int8": "int8", "int4": "int4"}


def next_token_logs(loaded: LoadedModel, passages: list[tuple[int, ...]]) -> list[Tensor]:
    """The log-probabilities [T, V] of the token after each of a passage's, in one pass."""
    loaded.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        found = [
            loaded.model(torch.tensor([passage], device=loaded.device))
            .logits[0]
            .float()
            .log_softmax(-1)
            .cpu()
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
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "weights.json")
    options = parser.parse_args()
    forms = GPU_FORMS if options.device == "cuda" else CPU_FORMS
    random = not has_weights(options.model)
    engines, figures = dict[str, Engine](), dict[str, dict[str, Any]]()
    expected: list[Tensor] = []
    passages: list[tuple[int, ...]] = []
    for form, quantization in forms.items():
        config = make_config(options, form, quantization, random=random)
        loaded = load_configured(config)
        figures[form] = {"weight_bytes": loaded.weight_bytes, "prefill_s": [], "token_s": []}
        if not passages:
            passages = read_passages(loaded, options, random=random)
        if not random:
            found = next_token_logs(loaded, passages)
            expected = expected or found
            figures[form] |= compare(expected, found, passages)
        engines[form] = engine_of(config, loaded)
    long = tuple(token for passage in passages for token in passage)
    if len(long) < options.prompt_tokens:
        parser.error(f"the passages have {len(long)} tokens: ask for more of them")
    for engine in engines.values():  # what is compiled at its first use
        time_answer(engine, long[: options.prompt_tokens], 3)
    for _ in range(options.repeats):
        for form, engine in engines.items():
            prefill_s, _ = time_answer(engine, long[: options.prompt_tokens], 3)
            _, token_s = time_answer(engine, long[: options.context_tokens], options.tokens)
            figures[form]["prefill_s"].append(prefill_s)
            figures[form]["token_s"].append(token_s)
            report(figures, options)


def has_weights(model: str) -> bool:
    """Whether `model` is more than a shape."""
    folder = Path(model)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def make_config(
    options: argparse.Namespace, form: str, quantization: str | None, *, random: bool
) -> EngineConfig:
    """The engine's options for weights in `form`."""
    return EngineConfig(
        model=options.model,
        dtype="float32" if form == "float32" else "bfloat16",
        quantization=quantization,  # type: ignore[arg-type]
        load_format="dummy" if random else "auto",
        scorer="keydiff" if random else None,
        kv_retention=1.0,
        kv_cache_gib=2.0 if options.device == "cuda" else 0.5,
        max_model_len=8192,
        enable_prefix_caching=False,
        device=options.device,
    )


def read_passages(
    loaded: LoadedModel, options: argparse.Namespace, *, random: bool
) -> list[tuple[int, ...]]:
    """Passages of real text, or of random tokens for `random` weights."""
    if random:
        sizes = range(options.passages)
        vocabulary = loaded.geometry.vocab_size
        return [draw_tokens(options.passage_tokens, vocabulary, 8, number) for number in sizes]
    codec = TextCodec(loaded.tokenizer)
    aligned = Alignment(options.passage_tokens, filler_token(codec))
    return list(RealText(options.passages, options.passage_tokens).prompts(codec, aligned).pieces)


def report(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Keep the raw figures, and print the table if they are complete."""
    content = {
        "command": shlex.join(["python", "-m", "bench.weights", *sys.argv[1:]]),
        "options": {name: str(value) for name, value in vars(options).items()},
        "environment": environment(),
        "figures": figures,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    if any(len(found["token_s"]) < options.repeats for found in figures.values()):
        return
    table = Table(title=f"weights of {options.model}, median (range)")
    for column in ("weights", "MB", "divergence", "same token", "nats", "prefill/s", "decode/s"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for form, found in figures.items():
        prefill = sorted(options.prompt_tokens / seconds for seconds in found["prefill_s"])
        decode = sorted(1 / seconds for seconds in found["token_s"])
        table.add_row(
            form,
            f"{found['weight_bytes'] / 1e6:.0f}",
            *(
                f"{statistics.mean(found[name]):.4f}" if name in found else "–"
                for name in ("divergence", "same_token", "nats_a_token")
            ),
            f"{statistics.median(prefill):.0f} ({prefill[0]:.0f}-{prefill[-1]:.0f})",
            f"{statistics.median(decode):.1f} ({decode[0]:.1f}-{decode[-1]:.1f})",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
