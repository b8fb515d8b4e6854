"""What smaller weights cost in answers, and what they give in memory and speed.

On a CPU bfloat16, and each form of `--quantization` beside it, are compared with float32; on a GPU
float16 and each form with bfloat16. All read the same passages of real text. The cost is the
divergence of the probabilities of the next token, and the share of places where both have the
same likeliest token. A model with a shape alone (`--model bench/models/qwen3-4b`) has random
weights, and no cost. `--repeats 0` measures the cost alone.

Each form has a process of its own. All start at once, since most of that is compilation on a GPU,
and a form that is not ready within `--ready-within` is left out and named. Then they take turns:
prefill of a prompt, and decode behind another. At ρ 1.0, without the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.engine.text.codec import TextCodec
from tangram.model.load import LoadedModel, load_configured
from tangram.types import Event, Request, SamplingParams
from tangram_lab.accuracy.passages import RealText
from tangram_lab.accuracy.sample_prompts import Alignment, filler_token
from tangram_lab.environment import environment
from tangram_lab.load.asks import draw_tokens

RESULTS = Path(__file__).parent / "results"
# Of each device: the forms, each with its dtype and its `--quantization`. The others are compared
# with the first.
FORMS: Mapping[str, Mapping[str, tuple[str, str | None]]] = {
    "cpu": {
        "float32": ("float32", None),
        "bfloat16": ("bfloat16", None),
        "int8": ("auto", "int8"),
        "int4": ("auto", "int4"),
    },
    "cuda": {
        "bfloat16": ("bfloat16", None),
        "float16": ("float16", None),
        "fp8": ("bfloat16", "fp8"),
        "int8": ("bfloat16", "int8"),
        "int4": ("bfloat16", "int4"),
    },
}


class Form:
    """A form's process, seen from here. What failed is in `failed`."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._limit_s: float = options.ready_within
        self._process = context.Process(target=serve_form, args=(name, options, folder, theirs))
        self._begun = time.monotonic()
        self._process.start()
        theirs.close()
        self.failed: str | None = None

    def receive(self) -> dict[str, Any]:
        """What it sends next; nothing if it failed, or sent nothing in time, and is ended."""
        try:
            if self._pipe.poll(max(0.0, self._begun + self._limit_s - time.monotonic())):
                found: dict[str, Any] = self._pipe.recv()
                return found
            self.failed = f"not ready within {self._limit_s:g} s"
        except EOFError:
            self.failed = "its process ended, with the reason above"
        self.end()
        return {}

    def measure(self) -> dict[str, Any]:
        """Seconds of one turn."""
        self._begun = time.monotonic()
        self._pipe.send("measure")
        return self.receive()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def serve_form(name: str, options: argparse.Namespace, folder: Path, pipe: Connection) -> None:
    """Load `name`, keep its answers in `folder`, and time a turn whenever the pipe says so."""
    begun = time.perf_counter()
    random = not has_weights(options.model)
    config = make_config(options, name, random=random)
    loaded = load_configured(config)
    found: dict[str, Any] = {"load_s": time.perf_counter() - begun}
    passages = read_passages(loaded, options, random=random)
    if not random:
        torch.save((passages, next_token_logs(loaded, passages)), folder / f"{name}.pt")
    engine = None
    if options.repeats:
        prompt = tuple(token for passage in passages for token in passage)
        if len(prompt) < options.prompt_tokens:
            raise SystemExit(f"the passages have {len(prompt)} tokens: ask for more of them")
        begun = time.perf_counter()
        engine = engine_of(config, loaded)
        time_turn(engine, prompt, options)  # what is compiled at its first use
        found["start_s"] = time.perf_counter() - begun
    found["weight_bytes"] = loaded.weight_bytes  # an engine packs weights, and may copy one
    pipe.send(found)
    while engine is not None:
        pipe.recv()
        pipe.send(time_turn(engine, prompt, options))


