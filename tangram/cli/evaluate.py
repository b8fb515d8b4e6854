"""`tangram eval`: how accurate the ways of keeping KV entries are, on one model, in one table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tangram.cli.checks import check_start
from tangram.cli.options import (
    CacheDtype,
    CacheGib,
    CacheType,
    Device,
    Dtype,
    Eager,
    Gate,
    Heads,
    LoadFormat,
    MaxBatched,
    MaxSeqs,
    Model,
    Page,
    Utilization,
    Weights,
    WeightType,
)
from tangram.compress.profile import ALPHA, SINK_TOKENS
from tangram.config import EngineConfig
from tangram.errors import ConfigError, TangramError

if TYPE_CHECKING:
    from tangram.evaluate.passages import RealText
    from tangram.evaluate.prompts import Questions
    from tangram.evaluate.results import AnyCell

Number = TypeVar("Number", int, float)
_out, _err = Console(), Console(stderr=True)

Suites = Annotated[
    str, typer.Option(help="ruler, multiturn, locomo, fidelity, or SUITE/TASK for one task; comma-separated")
]
Methods = Annotated[str, typer.Option(help="full, uniform, dynamic, static, one-shot; comma-separated")]
Scorers = Annotated[str, typer.Option(help="what decides which entries stay; comma-separated")]
Retentions = Annotated[str, typer.Option(help="fractions of KV entries kept, comma-separated")]
Chunks = Annotated[str, typer.Option(help="tokens sealed in one piece, comma-separated")]
Alphas = Annotated[str, typer.Option(help="α of static: budgets are mean + α · std; comma-separated")]
Scopes = Annotated[
    str | None, typer.Option(help="model, layer, or both: which heads compete; if not given, as each scorer is served")
]
Samples = Annotated[
    int | None, typer.Option(min=1, help="contexts of each suite, among its tasks; 52, or what files given hold")
]
Context = Annotated[int, typer.Option(help="tokens of a context, chat template included")]
MostQuestions = Annotated[int | None, typer.Option(help="most questions about a context; all if not given")]
Locomo = Annotated[Path | None, typer.Option(help="LoCoMo's file, or a folder of such, for suite locomo")]
Text = Annotated[Path | None, typer.Option(help="a text file for suite fidelity; without it Python's own sources")]
Sinks = Annotated[int | None, typer.Option(min=0, help="first tokens of a sequence that static and uniform keep; 4")]
Window = Annotated[int | None, typer.Option(min=0, help="last tokens of a chunk that static and uniform keep; C / 64")]
Align = Annotated[bool, typer.Option(help="fill up contexts to whole chunks; without it the rest of each stays raw")]
AlignTokens = Annotated[
    int | None, typer.Option(min=1, help="fill up contexts to a multiple of this: so other grids ask the same")
]
PilotSamples = Annotated[int, typer.Option(help="pilot texts that static is calibrated on")]
ResultFile = Annotated[
    Path, typer.Option("--output", "-o", help="keep every reply here; what is there is not repeated")
]
ReportFile = Annotated[Path | None, typer.Option(help="write the tables here (Markdown)")]
Plot = Annotated[Path | None, typer.Option(help="draw scores against ρ here (PNG)")]
Seed = Annotated[int, typer.Option(help="seed of the samples")]


def evaluate(
    model: Model = "smollm2", suites: Suites = "ruler,multiturn", methods: Methods = "full,uniform,dynamic,static",
    scorers: Scorers = "keydiff", retentions: Retentions = "0.7,0.5,0.3", samples: Samples = None,
    context_tokens: Context = 4096, max_questions: MostQuestions = None, locomo: Locomo = None,
    text: Text = None, chunk_tokens: Chunks = "512", alphas: Alphas = f"{ALPHA:g}", scopes: Scopes = None,
    sink_tokens: Sinks = None, window_tokens: Window = None, align: Align = True,
    align_tokens: AlignTokens = None,
    calibration_samples: PilotSamples = 50, output: ResultFile = Path("results.json"), report: ReportFile = None,
    plot: Plot = None, page_tokens: Page = 16, heads_per_page: Heads = 4, gate: Gate = None,
    kv_cache_gib: CacheGib = None, gpu_memory_utilization: Utilization = 0.9, max_num_seqs: MaxSeqs = 32,
    max_num_batched_tokens: MaxBatched = 2048,
    dtype: Dtype = WeightType.auto,
    kv_cache_dtype: CacheDtype = CacheType.auto, load_format: Weights = LoadFormat.auto, enforce_eager: Eager = False,
    device: Device = "auto", seed: Seed = 0,
) -> None:  # fmt: skip
    """Ask MODEL the questions of suites under each way of keeping KV entries, and grade its replies."""
    from tangram.evaluate.methods import Grid

    try:
        grid = Grid(
            cast(Any, _words(methods)), _words(scorers), _numbers("retentions", retentions, float),
            _numbers("chunk_tokens", chunk_tokens, int), _numbers("alphas", alphas, float),
            cast(Any, _words(scopes)) if scopes is not None else None,
            SINK_TOKENS if sink_tokens is None else sink_tokens, window_tokens,
        )  # fmt: skip
        asked = _asked(suites, samples, context_tokens, seed, max_questions, {"locomo": locomo, "text": text})
        base = EngineConfig(
            model=model, page_tokens=page_tokens, heads_per_page=heads_per_page, gate=gate, kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, dtype=dtype.value,
            kv_cache_dtype=kv_cache_dtype.value, load_format=load_format.value, enforce_eager=enforce_eager,
            device=device,
        )  # fmt: skip
        _check_files(report, plot)
        check_start(base)
        from tangram.evaluate.compare import compare

        command = shlex.join(["tangram", *sys.argv[1:]])
        with Bar() as bar:
            cells = compare(
                base, grid, asked, align=align, calibration_samples=calibration_samples, output=output,
                command=command, watch=bar, align_tokens=align_tokens,
            )  # fmt: skip
        _publish(cells, report, plot)
    except TangramError as error:
        _err.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(2) from error


def _asked(
    suites: str, samples: int | None, context_tokens: int, seed: int, max_questions: int | None,
    files: dict[str, Path | None],
) -> list[Questions | RealText]:  # fmt: skip
    """By suite. Raises `ConfigError` for one that is not known, and for what none of them looks at."""
    from tangram.evaluate.passages import SUITE, RealText
    from tangram.evaluate.prompts import Questions, parse_suites

    found = parse_suites(suites, undivided=(SUITE,))
    for option, suite in (("locomo", "locomo"), ("text", SUITE)):
        if files[option] is not None and suite not in found:
            raise ConfigError(
                f"{option} is {files[option]}, but suites is {suites}: add {suite} there, or leave the path out"
            )
    if max_questions is not None and list(found) == [SUITE]:
        raise ConfigError(f"max_questions is {max_questions}, but {SUITE} asks none: leave it out")
    return [
        RealText(samples, context_tokens, seed, files["text"])
        if suite == SUITE
        else Questions(
            suite, tasks, samples, context_tokens, seed, max_questions, files["locomo"] if suite == "locomo" else None
        )
        for suite, tasks in found.items()
    ]


class Bar:
    """A `tangram.evaluate.run.Watch` in the terminal; where standard error is none, a line for each thing done."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=_err, disable=not _err.is_terminal)
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
        if not _err.is_terminal:
            _err.print(what, highlight=False)

    def advance(self, questions: int) -> None:
        """See `Watch`."""
        self._progress.advance(self._task, questions)


def _check_files(report: Path | None, plot: Path | None) -> None:
    """Raise `ConfigError` if one of them could not be written."""
    from tangram.evaluate.plot import check_plot

    if report is not None and not report.parent.is_dir():
        raise ConfigError(f"report is {report}, but there is no folder {report.parent}: make it first")
    if plot is not None:
        check_plot(plot)


def _publish(cells: Sequence[AnyCell], report: Path | None, plot: Path | None) -> None:
    """The tables in the terminal, and in the files that were asked for."""
    from tangram.evaluate.plot import draw
    from tangram.evaluate.report import report as tables

    text = tables(cells)
    _out.print(Markdown(text))
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
