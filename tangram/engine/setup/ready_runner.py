"""A cache and a runner of a blueprint, with all kernels compiled and all graphs captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tangram.cache.disk import DiskTier
from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import PartTables
from tangram.config import EngineConfig
from tangram.engine.passes.meters import Meters
from tangram.engine.passes.passes import Passes
from tangram.engine.passes.runner import Runner, RunnerSettings
from tangram.engine.passes.saved_pass import PassSaver
from tangram.engine.ranks.rank_runner import RankRunner
from tangram.engine.setup.blueprint import Blueprint
from tangram.engine.setup.memory import host_form
from tangram.foreign_files import expand_home
from tangram.kernels.interface import KernelChoice
from tangram.kernels.stopwatch import Stopwatch
from tangram.model.load import LoadedModel
from tangram.model.overflow import Overflow
from tangram.model.prepare import Stage, Wanted, prepare
from tangram.progress import show_progress


def build_cache(
    blueprint: Blueprint, pages: int, host_pages: int, disk: DiskTier | None = None
) -> CacheManager:
    """The cache manager of `pages` pages, of `host_pages` behind them, and of `disk`."""
    config = blueprint.config
    return CacheManager(
        blueprint.served.retentions,
        total_pages=pages,
        max_sequences=config.max_num_seqs,
        prefix_caching=config.enable_prefix_caching,
        host_pages=host_pages,
        rounds_chunks=host_form(config) is not None,
        disk=disk,
        state_pages=-(-blueprint.loaded.geometry.state_bytes // blueprint.page_bytes),
    )


def build_runner(
    blueprint: Blueprint,
    cache: CacheManager,
    kernels: KernelChoice,
    *,
    meters: Meters | None = None,
    records: bool = False,
) -> Runner:
    """The runner over the pages of `cache`, ready to serve. `meters` are those that it shares."""
    config, loaded, served = blueprint.config, blueprint.loaded, blueprint.served
    wanted = Wanted.of(config, loaded.device, loaded.dtype)
    prepare(loaded.model, wanted, Stage.SERVE)
    if config.compile_decode:
        _rehearse_compiled(config, loaded)
    every = config.overflow_every
    overflow = None if every is None else Overflow(served.retentions, blueprint.scopes, every)
    drafted = _count_drafted(config)
    settings = RunnerSettings(
        pages=cache.ledger.total,
        host_pages=cache.host.total,
        cache_dtype=blueprint.cache_dtype,
        form=host_form(config),
        disk=cache.disk,
        kernels=kernels,
        graphs=wanted.graphs,
        queries=query_counts(drafted),
        meters=meters or Meters(Stopwatch(loaded.device), overflow),
        records=config.max_num_batched_tokens // config.chunk_tokens if records else 0,
        saver=_saver(blueprint, cache),
    )
    if blueprint.shares is None:
        runner = Runner(loaded, served.retentions, served.scorers, cache, settings)
    else:
        local = blueprint.shares.local
        parts = {common: mine.layout for common, mine in local.items()}
        tables = PartTables(parts, config.max_num_seqs)
        runner = RankRunner(loaded, local, served.scorers, tables, settings)
    _prepare_runner(runner, config, drafted)
    return runner


def _saver(blueprint: Blueprint, cache: CacheManager) -> Callable[[Tensor], PassSaver] | None:
    """What saves the failed passes of a pool; None if they are not saved."""
    config, served = blueprint.config, blueprint.served
    if config.save_failed_passes is None:
        return None
    # Another device may choose another dtype.
    chosen: dict[str, Any] = {"dtype": str(blueprint.loaded.dtype).removeprefix("torch.")}
    known = replace(config, **chosen)
    folder = expand_home(config.save_failed_passes)
    return partial(PassSaver, folder, known, served.retentions, cache)


def _count_drafted(config: EngineConfig) -> int:
    return 0 if config.speculation is None else config.speculation.num_speculative_tokens


def _rehearse_compiled(config: EngineConfig, loaded: LoadedModel) -> None:
    """Run the compiled layers for decode passes of one token, of a few and of the most."""
    from tangram.model.compiled_decode import rehearse_decode

    most = config.max_num_seqs * (_count_drafted(config) + 1)
    sizes = sorted({1, 2, max(2, min(most, config.max_num_batched_tokens))})
    track = partial(show_progress, description="Compiling decode steps")
    rehearse_decode(loaded.model, track(sizes))


def _prepare_runner(runner: Runner, config: EngineConfig, drafted: int) -> None:
    """Compile the kernels of all passes, and capture their graphs."""
    passes, rows = runner.passes, config.max_num_seqs
    if runner.pool.is_cuda:
        runner.rehearse(config.max_num_batched_tokens)
    passes.capture_prefill()
    prepare_decode(passes, rows, "Capturing decode steps")
    most = min(rows * (drafted + 1), config.max_num_batched_tokens)
    track = partial(show_progress, description="Capturing steps with drafts")
    for queries in passes.batcher.queries[1:]:
        passes.capture(min(most, rows * queries), track, queries)
    runner.meters.clear()
    if runner.recorder is not None:
        runner.recorder.clear()


def prepare_decode(passes: Passes, rows: int, description: str) -> None:
    """Compile the kernels of decode passes of up to `rows` rows, and capture their graphs."""
    if passes.device.type == "cuda":
        passes.rehearse_decode(rows)
    passes.capture(rows, partial(show_progress, description=description))


def query_counts(most_drafted: int) -> tuple[int, ...]:
    """The numbers of tokens of a decode row that kernels are prepared for.

    They are 1, the largest power of two up to `most_drafted + 1`, half of it, and that many.
    """
    most = most_drafted + 1
    largest = 1 << (most.bit_length() - 1)  # a power of two fills the tiles of the kernels
    return tuple(sorted({1, max(1, largest // 2), largest, most}))