def time_turn(
    engine: Engine, prompt: tuple[int, ...], options: argparse.Namespace
) -> dict[str, float]:
    """Seconds of a prefill, and of a token of decode."""
    prefill_s, _ = time_answer(engine, prompt[: options.prompt_tokens], 3)
    _, token_s = time_answer(engine, prompt[: options.context_tokens], options.tokens)
    return {"prefill_s": prefill_s, "token_s": token_s}


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
    params = SamplingParams.state_all(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def note(event: Event) -> None:
        times.append(time.perf_counter())

    engine.submit(Request("0", prompt, params, note))
    while engine.busy:
        engine.step()
    gaps = [after - before for before, after in pairwise(times[1:])]
    return times[1] - times[0], statistics.median(gaps)


def main() -> None:
    """Start the forms, compare their answers, and let them take turns."""
    options = parse()
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.weights", *sys.argv[1:]]),
        "options": {name: str(value) for name, value in vars(options).items() if name != "output"},
        "environment": environment(),
        "figures": {},
        "failed": {},
    }
    figures: dict[str, dict[str, Any]] = content["figures"]
    with TemporaryDirectory() as folder:
        forms = {name: Form(name, options, Path(folder)) for name in options.forms}
        try:
            for name, form in forms.items():
                if found := form.receive():
                    cost = compare_files(Path(folder), options.forms[0], name)
                    figures[name] = found | cost | {"prefill_s": [], "token_s": []}
                report(content, forms, options)
            for _ in range(options.repeats):
                for name in [name for name, form in forms.items() if form.failed is None]:
                    for figure, seconds in forms[name].measure().items():
                        figures[name][figure].append(seconds)
                    report(content, forms, options)
        finally:
            for form in forms.values():
                form.end()
    print_table(figures, options)


def parse() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--passage-tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--context-tokens", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32, help="that are decoded in a turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each form")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=tuple(FORMS))
    parser.add_argument(
        "--forms", nargs="+", help="these alone; the others are compared with the first"
    )
    parser.add_argument(
        "--ready-within", type=float, default=600, help="seconds to start all forms, and of a turn"
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "weights.json")
    options = parser.parse_args()
    known = FORMS[options.device]
    options.forms = options.forms or list(known)
    if unknown := set(options.forms) - set(known):
        parser.error(f"--forms: {min(unknown)} is not one of {', '.join(known)}")
    return options


def has_weights(model: str) -> bool:
    """Whether `model` is more than a shape."""
    folder = Path(model)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def make_config(options: argparse.Namespace, form: str, *, random: bool) -> EngineConfig:
    """The engine's options for weights in `form`."""
    dtype, quantization = FORMS[options.device][form]
    return EngineConfig(
        model=options.model,
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
        load_format="dummy" if random else "auto",
        scorer="keydiff" if random else None,
        kv_retention=1.0,
        kv_cache_gib=2.0 if options.device == "cuda" else 0.5,
        max_model_len=8192,
        max_num_seqs=1,  # one sequence is measured, and each more is a graph to capture
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


def compare_files(folder: Path, first: str, name: str) -> dict[str, list[float]]:
    """What the answers of `name` cost beside those of `first`, if both are in `folder`."""
    files = [folder / f"{form}.pt" for form in (first, name)]
    if not all(file.exists() for file in files):
        return {}
    (passages, expected), (_, found) = [torch.load(file, mmap=True) for file in files]
    return compare(expected, found, passages)


def report(content: dict[str, Any], forms: Mapping[str, Form], options: argparse.Namespace) -> None:
    """Keep the raw figures; what failed is named once."""
    for name, form in forms.items():
        if form.failed is not None and name not in content["failed"]:
            content["failed"][name] = form.failed
            print(f"left out: {name}, {form.failed}", flush=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")


def print_table(figures: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """The table of the terminal."""
    table = Table(title=f"weights of {options.model}, median (range)")
    titles = ("weights", "MB", "divergence", "same token", "nats", "start s", "prefill/s")
    for column in (*titles, "decode/s"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for form, found in figures.items():
        table.add_row(
            form,
            f"{found['weight_bytes'] / 1e6:.0f}",
            *(
                f"{statistics.mean(found[name]):.4f}" if name in found else "–"
                for name in ("divergence", "same_token", "nats_a_token")
            ),
            f"{found['start_s']:.0f}" if "start_s" in found else "–",
            rates(options.prompt_tokens, found["prefill_s"]),
            rates(1, found["token_s"]),
        )
    Console().print(table)


def rates(tokens: int, seconds: list[float]) -> str:
    """Tokens a second: the median and the range."""
    if not seconds:
        return "–"
    low, high = tokens / max(seconds), tokens / min(seconds)
    return f"{tokens / statistics.median(seconds):.1f} ({low:.1f}-{high:.1f})"


if __name__ == "__main__":
    main()
