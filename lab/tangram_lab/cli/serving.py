"""`tangram bench serving`: an engine under load, in this process."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tangram.cli import console
from tangram.cli.command import Command, CommandGroup
from tangram.cli.options import number
from tangram.config import MOST_TOKENS, EngineConfig
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tangram_lab.cli.options import with_measured_config

if TYPE_CHECKING:
    from tangram.engine.loop import Engine
    from tangram_lab.load.asks import Ask
    from tangram_lab.load.clock import LatencyLimits, Patience, Summary, TimedAnswer

commands = typer.Typer(
    cls=CommandGroup, help="An engine under load, in this process.", no_args_is_help=True
)
_TOKENS, _NUMBER, _MORE = Bounds(1, MOST_TOKENS), Bounds(1, 10**6), Bounds(0, MOST_TOKENS)
_SECONDS = Bounds(0.0, 1e9, open_low=True)

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="write the figures to this file (JSON)")
]
TtftLimit = Annotated[
    float | None, number(_SECONDS, "maximum time to first token of a request in the goodput")
]
TpotLimit = Annotated[
    float | None, number(_SECONDS, "maximum mean time per token of a request in the goodput")
]
Repeats = Annotated[int, number(Bounds(1, 1000), "number of runs, each with an empty cache")]


@commands.command(cls=Command)
@with_measured_config
def throughput(
    config: EngineConfig,
    requests: Annotated[int, number(_NUMBER, "requests, all at once")] = 64,
    input_tokens: Annotated[int, number(_TOKENS, "unshared prompt tokens of each request")] = 1024,
    output_tokens: Annotated[int, number(_TOKENS, "tokens of each answer")] = 128,
    shared_tokens: Annotated[int, number(_MORE, "tokens of a prefix that all prompts share")] = 0,
    repeats: Repeats = 1,
    output: Output = None,
) -> None:
    """Requests of equal lengths, all at once."""
    from tangram_lab.load.asks import alike, check_lengths

    own_tokens = shared_tokens + input_tokens
    check = partial(check_lengths, "input_tokens", requests, own_tokens, output_tokens)
    engine = _engine(config, check)
    asks = alike(
        requests,
        input_tokens,
        output_tokens,
        shared_tokens=shared_tokens,
        vocab_size=engine.geometry.vocab_size,
    )
    parts = [(f"run {number + 1}", _fresh(engine, asks)) for number in range(repeats)]
    _report(
        f"{requests} × ({shared_tokens} shared + {input_tokens} in, {output_tokens} out)",
        engine,
        parts,
        output,
    )


@commands.command("multi-turn", cls=Command)
@with_measured_config
def multi_turn(
    config: EngineConfig,
    sessions: Annotated[int, number(_NUMBER, "conversations; each turn runs in all at once")] = 16,
    history_tokens: Annotated[int, number(_MORE, "tokens before the first turn")] = 4096,
    turns: Annotated[int, number(Bounds(1, 10_000), "turns of each conversation")] = 3,
    user_tokens: Annotated[int, number(_TOKENS, "new tokens of each turn")] = 128,
    output_tokens: Annotated[int, number(_TOKENS, "tokens of each answer")] = 128,
    output: Output = None,
) -> None:
    """Conversations: each turn sends the whole history again and a few new tokens."""
    from tangram_lab.load.asks import check_lengths, draw_tokens, next_turn

    said_tokens = history_tokens + (turns - 1) * (user_tokens + output_tokens) + user_tokens
    check = partial(check_lengths, "history_tokens", sessions, said_tokens, output_tokens)
    engine, parts = _engine(config, check), []
    vocabulary = engine.geometry.vocab_size
    histories = [draw_tokens(history_tokens, vocabulary, 4, session) for session in range(sessions)]
    for turn in range(1, turns + 1):
        asks = next_turn(histories, turn, user_tokens, output_tokens, vocabulary)
        answers = _answer_all(engine, asks)
        histories = [
            ask.tokens + tuple(answer.token_ids) for ask, answer in zip(asks, answers, strict=True)
        ]
        parts.append((f"turn {turn}", answers))
    title = (
        f"{sessions} sessions × {history_tokens} tokens, +{user_tokens} in, {output_tokens} out a "
        "turn"
    )
    _report(title, engine, parts, output)


@commands.command(cls=Command)
@with_measured_config
def trace(
    config: EngineConfig,
    file: Annotated[Path, typer.Option(help="a Mooncake trace (JSON lines)")],
    seconds: Annotated[float, number(_SECONDS, "length of the trace to replay")] = 600.0,
    speed: Annotated[
        str, typer.Option(help="speed relative to the recording; several, comma-separated")
    ] = "1",
    hold_ttft_s: Annotated[
        float | None,
        number(_SECONDS, "stop when a tenth of the requests waits longer for a first token"),
    ] = None,
    ttft_limit_s: TtftLimit = None,
    tpot_limit_ms: TpotLimit = None,
    output: Output = None,
) -> None:
    """Replay of a recorded trace: its lengths, times and shared prefixes."""
    from tangram.model.load import read_text_config
    from tangram_lab.load.asks import read_trace
    from tangram_lab.load.clock import GivenUpError, LatencyLimits, Patience

    speeds, limits = (
        [positive("speed", text) for text in speed.split(",")],
        LatencyLimits(ttft_limit_s, tpot_limit_ms),
    )
    patience = None if hold_ttft_s is None else Patience(hold_ttft_s)
    vocabulary = read_text_config(config.model).vocab_size
    recorded = read_trace(file, seconds=seconds, speed=1.0, vocab_size=vocabulary)
    engine, parts, given_up = _engine(config), [], {}
    for factor in speeds:
        asks = [replace(ask, at_s=ask.at_s / factor) for ask in recorded]
        try:
            parts.append((f"speed {factor:g}", _fresh(engine, asks, patience)))
        except GivenUpError as error:
            given_up = {"given_up": f"speed {factor:g}: {error}"}
            console.output().print(given_up["given_up"])
            break
    _report(f"{file.name}, first {seconds:g} s", engine, parts, output, limits, given_up)


def positive(name: str, text: str) -> float:
    """`text` as a number. Raises `ConfigError` naming the option unless it is greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {text!r}, it must be a number greater than 0")
    return value


