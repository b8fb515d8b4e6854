"""`tangram bench naive`: decoding without a KV cache, and with it."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from tangram.cli import console
from tangram.cli.checks import check_start
from tangram.cli.options import Model, Weights, engine_option, number
from tangram.config import EngineConfig, ModelDtype
from tangram.limits import Bounds
from tangram_lab.cli.options import Device, Threads
from tangram_lab.cli.serving import Output, Repeats

if TYPE_CHECKING:
    from tangram_lab.naive import DecodingRun

_TOKENS = Bounds(1, 100_000)
Precision = Annotated[
    ModelDtype,
    engine_option("dtype", "dtype of weights and KV cache; in 16 bits tokens may differ"),
]


def naive(
    model: Model = "smollm2",
    tokens: Annotated[int, number(_TOKENS, "tokens to generate")] = 100,
    prompt_tokens: Annotated[int, number(_TOKENS, "tokens of the random prompt")] = 1,
    repeats: Repeats = 5,
    dtype: Precision = "float32",
    device: Device = "auto",
    load_format: Weights = "auto",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Generate the same tokens without a KV cache and with it: positions projected, and time.

    One run of each kind warms up and is not counted. If a token differs, nothing is reported. On a
    GPU both run without compilation and CUDA graphs.
    """
    config = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        load_format=load_format,
        threads=threads,
        kv_retention=1.0,
        enable_prefix_caching=False,
        enforce_eager=True,  # positions are counted in the model, which a graph would bypass
    )
    check_start(config)
    plain, cached = _measure(config, prompt_tokens, tokens, repeats)
    _show(tokens, prompt_tokens, plain, cached)
    if output is not None:
        figures = _figures(plain, cached)
        content = _setting(model, dtype, tokens, prompt_tokens, repeats) | figures
        output.write_text(json.dumps(content, indent=1) + "\n")


def _measure(
    config: EngineConfig, prompt_tokens: int, tokens: int, repeats: int
) -> tuple[list[DecodingRun], list[DecodingRun]]:
    """Runs without and with a cache, in turns; the first pair is not among them."""
    from tangram.engine.setup.build import engine_of
    from tangram.engine.setup.option_checks import load_checked, longest_sequence
    from tangram_lab import naive as lab
    from tangram_lab.load.asks import draw_tokens

    lab.check_naive_length(prompt_tokens, tokens, longest_sequence(config))
    loaded = load_checked(config)
    engine = engine_of(config, loaded)
    lab.check_naive_length(prompt_tokens, tokens, engine.max_model_len)
    prompt = draw_tokens(prompt_tokens, engine.geometry.vocab_size, 6)
    plain, cached = [], []
    with console.progress(counted=False) as bar:
        task = bar.add_task("runs", total=repeats + 1)
        for done in range(repeats + 1):
            plain.append(lab.decode_naively(loaded, prompt, tokens))
            cached.append(lab.decode_with_cache(engine, loaded, prompt, tokens))
            lab.check_equal(plain[-1], cached[-1])
            bar.update(task, completed=done + 1)
    return plain[1:], cached[1:]


def _show(
    tokens: int, prompt_tokens: int, plain: Sequence[DecodingRun], cached: Sequence[DecodingRun]
) -> None:
    table = Table(title=f"{tokens} tokens after a prompt of {prompt_tokens}, the same in all runs")
    for column in ("", "positions projected", "seconds, median", "least – most", "tokens/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in (("no cache", plain), ("KV cache", cached)):
        seconds = [run.seconds for run in runs]
        median = statistics.median(seconds)
        spread = f"{min(seconds):.3f} – {max(seconds):.3f}"
        speed = f"{tokens / median:,.1f}"
        table.add_row(name, f"{runs[0].positions:,}", f"{median:.3f}", spread, speed)
    console.output().print(table)


def _figures(plain: Sequence[DecodingRun], cached: Sequence[DecodingRun]) -> dict[str, Any]:
    return {
        name: {"positions": runs[0].positions, "seconds": [run.seconds for run in runs]}
        for name, runs in (("naive", plain), ("cached", cached))
    }


def _setting(
    model: str, dtype: str, tokens: int, prompt_tokens: int, repeats: int
) -> dict[str, Any]:
    from tangram_lab.environment import environment

    return {
        "command": shlex.join(["tangram", *sys.argv[1:]]),
        "environment": environment(),
        "model": model,
        "dtype": dtype,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
    }
