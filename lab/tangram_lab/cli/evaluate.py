"""`tangram eval`: the accuracy of several KV compression methods on one model."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer
from rich.markdown import Markdown

from tangram.cli.checks import check_start
from tangram.cli.command import rename_options
from tangram.cli.console import output as standard_output
from tangram.cli.console import progress, tell
from tangram.compress.profile import SINK_TOKENS
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram_lab.cli.evaluate_options import EvalOptions
from tangram_lab.cli.options import take_fields

if TYPE_CHECKING:
    from tangram_lab.accuracy.engines import ModelBench
    from tangram_lab.accuracy.methods import Grid
    from tangram_lab.accuracy.passages import RealText
    from tangram_lab.accuracy.results import AnyCell
    from tangram_lab.accuracy.run import PlannedCell
    from tangram_lab.accuracy.sample_prompts import Questions

    Asked = Questions | RealText

Number = TypeVar("Number", int, float)

RENAMED = rename_options(scorers="scorer", retentions="kv-retention", scopes="scope")
_OF_ENGINE = (
    *("model", "page_tokens", "heads_per_page", "gate", "kv_cache_gib", "gpu_memory_utilization"),
    *("max_num_seqs", "max_num_batched_tokens", "dtype", "quantization", "kv_cache_dtype"),
    "load_format",
    *("enforce_eager", "device", "threads"),
)
# Options that --quick fixes.
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


@take_fields(EvalOptions)
def evaluate(context: typer.Context, options: EvalOptions) -> None:
    """Ask MODEL the questions of suites with each compression method, and grade its replies."""
    from tangram_lab.accuracy.plot import check_plot

    if options.quick:
        _refuse_settled(context)
    grid, asked = _quick(options) if options.quick else _choose(options)
    base = _engine_config(options)
    if options.plot is not None:
        check_plot(options.plot)
    check_start(base)
    from tangram_lab.accuracy.evaluation import compare

    command = shlex.join(["tangram", *sys.argv[1:]])
    if options.quick:
        tell(_QUICK.format(kept=", ".join(f"{value:g}" for value in grid.retentions)))
    with Bar() as bar:
        cells = compare(
            base,
            grid,
            asked,
            align=options.align,
            calibration_samples=None if options.quick else options.calibration_samples,
            output=options.output,
            command=command,
            watch=bar,
            align_tokens=options.align_tokens,
            before=_say_how_long if options.quick else None,
        )
    _publish(cells, options.report, options.plot)


def _quick(options: EvalOptions) -> tuple[Grid, list[Asked]]:
    """The grid and the suites of --quick."""
    from tangram_lab.accuracy.methods import Grid
    from tangram_lab.accuracy.quick import NEEDLES, RETENTIONS, TEXT

    retentions = _retentions(options)
    grid = Grid(
        ["full", "static"], _scorers(options), RETENTIONS if retentions is None else retentions
    )
    return grid, [NEEDLES, TEXT]


def _choose(options: EvalOptions) -> tuple[Grid, list[Asked]]:
    """The grid and the suites that `options` name. Raises `ConfigError` naming one not known."""
    from tangram_lab.accuracy.methods import Grid

    scorers, retentions = _scorers(options), _retentions(options)
    grid = Grid(
        cast(Any, _words(options.methods)),
        scorers,
        (0.7, 0.5, 0.3) if retentions is None else retentions,
        _numbers("chunk_tokens", options.chunk_tokens, int),
        _numbers("alphas", options.alphas, float),
        cast(Any, _words(options.scope)) if options.scope is not None else None,
        SINK_TOKENS if options.sink_tokens is None else options.sink_tokens,
        options.window_tokens,
    )
    return grid, _choose_suites(options)


def _scorers(options: EvalOptions) -> list[str] | None:
    return None if options.scorer is None else _words(options.scorer)


def _retentions(options: EvalOptions) -> list[float] | None:
    if options.kv_retention is None:
        return None
    return _numbers("retentions", options.kv_retention, float)


def _engine_config(options: EvalOptions) -> EngineConfig:
    """The options that all engines share; a method adds its own."""
    given = {name: getattr(options, name) for name in _OF_ENGINE}
    return EngineConfig(**given)


_QUICK = (
    "9 questions about 6 long texts and 3 passages of real text: first with everything kept, then "
    "as served at ρ {kept}. A model of 135 M parameters takes some four minutes on two idle CPU "
    "cores; an estimate for this machine follows once MODEL is loaded."
)


def _say_how_long(bench: ModelBench, plans: Sequence[PlannedCell]) -> None:
    from tangram_lab.accuracy.grid_duration import minutes

    if plans:
        tell(
            f"About {minutes(bench, plans):.1f} minutes to go at the speed of one chunk just now; "
            "beside other programs it takes longer, and what is left is told as it goes."
        )


def _refuse_settled(context: typer.Context) -> None:
    """Raise `ConfigError` for an option that --quick would ignore."""
    for name in _SETTLED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"{name} is {context.params[name]}, but --quick fixes it: leave one of them out"
            )


def _choose_suites(options: EvalOptions) -> list[Asked]:
    """The suites in their order.

    Raises `ConfigError` for an unknown suite, and for options that no suite uses.
    """
    from tangram_lab.accuracy.passages import SUITE, RealText
    from tangram_lab.accuracy.sample_prompts import Questions, parse_suites

    found = parse_suites(options.suites, undivided=(SUITE,))
    for option, suite in (("locomo", "locomo"), ("text", SUITE)):
        path = getattr(options, option)
        if path is not None and suite not in found:
            raise ConfigError(
                f"{option} is {path}, but suites is {options.suites}: add {suite} there, or leave "
                "the path out"
            )
    if options.max_questions is not None and list(found) == [SUITE]:
        raise ConfigError(
            f"max_questions is {options.max_questions}, but {SUITE} asks none: leave it out"
        )
    return [
        RealText(options.samples, options.context_tokens, options.seed, options.text)
        if suite == SUITE
        else Questions(
            suite,
            tasks,
            options.samples,
            options.context_tokens,
            options.seed,
            options.max_questions,
            options.locomo if suite == "locomo" else None,
        )
        for suite, tasks in found.items()
    ]


class Bar:
    """A `tangram_lab.accuracy.run.Watch` in the terminal; elsewhere a line for each part.

    Both say how long is left by the speed so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = progress(counted=False)
        self._task = self._progress.add_task("", total=None)
        self._total = self._done = 0
        self._begin = clock()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def expect(self, tokens: int) -> None:
        """See `Watch`."""
        self._total, self._begin = tokens, self._clock()
        self._progress.update(self._task, total=tokens)

    def turns_to(self, what: str) -> None:
        """See `Watch`."""
        self._progress.update(self._task, description=what)
        if self._progress.disable:
            tell(what + self._say_left())

    def advance(self, tokens: int) -> None:
        """See `Watch`."""
        self._done += tokens
        self._progress.advance(self._task, tokens)

    def _say_left(self) -> str:
        """How long is left, once something was measured."""
        if not self._done:
            return ""
        seconds = (self._clock() - self._begin) / self._done * (self._total - self._done)
        return f" (about {seconds / 60:.1f} minutes left)"


def _publish(cells: Sequence[AnyCell], report: Path | None, plot: Path | None) -> None:
    """Print the tables, and write the requested files."""
    from tangram_lab.accuracy.plot import plot_scores
    from tangram_lab.accuracy.score_report import report as tables
    from tangram_lab.accuracy.verdict import verdict

    text = tables(cells)
    shown = standard_output()
    shown.print(Markdown(text))
    for sentence in verdict(cells):
        shown.print(sentence)
    if report is not None:
        report.write_text(text, encoding="utf-8")
    if plot is not None:
        plot_scores(cells, plot)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a comma-separated list. Raises `ConfigError` naming the option."""
    try:
        return [kind(word) for word in _words(text)]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} is {text!r}, it must be {what}, comma-separated") from error
