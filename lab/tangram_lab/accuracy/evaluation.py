"""The whole of `tangram eval`: measures a grid of methods on one model, and keeps the cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tangram.compress.scorers import default_scope, make_scorer, takes_gate
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.config import EngineConfig
from tangram.engine.setup.option_checks import load_checked, longest_sequence
from tangram.engine.setup.profiles import Compression
from tangram.errors import ConfigError
from tangram_lab.accuracy.engines import ModelBench
from tangram_lab.accuracy.methods import Grid, Method, choose_alignment
from tangram_lab.accuracy.passages import SUITE as FIDELITY
from tangram_lab.accuracy.passages import TAIL_TOKENS, Passages, RealText
from tangram_lab.accuracy.results import AnyCell, Results, Setting
from tangram_lab.accuracy.run import SUITES_IN_WORDS, PlannedCell, Watch, plan_cells, run
from tangram_lab.accuracy.sample_prompts import Alignment, Questions, SuitePrompts, filler_token

# Is called before the measurement with the model and the planned cells.
Before = Callable[[ModelBench, Sequence[PlannedCell]], None]


def compare(
    base: EngineConfig,
    grid: Grid,
    asked: Sequence[Questions | RealText],
    *,
    align: bool,
    calibration_samples: int | None,
    output: Path,
    command: str,
    watch: Watch,
    align_tokens: int | None = None,
    before: Before | None = None,
) -> list[AnyCell]:
    """The cells of every method of `grid` on every suite of `asked`, all with one model.

    Engines have the config `base`, changed by a method. A grid without a scorer takes the one that
    `base` is served with. With `align` contexts end at a multiple of `align_tokens`, or of the
    largest chunk. `calibration_samples` None takes the profiles that a server would take. `output`
    keeps the cells. Cells in it with equal settings are not measured again; an interrupted run
    loses at most one. `before` is called with what will be measured.

    Raises `ConfigError` before anything is measured if an option is out of range or contradicts
    another one.
    """
    results = Results.resume(output, command)
    # Chunks and contexts do not depend on the scorer. Errors in them are raised before the model
    # loads.
    methods = _methods(grid.name_scorer(KeyDiff.name), asked)
    for method in methods:
        method.config(base)
    _check_scales(base, asked, methods)
    unit = choose_alignment(methods, align=align, unit=align_tokens)
    if any(isinstance(one, RealText) for one in asked):
        _check_tails(methods)
        # `full` has no chunk of its own; its texts are cut where those of the others are.
        base = replace(base, chunk_tokens=unit) if unit is not None and unit > TAIL_TOKENS else base
    _check_scorers(base, grid)
    _check_lengths(longest_sequence(base), asked, methods)
    watch.turns_to("loading the model")
    loaded = load_checked(base)
    methods = _methods(
        grid.name_scorer(Compression.of(base, loaded.fingerprint).choice.scorer), asked
    )
    bench = ModelBench.of(base, loaded, methods, calibration_samples)
    alignment = None if unit is None else Alignment(unit, filler_token(bench.codec))
    suites = list[tuple[SuitePrompts | Passages, Setting]]()
    for questions in asked:
        watch.turns_to(f"writing {SUITES_IN_WORDS[questions.suite]}")
        prompts = questions.prompts(bench.codec, alignment)
        suites.append((prompts, _setting(bench, questions, prompts, aligned=align)))
    bench = bench.for_prompts([prompts for prompts, _ in suites])
    plans = plan_cells(bench, methods, suites)
    missing = [plan for plan in plans if plan.find_in(results) is None]
    if before is not None:
        before(bench, missing)
    bench.calibrate(dict.fromkeys(plan.method for plan in missing), watch)
    watch.expect(sum(plan.work for plan in missing))
    return run(bench, plans, results, output, watch)


def _methods(grid: Grid, asked: Sequence[Questions | RealText]) -> list[Method]:
    return list(
        dict.fromkeys(
            method for one in asked for method in grid.methods(one.context_tokens, default_scope)
        )
    )


def _check_scorers(base: EngineConfig, grid: Grid) -> None:
    """Raise `ConfigError` for a scorer that is unknown, or that no model can be compressed by."""
    for name in grid.scorers or ():
        gate = Path(base.gate) if base.gate is not None and takes_gate(name) else None
        if gate is None and takes_gate(name):
            continue  # the gate that ships may fit the model
        for chunk_tokens in grid.chunk_tokens:
            make_scorer(name, gate=gate).check_tokens(chunk_tokens)


def _check_lengths(
    most_tokens: int, asked: Sequence[Questions | RealText], methods: Sequence[Method]
) -> None:
    """Raise `ConfigError` for a length beyond the model's limit, before a text of it is written."""
    chunks = (method.chunk_tokens for method in methods)
    longest = {
        "context_tokens": max(one.context_tokens for one in asked),
        "chunk_tokens": max((chunk for chunk in chunks if chunk is not None), default=1),
    }
    for name, tokens in longest.items():
        if tokens > most_tokens:
            raise ConfigError(
                f"{name} is {tokens}, the model was made for {most_tokens} positions: ask for fewer"
            )


def _check_scales(
    base: EngineConfig, asked: Sequence[Questions | RealText], methods: Sequence[Method]
) -> None:
    """Raise `ConfigError` for a cache that needs scales where an engine's profile has none."""
    if base.kv_cache_dtype != "int8":
        return
    without: list[str] = [
        method.name
        for method in methods
        if method.budgeted is None or method.budgeted.name != "static"
    ]
    if any(isinstance(one, RealText) for one in asked):
        without.append("full, with which texts are compared,")
    if without:
        raise ConfigError(
            f"kv_cache_dtype is int8, but method {without[0]} has no calibrated profile, whose "
            "scales such a cache needs: take fp8, or methods static and lossless without fidelity"
        )


def _check_tails(methods: Sequence[Method]) -> None:
    small = [method.chunk_tokens for method in methods if method.chunk_tokens is not None]
    if small and min(small) <= TAIL_TOKENS:
        raise ConfigError(
            f"chunk_tokens has {min(small)}, but {FIDELITY} looks at {TAIL_TOKENS} tokens that "
            "fill no chunk: choose larger chunks"
        )


def _setting(
    bench: ModelBench,
    asked: Questions | RealText,
    prompts: SuitePrompts | Passages,
    *,
    aligned: bool,
) -> Setting:
    base, loaded = bench.base, bench.loaded
    return Setting(
        model=base.model,
        weights_sha256=loaded.fingerprint.weights_sha256,
        dtype=str(loaded.dtype).removeprefix("torch."),
        quantization=base.quantization,
        kv_cache_dtype=base.kv_cache_dtype,
        page_tokens=base.page_tokens,
        heads_per_page=base.heads_per_page,
        suite=asked.suite,
        samples=prompts.count if isinstance(prompts, Passages) else len(prompts.samples),
        context_tokens=asked.context_tokens,
        seed=asked.seed,
        aligned=aligned,
        prompts_sha256=prompts.sha256,
    )
