"""Engines that differ from the serving one in how heads share pages, or how decode is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tangram.cache.retention import Retention
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.blueprint import Blueprint, for_one_device
from tangram.engine.setup.build import build_parts
from tangram.engine.setup.served import Served
from tangram.errors import ConfigError
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import KernelChoice
from tangram.model.load import LoadedModel
from tangram_lab.baselines.adjacent_groups import group_adjacent
from tangram_lab.baselines.compared_schedules import parse_schedule

HeadGroups = Literal["clustered", "adjacent", "monolithic"]


@dataclass(frozen=True)
class Baseline:
    """What differs from the serving engine.

    `head_groups` says which heads share a page table: heads of similar budgets, neighbours, or all
    heads of a layer, in pages of a layer's heads. The budget of each head stays the same.
    `decode_schedule` (`compared_schedules.py`) plans every decode step; None is the one that
    serves.
    """

    head_groups: HeadGroups = "clustered"
    decode_schedule: str | None = None

    def engine(self, config: EngineConfig, loaded: LoadedModel) -> Engine:
        """The engine of `config` with these differences. It derives no ratios.

        Raises the errors of `engine_of`, and `ConfigError` for an unknown schedule.
        """
        kernels = self.kernels()
        blueprint = for_one_device(config, loaded)
        if self.head_groups != "clustered":
            blueprint = self._regroup(blueprint)
        return Engine(build_parts(blueprint, kernels))

    def kernels(self) -> KernelChoice:
        """The kernels of the device, with the schedule."""
        if self.decode_schedule is None:
            return pool_kernels
        try:
            return parse_schedule(self.decode_schedule).kernels
        except ConfigError as error:
            raise ConfigError(f"decode_schedule: {error}") from error

    def _regroup(self, blueprint: Blueprint) -> Blueprint:
        heads = blueprint.config.heads_per_page
        if self.head_groups == "monolithic":
            heads = blueprint.loaded.geometry.kv_heads
        served = [self._with_groups(one, heads) for one in blueprint.served.retentions]
        return replace(blueprint, served=Served(blueprint.served.scorers, served))

    def _with_groups(self, retention: Retention, heads_per_page: int) -> Retention:
        layout, full = retention.layout, retention.layout.full_groups
        groups, pages = group_adjacent(
            layout.groups[:full], layout.sealed_pages[:full].tolist(), heads_per_page
        )
        return replace(
            retention,
            layout=layout.with_groups(groups, pages, heads_per_page),
            fingerprint=f"{self.head_groups}:{retention.fingerprint}",
        )
