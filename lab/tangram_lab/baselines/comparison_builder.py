"""Builds the baseline engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.compress.profile import SINK_TOKENS, Profile
from tangram.compress.scorers import Scorer
from tangram.config import EngineConfig
from tangram.engine.build import EngineBuilder, Served
from tangram.engine.loop import Engine
from tangram.engine.runner import Runner
from tangram.errors import ConfigError
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import KernelChoice
from tangram.model.load import LoadedModel
from tangram_lab.baselines.adjacent_groups import group_adjacent
from tangram_lab.baselines.caches import ByInputCache, DynamicCache, LateCache
from tangram_lab.baselines.compared_schedules import parse_schedule
from tangram_lab.baselines.comparison_config import ComparisonConfig
from tangram_lab.baselines.reclaim import ReclaimingRunner

LATE_CACHES: dict[str, type[LateCache]] = {"dynamic": DynamicCache, "by-input": ByInputCache}


def builder_of(
    config: EngineConfig, loaded: LoadedModel, kernels: KernelChoice | None = None
) -> EngineBuilder:
    """The builder for `config`: the serving one, or that of a baseline."""
    if isinstance(config, ComparisonConfig):
        return ComparisonBuilder(config, loaded, kernels)
    return EngineBuilder(config, loaded, kernels)


def engine_of(
    config: EngineConfig, loaded: LoadedModel, kernels: KernelChoice | None = None
) -> Engine:
    """`tangram.engine.build.engine_of` that also accepts a `ComparisonConfig`."""
    return builder_of(config, loaded, kernels).engine()


class ComparisonBuilder(EngineBuilder):
    """Builds the engine of a `ComparisonConfig`."""

    config: ComparisonConfig

    def find_served(self) -> Served:
        """See `EngineBuilder`. By input there is one retention, which drops nothing unscored."""
        if self.config.reclamation != "by-input":
            return super().find_served()
        scorer = self.compression.make_scorer(self.loaded.fingerprint)
        by_input = Retention(
            self.config.kv_retention,
            self.lay_out_uncompressed(),
            "by input",
            scorer=scorer.name,
            sink_tokens=SINK_TOKENS,
            window_tokens=self.config.chunk_tokens // 64,
            one_chunk_a_step=True,
        )
        return Served({scorer.name: scorer}, [by_input])

    def retention(self, profile: Profile, scorer: Scorer) -> Retention:
        """See `EngineBuilder`."""
        if self.config.head_groups == "clustered":
            found = super().retention(profile, scorer)
        else:
            groups, pages = group_adjacent(profile.groups, profile.sealed_pages, self.page_heads)
            fingerprint = f"{self.config.head_groups}:{profile.fingerprint()}"
            found = self.make_retention(profile, scorer, groups, pages, fingerprint)
        late = self.config.reclamation != "reserved"
        return replace(found, one_chunk_a_step=True) if late else found

    @property
    def page_heads(self) -> int:
        """A monolithic page holds all heads of a layer; independent heads have their own pages."""
        if self.config.reclamation == "by-input":
            return 1
        if self.config.head_groups == "monolithic":
            return self.loaded.geometry.kv_heads
        return super().page_heads

    @property
    def cache_type(self) -> type[CacheManager]:
        """See `EngineBuilder`."""
        return LATE_CACHES.get(self.config.reclamation, super().cache_type)

    def runner(
        self,
        retentions: Sequence[Retention],
        scorers: Mapping[str, Scorer],
        *,
        cache: CacheManager,
        **options: Any,
    ) -> Runner:
        """See `EngineBuilder`."""
        if not isinstance(cache, LateCache):
            return super().runner(retentions, scorers, cache=cache, **options)
        by_input = self.config.reclamation == "by-input"
        scope = self.compression.choice.scope if by_input else None
        return ReclaimingRunner(
            self.loaded, retentions, scorers, cache=cache, competing=scope, **options
        )

    def kernels(self) -> KernelChoice:
        """See `EngineBuilder`."""
        if self.config.decode_schedule is None:
            return super().kernels()
        try:
            schedule = parse_schedule(self.config.decode_schedule)
        except ConfigError as error:
            raise ConfigError(f"decode_schedule: {error}") from error
        return partial(pool_kernels, schedule=schedule)