def _engine(config: EngineConfig, check: Callable[[int], None] | None = None) -> Engine:
    """An engine after a warm-up, which compiles its kernels.

    `check` raises if sequences of so many tokens are too short for the requests. It is called
    before the model is loaded, and again when the size of the KV cache is known.
    """
    from tangram.engine.setup.build import build_engine
    from tangram.engine.setup.option_checks import longest_sequence
    from tangram_lab.load.asks import alike
    from tangram_lab.load.clock import answer_all

    if check is not None:
        check(longest_sequence(config))
    engine = build_engine(config)
    if check is not None:
        check(engine.max_model_len)
    size = min(engine.max_model_len - 8, 2 * config.chunk_tokens + 8)
    with console.waiting("warming up"):
        answer_all(
            engine, alike(2, size, 4, shared_tokens=0, vocab_size=engine.geometry.vocab_size)
        )
    engine.clear_cache()
    return engine


def _fresh(
    engine: Engine, asks: Sequence[Ask], patience: Patience | None = None
) -> list[TimedAnswer]:
    engine.clear_cache()
    return _answer_all(engine, asks, patience)


def _answer_all(
    engine: Engine, asks: Sequence[Ask], patience: Patience | None = None
) -> list[TimedAnswer]:
    from tangram_lab.load.clock import answer_all

    with console.progress(counted=False) as bar:
        task = bar.add_task("requests", total=len(asks))
        return answer_all(
            engine, asks, lambda done: bar.update(task, completed=done), patience=patience
        )


def _report(
    title: str,
    engine: Engine,
    parts: Sequence[tuple[str, list[TimedAnswer]]],
    output: Path | None,
    limits: LatencyLimits | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print a row for each part, and write the JSON, which also contains `more`."""
    from tangram_lab.load.clock import NO_LIMITS, Summary

    summaries = {name: Summary.of(answers, limits or NO_LIMITS) for name, answers in parts}
    columns = _COLUMNS if limits in (None, NO_LIMITS) else _COLUMNS | _GOODPUT
    table = Table("", title=f"{title}; kv_retention {engine.config.kv_retention}")
    for column in columns:
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        table.add_row(name, *(cell(summary) for cell in columns.values()))
    console.output().print(table)
    stats = engine.stats()
    told = (
        f"{stats.pages_total:,} pages, {stats.capacity_tokens:,} tokens fit; "
        f"{stats.preemptions} preemptions"
    )
    if (drafted := stats.speculation) is not None:
        told += f"; {drafted.accepted:,} of {drafted.drafted:,} drafted tokens accepted"
    console.output().print(told)
    kept = {name: asdict(summary) for name, summary in summaries.items()}
    write_figures(output, title, engine.config, {"stats": asdict(stats), "parts": kept, **more})


def write_figures(
    output: Path | None, load: str, config: EngineConfig, figures: dict[str, Any]
) -> None:
    """Write `figures` and the setting of their measurement as JSON, if `output` is given."""
    from tangram_lab.environment import environment

    if output is not None:
        content = {
            "command": shlex.join(["tangram", *sys.argv[1:]]),
            "load": load,
            "environment": environment(),
            "config": {field.name: getattr(config, field.name) for field in fields(EngineConfig)},
            **figures,
        }
        output.write_text(json.dumps(content, indent=1) + "\n")


def percentiles(values: dict[str, float], digits: int) -> str:
    """The values as text: p50 / p90 / p99."""
    return " / ".join(f"{value:.{digits}f}" for value in values.values())


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "seconds": lambda summary: f"{summary.seconds:.2f}",
    "requests/s": lambda summary: f"{summary.requests_per_s:.2f}",
    "tokens/s": lambda summary: f"{summary.tokens_per_s:,.0f}",
    "prompt tokens/s": lambda summary: f"{summary.prompt_tokens / summary.seconds:,.0f}",
    "from cache": lambda summary: f"{summary.cached_share:.0%}",
    "TTFT s, p50 / 90 / 99": lambda summary: percentiles(summary.ttft_s, 2),
    "TPOT ms, p50 / 90 / 99": lambda summary: percentiles(summary.tpot_ms, 1),
}
_GOODPUT: dict[str, Callable[[Summary], str]] = {
    "goodput/s": lambda summary: f"{summary.goodput_per_s:.2f}"
}
