"""Build a running engine from an `EngineConfig`.

The steps are those of `build_parts`: a blueprint says which entries are kept (`blueprint`), memory
gives the pages (`pool_size`), the model is prepared and its passes are captured (`ready_runner`).
"""

from __future__ import annotations

from torch import distributed as dist

from tangram.config import EngineConfig
from tangram.engine.admission import Admission
from tangram.engine.derived import DerivedRetentions
from tangram.engine.loop import Engine, Parts
from tangram.engine.ranks.rank_runner import RankRunner
from tangram.engine.ranks.ranks import Ranks
from tangram.engine.schedule.scheduler import Scheduler, StepLimits
from tangram.engine.setup.blueprint import Blueprint, for_one_device, for_one_rank
from tangram.engine.setup.disk_folder import open_disk
from tangram.engine.setup.drafters import build_speculation
from tangram.engine.setup.memory import explain_exhaustion
from tangram.engine.setup.option_checks import check_options, load_checked
from tangram.engine.setup.pool_size import PoolSize, size_pool
from tangram.engine.setup.ready_runner import build_cache, build_runner
from tangram.engine.setup.startup import announce, announce_speculation
from tangram.errors import IntegrityError
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import KernelChoice
from tangram.model.load import LoadedModel, resolve_source


def build_engine(config: EngineConfig, *, records: bool = False) -> Engine:
    """An engine of `config`, ready for `submit`.

    With `records` it notes the kept positions of chunks, for those who `watch` it. Raises the
    errors of `tangram.errors`, which say what to change.
    """
    with explain_exhaustion(config):
        if config.tensor_parallel_size > 1:
            return _build_on_ranks(config)
        return engine_of(config, load_checked(config), records=records)


def engine_of(
    config: EngineConfig,
    loaded: LoadedModel,
    kernels: KernelChoice | None = None,
    *,
    records: bool = False,
) -> Engine:
    """`build_engine` for a loaded model. `kernels`, if given, chooses the kernels of its pool."""
    blueprint = for_one_device(config, loaded)
    return Engine(build_parts(blueprint, kernels or pool_kernels, records=records))


def follower(config: EngineConfig) -> RankRunner:
    """The runner of this process's rank, which follows rank 0: all ranks make the same parts."""
    runner = build_parts(for_one_rank(config, dist.get_rank())).runner
    if not isinstance(runner, RankRunner):
        raise IntegrityError(f"a rank has a {type(runner).__name__}")
    return runner


def _build_on_ranks(config: EngineConfig) -> Engine:
    """Rank 0 of an engine on several devices. Kept positions are not noted: they are on all ranks.

    Which of the ranks has failed is told by the error.
    """
    check_options(config)
    resolve_source(config.model)  # once: ranks would convert a GGUF file side by side
    ranks = Ranks(config)
    try:
        parts = build_parts(for_one_rank(config, 0))
        if isinstance(parts.runner, RankRunner):
            parts.runner.lead(ranks, parts.scheduler.cache)
        return Engine(parts, ranks)
    except BaseException as error:
        if (found := ranks.explain(error)) is error:
            raise
        raise found from error


def build_parts(
    blueprint: Blueprint, kernels: KernelChoice = pool_kernels, *, records: bool = False
) -> Parts:
    """The parts of the engine of `blueprint`, ready to serve. See `engine_of`."""
    config, loaded = blueprint.config, blueprint.loaded
    size = size_pool(blueprint)
    disk = open_disk(blueprint, size.host_page_bytes)
    cache = build_cache(blueprint, size.pages, size.host_pages, disk)
    runner = build_runner(blueprint, cache, kernels, records=records)
    admission = _build_admission(blueprint, size)
    announce(config, loaded, admission, size.host_pages)
    speculation = build_speculation(blueprint, cache, runner, kernels)
    announce_speculation(config)
    limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens, config.prompt_patience)
    apart = runner.passes.takes_apart
    scheduler = Scheduler(cache, limits, drafts=speculation, passes_apart=apart)
    return Parts(config, loaded, admission, scheduler, runner, speculation)


def _build_admission(blueprint: Blueprint, size: PoolSize) -> Admission:
    config, served, dtype = blueprint.config, blueprint.served, blueprint.cache_dtype
    derived = DerivedRetentions(
        served.bases, page_tokens=config.page_tokens, heads_per_page=config.heads_per_page
    )
    return Admission(
        served.retentions,
        size.pages,
        str(dtype).removeprefix("torch."),
        dtype.itemsize,
        size.max_tokens,
        size.host_page_bytes,
        speculates=config.speculation is not None,
        sampling=blueprint.loaded.defaults.sampling,
        derived=derived if served.bases else None,
    )
