"""Builds what drafts for an engine, as its config says."""

from __future__ import annotations

import logging

from tangram.cache.manager import CacheManager
from tangram.engine.drafts.model_drafts import ModelDrafter
from tangram.engine.drafts.self_drafts import SelfDrafter
from tangram.engine.drafts.speculation import Speculation, speculate_by_lookup
from tangram.engine.passes.runner import Runner
from tangram.engine.ranks.rank_drafts import RankDrafter
from tangram.engine.ranks.rank_runner import RankRunner
from tangram.engine.setup.blueprint import Blueprint
from tangram.engine.setup.pool_size import size_draft_pool
from tangram.engine.setup.ready_runner import build_cache, build_runner, prepare_decode
from tangram.errors import IntegrityError
from tangram.kernels.interface import KernelChoice
from tangram.speculative_config import CompressedKv, DraftModel, Ngram, Suffix

_log = logging.getLogger("tangram")


def build_speculation(
    blueprint: Blueprint, cache: CacheManager, runner: Runner, kernels: KernelChoice
) -> Speculation | None:
    """What drafts beside `runner` and `cache`; None if nothing does."""
    match blueprint.config.speculation:
        case Ngram() | Suffix() as lookup:
            return speculate_by_lookup(lookup)
        case CompressedKv() as compressed:
            return Speculation(compressed, drafter=_self_drafter(blueprint, cache, runner))
        case DraftModel() as other if blueprint.drafting is not None:
            pages = size_draft_pool(other, blueprint, blueprint.drafting, cache.ledger.total)
            drafter = _model_drafter(blueprint, blueprint.drafting, pages, runner, kernels)
            return Speculation(other, drafter=drafter)
    return None


def _self_drafter(blueprint: Blueprint, cache: CacheManager, runner: Runner) -> SelfDrafter:
    """The drafter of compressed_kv."""
    drafts = [entry.draft for entry in blueprint.served.retentions if entry.draft is not None]
    if not drafts or cache.drafts is None:
        raise IntegrityError("compressed_kv has no retention with a draft")
    passes = runner.draft_passes(drafts[0], cache.drafts)
    prepare_decode(passes, blueprint.config.max_num_seqs, "Capturing draft steps")
    runner.meters.clear()
    if not isinstance(runner, RankRunner):
        return SelfDrafter(passes, cache.drafts)
    return RankDrafter(passes, cache.drafts, runner)


def _model_drafter(
    blueprint: Blueprint, drafting: Blueprint, pages: int, runner: Runner, kernels: KernelChoice
) -> ModelDrafter:
    """The drafter of draft_model, of `pages`. The meters of `runner` count its work, too."""
    cache, retention = build_cache(drafting, pages, 0), drafting.served.retentions[0]
    _log.info(
        "%s drafts for %s: %s tokens of it fit in %d pages",
        drafting.config.model,
        blueprint.config.model,
        f"{retention.layout.tokens_in(pages, blueprint.max_tokens):,}",
        pages,
    )
    return ModelDrafter(
        build_runner(drafting, cache, kernels, meters=runner.meters),
        cache,
        retention,
        most_tokens=blueprint.config.max_num_batched_tokens,
        vocabulary=blueprint.loaded.geometry.vocab_size,
    )
