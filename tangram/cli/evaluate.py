"""`tangram eval`: how accurate the ways of keeping KV entries are, on one model, in one table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer
from rich.markdown import Markdown

from tangram.cli.checks import check_start
from tangram.cli.command import rename_options
from tangram.cli.console import output as standard_output
from tangram.cli.console import progress, tell
from tangram.cli.evaluate_options import (
    Align,
    AlignTokens,
    Alphas,
    CalibrationSamples,
    Chunks,
    Context,
    Locomo,
    Methods,
    MostQuestions,
    Plot,
    Quick,
    ReportFile,
    ResultFile,
    Retentions,
    Samples,
    Scopes,
    Scorers,
    Seed,
    Sinks,
    Suites,
    Text,
    Window,
)
from tangram.cli.options import (
    CacheDtype,
    CacheGib,
    Device,
    Dtype,
    Eager,
    Gate,
    Heads,
    MaxBatched,
    MaxSeqs,
    Model,
    Page,
    Threads,
    Utilization,
    Weights,
)
from tangram.compress.profile import ALPHA, SINK_TOKENS
from tangram.config import EngineConfig
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.lab.accuracy.engines import ModelBench
    from tangram.lab.accuracy.passages import RealText
    from tangram.lab.accuracy.prompts import Questions
    from tangram.lab.accuracy.results import AnyCell
    from tangram.lab.accuracy.run import PlannedCell

Number = TypeVar("Number", int, float)

RENAMED = rename_options(scorers="scorer", retentions="kv-retention", scopes="scope")
# What --quick settles by itself.
_SETTLED = (
    "suites",
    "methods",
    "samples",
    "context_tokens",
    "max_questions",
    "locomo",
    "text",
    "chunk_tokens",
    "alphas",
    "scope",
    "sink_tokens",
    "window_tokens",
    "align",
    "align_tokens",
    "calibration_samples",
    "seed",
)


def evaluate(
    context: typer.Context,
    model: Model = "smollm2",
    quick: Quick = False,
    suites: Suites = "ruler, multiturn",
    methods: Methods = "full, uniform, dynamic, static",
    samples: Samples = None,
    context_tokens: Context = 4096,
    max_questions: MostQuestions = None,
    locomo: Locomo = None,
    text: Text = None,
    calibration_samples: CalibrationSamples = 50,
    output: ResultFile = Path("results.json"),
    report: ReportFile = None,
    plot: Plot = None,
    dtype: Dtype = "auto",
    load_format: Weights = "auto",
    device: Device = "auto",
    kv_cache_gib: CacheGib = None,
    gpu_memory_utilization: Utilization = 0.9,
    kv_cache_dtype: CacheDtype = "auto",
    scorer: Scorers = None,
    kv_retention: Retentions = None,
    chunk_tokens: Chunks = "512",
    alphas: Alphas = f"{ALPHA:g}",
    scope: Scopes = None,
    sink_tokens: Sinks = None,
    window_tokens: Window = None,
    gate: Gate = None,
    max_num_seqs: MaxSeqs = 32,
    max_num_batched_tokens: MaxBatched = 2048,
    align: Align = True,
    align_tokens: AlignTokens = None,
    page_tokens: Page = 16,
    heads_per_page: Heads = 4,
    enforce_eager: Eager = False,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Ask MODEL the questions of suites under each way of keeping KV entries, and grade its
    replies.
    """
    from tangram.lab.accuracy.methods import Grid
    from tangram.lab.accuracy.plot import check_plot
    from tangram.lab.accuracy.quick import NEEDLES, RETENTIONS, TEXT

    scorers = None if scorer is None else _words(scorer)
    retentions = None if kv_retention is None else _numbers("retentions", kv_retention, float)
    asked: list[Questions | RealText]
    if quick:
        _refuse_settled(context)
        grid, asked = (
            Grid(["full", "static"], scorers, RETENTIONS if retentions is None else retentions),
            [NEEDLES, TEXT],
        )
    else:
        grid = Grid(
            cast(Any, _words(methods)),
            scorers,
            (0.7, 0.5, 0.3) if retentions is None else retentions,
            _numbers("chunk_tokens", chunk_tokens, int),
            _numbers("alphas", alphas, float),
            cast(Any, _words(scope)) if scope is not None else None,
            SINK_TOKENS if sink_tokens is None else sink_tokens,
            window_tokens,
        )
        asked = _choose_suites(
            suites, samples, context_tokens, seed, max_questions, {"locomo": locomo, "text": text}
        )
    base = EngineConfig(
        model=model,
        page_tokens=page_tokens,
        heads_per_page=heads_per_page,
        gate=gate,
        kv_cache_gib=kv_cache_gib,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        load_format=load_format,
        enforce_eager=enforce_eager,
        device=device,
        threads=threads,
    )
    if plot is not None:
        check_plot(plot)
    check_start(base)
    from tangram.lab.accuracy.evaluation import compare

    command = shlex.join(["tangram", *sys.argv[1:]])
    if quick:
        tell(_QUICK.format(kept=", ".join(f"{value:g}" for value in grid.retentions)))
    with Bar() as bar:
        cells = compare(
            base,
            grid,
            asked,
            align=align,
            calibration_samples=None if quick else calibration_samples,
            output=output,
            command=command,
            watch=bar,
            align_tokens=align_tokens,
            before=_say_how_long if quick else None,
        )
    _publish(cells, report, plot)


