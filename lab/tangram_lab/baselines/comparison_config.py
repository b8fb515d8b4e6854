"""The options of baseline engines."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from tangram.config import EngineConfig
from tangram.errors import ConfigError

HEAD_GROUPS = ("clustered", "adjacent", "monolithic")
RECLAMATIONS = ("reserved", "dynamic", "by-input")


@dataclass(frozen=True)
class ComparisonConfig(EngineConfig):
    """An `EngineConfig` with the options in which a baseline differs from the serving engine.

    `head_groups` says which heads share a page table: heads of similar budgets, neighbours, or all
    heads of a layer, in pages of a layer's heads. The budget of each head stays the same.
    `decode_schedule` (`baselines/uniform.py`) plans every decode step.

    `reclamation` dynamic allocates a chunk whole, and gives back the dropped part after the forward
    pass. By-input lets each chunk's own scores decide how much each head keeps, as in the methods
    that budgets replace. Then every head has pages for all entries, and no prefix is shared.
    """

    head_groups: Literal["clustered", "adjacent", "monolithic"] = "clustered"
    decode_schedule: str | None = None
    reclamation: Literal["reserved", "dynamic", "by-input"] = "reserved"

    @classmethod
    def of(cls, config: EngineConfig, **changes: object) -> ComparisonConfig:
        """`config` with `changes`."""
        given = {entry.name: getattr(config, entry.name) for entry in fields(config)}
        return cls(**given | changes)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("head_groups", HEAD_GROUPS), ("reclamation", RECLAMATIONS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(
                    f"{name} is {value!r}, it must be {', '.join(known[:-1])} or {known[-1]}"
                )
        needless = self.enable_prefix_caching or self.profile or self.kv_retention == 1.0
        if self.reclamation == "by-input" and needless:
            raise ConfigError(
                "reclamation is 'by-input' with enable_prefix_caching "
                f"{self.enable_prefix_caching}, profile {self.profile} and kv_retention "
                f"{self.kv_retention}: it needs False, no profile and less than 1.0"
            )
        if self.decode_schedule is not None and self.decode_policy is not None:
            raise ConfigError(
                f"decode_schedule is {self.decode_schedule!r} and decode_policy "
                f"{self.decode_policy!r}: give one of them, a policy chooses a schedule for each "
                "batch"
            )
