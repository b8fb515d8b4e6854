"""The whole of `tangram eval`: a model, a grid of methods and the questions, to cells in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.evaluate.engines import ModelBench
from tangram.evaluate.methods import Grid, Method
from tangram.evaluate.prompts import Alignment, Questions, SuitePrompts, filler_token
from tangram.evaluate.results import Cell, Results, Setting
from tangram.evaluate.run import Watch, planned, run
from tangram.model.load import load_model


def compare(
    base: EngineConfig, grid: Grid, asked: Sequence[Questions], *, align: bool, calibration_samples: int,
    output: Path, command: str, watch: Watch,
) -> list[Cell]:  # fmt: skip
    """The cells of every method of `grid` and every suite `asked`, one model serving all; `output` keeps them.

    Engines are `base` but for what a method changes. With `align` contexts end where the largest chunk does. Cells that
    `output` has already, of equal settings, are not measured again; an interrupted run loses at most one.

    Raises `ConfigError` before anything is measured if an option is out of range or contradicts another one.
    """
    results = Results.resumed(output, command)
    methods = list(dict.fromkeys(method for one in asked for method in grid.methods(one.context_tokens)))
    unit = aligned_tokens(methods, align=align)
    watch.turns_to("loading the model")
    loaded = load_model(base.model, dtype=base.dtype, device=base.device, load_format=base.load_format)
    bench = ModelBench.of(base, loaded, methods, calibration_samples)
    alignment = None if unit is None else Alignment(unit, filler_token(bench.codec))
    suites = []
    for questions in asked:
        watch.turns_to(f"writing {questions.suite}")
        prompts = questions.prompts(bench.codec, alignment)
        suites.append((prompts, _setting(bench, questions, prompts, aligned=align)))
    bench = bench.for_prompts([sample for prompts, _ in suites for sample in prompts.samples])
    plans = planned(bench, methods, suites)
    watch.expect(sum(plan.questions for plan in plans if plan.found_in(results) is None))
    return run(bench, plans, results, output, watch)


def aligned_tokens(methods: Sequence[Method], *, align: bool) -> int | None:
    """The largest chunk of `methods`, at a multiple of which contexts end; None without `align`.

    Raises `ConfigError` if another chunk would not end there, or if one-shot is asked for without.
    """
    if not align:
        if any(method.name == "one-shot" for method in methods):
            raise ConfigError("methods has one-shot, whose one chunk is the whole context: that needs align")
        return None
    chunks = {method.chunk_tokens for method in methods if method.chunk_tokens is not None}
    largest = max(chunks, default=1)
    if uneven := sorted(chunk for chunk in chunks if largest % chunk):
        raise ConfigError(
            f"chunk_tokens has {uneven[0]}, of which the largest chunk, {largest}, is no multiple (one-shot's is "
            "context_tokens): choose sizes that divide it, or --no-align"
        )
    return largest


def _setting(bench: ModelBench, asked: Questions, prompts: SuitePrompts, *, aligned: bool) -> Setting:
    base, loaded = bench.base, bench.loaded
    return Setting(
        model=base.model, weights_sha256=loaded.fingerprint.weights_sha256,
        dtype=str(loaded.dtype).removeprefix("torch."), kv_cache_dtype=base.kv_cache_dtype,
        page_tokens=base.page_tokens, heads_per_page=base.heads_per_page, suite=asked.suite, samples=asked.samples,
        context_tokens=asked.context_tokens, seed=asked.seed, aligned=aligned, prompts_sha256=prompts.sha256,
    )  # fmt: skip