_QUICK = (
    "12 questions about 8 contexts and 5 passages of real text, with everything kept and as served "
    "at ρ {kept}. With 135 M parameters on two CPU cores that takes less than six minutes; how "
    "long here is said when MODEL is loaded."
)


def _say_how_long(bench: ModelBench, plans: Sequence[PlannedCell]) -> None:
    from tangram.lab.accuracy.pace import minutes

    if plans:
        tell(f"About {minutes(bench, plans):.1f} minutes from here.")


def _refuse_settled(context: typer.Context) -> None:
    """Raise `ConfigError` for an option that --quick would not look at."""
    for name in _SETTLED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"{name} is {context.params[name]}, with --quick that is settled: leave one of "
                "them out"
            )


def _choose_suites(
    suites: str,
    samples: int | None,
    context_tokens: int,
    seed: int,
    max_questions: int | None,
    files: dict[str, Path | None],
) -> list[Questions | RealText]:
    """By suite. Raises `ConfigError` for one that is not known, and for what none of
    them looks at.
    """
    from tangram.lab.accuracy.passages import SUITE, RealText
    from tangram.lab.accuracy.prompts import Questions, parse_suites

    found = parse_suites(suites, undivided=(SUITE,))
    for option, suite in (("locomo", "locomo"), ("text", SUITE)):
        if files[option] is not None and suite not in found:
            raise ConfigError(
                f"{option} is {files[option]}, but suites is {suites}: add {suite} there, or leave "
                "the path out"
            )
    if max_questions is not None and list(found) == [SUITE]:
        raise ConfigError(f"max_questions is {max_questions}, but {SUITE} asks none: leave it out")
    return [
        RealText(samples, context_tokens, seed, files["text"])
        if suite == SUITE
        else Questions(
            suite,
            tasks,
            samples,
            context_tokens,
            seed,
            max_questions,
            files["locomo"] if suite == "locomo" else None,
        )
        for suite, tasks in found.items()
    ]


class Bar:
    """A `tangram.lab.accuracy.run.Watch` in the terminal; where standard error is none, a line for
    each thing done.
    """

    def __init__(self) -> None:
        self._progress = progress()
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def expect(self, questions: int) -> None:
        """See `Watch`."""
        self._progress.update(self._task, total=questions)

    def turns_to(self, what: str) -> None:
        """See `Watch`."""
        self._progress.update(self._task, description=what)
        if self._progress.disable:
            tell(what)

    def advance(self, questions: int) -> None:
        """See `Watch`."""
        self._progress.advance(self._task, questions)


def _publish(cells: Sequence[AnyCell], report: Path | None, plot: Path | None) -> None:
    """The tables in the terminal, and in the files that were asked for."""
    from tangram.lab.accuracy.plot import draw
    from tangram.lab.accuracy.score_report import report as tables
    from tangram.lab.accuracy.verdict import verdict

    text = tables(cells)
    shown = standard_output()
    shown.print(Markdown(text))
    for sentence in verdict(cells):
        shown.print(sentence)
    if report is not None:
        report.write_text(text, encoding="utf-8")
    if plot is not None:
        draw(cells, plot)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a comma-separated list. Raises `ConfigError` naming the option."""
    try:
        return [kind(word) for word in _words(text)]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} is {text!r}, it must be {what}, comma-separated") from error
