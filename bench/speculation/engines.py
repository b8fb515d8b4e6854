"""Engines that are measured: the serving engine, and what a measurement changes in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tangram.cache.manager import CacheManager
from tangram.config import EngineConfig
from tangram.engine.drafts.speculation import Drafter, Drafting, Speculation, SpeculationCounters
from tangram.engine.loop import Engine
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.engine.setup.blueprint import for_one_device
from tangram.engine.setup.build import build_parts
from tangram.model.device import find_device
from tangram.model.load import LoadedModel, load_model
from tangram.speculate.pace import Acceptance, Pace

SAID = 0  # the token of a model that always says the same
SURE = 1e4  # its logit
GIB = 2**30


@dataclass
class Tally(SpeculationCounters):
    """Also counts the drafted tokens that were compared: those up to the first refused one."""

    compared: int = 0

    def count(self, drafted: int, accepted: int) -> None:
        """See `SpeculationCounters`."""
        super().count(drafted, accepted)
        self.compared += min(drafted, accepted + 1)

    def figures(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in ("drafts", "drafted", "compared", "accepted")}


class FixedPace(Pace):
    """Drafts the same number of tokens in every iteration."""

    def __init__(self, drafted: int) -> None:
        super().__init__(drafted)
        self.drafted = drafted

    def choose(
        self,
        load: object,
        acceptances: Sequence[Acceptance],
        others: int = 0,
        patience: float | Sequence[float] = inf,
    ) -> list[int]:
        """See `Pace`."""
        return [self.drafted] * len(acceptances)


class SteadySpeculation(Speculation):
    """Drafts as many tokens as `pace` says, whatever that costs."""

    def __init__(self, found: Speculation, config: Any, pace: FixedPace) -> None:
        super().__init__(config, drafter=found.drafter)
        self._pace = pace


class CoinDrafter:
    """A `Drafter` for a model that always says `SAID`.

    It does the work of `drafter`. Then each drafted token is right with probability `acceptance`,
    by a seeded random number.
    """

    def __init__(self, drafter: Drafter, acceptance: float, device: torch.device) -> None:
        self._drafter, self._acceptance = drafter, acceptance
        self._generator = torch.Generator(device).manual_seed(0)

    def serves(self, sequence: TokenSequence) -> bool:
        """See `Drafter`."""
        return self._drafter.serves(sequence)

    def offer(self, sequence: TokenSequence, most: int) -> int:
        """See `Drafter`."""
        return self._drafter.offer(sequence, most)

    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        """See `Drafter`."""
        drafts = self._drafter.draft(drafting)
        coins = torch.rand(len(drafts), generator=self._generator, device=drafts.device)
        return torch.where(coins < self._acceptance, SAID, SAID + 1).to(drafts.dtype)

    @property
    def cache(self) -> CacheManager | None:
        """See `Drafter`."""
        return self._drafter.cache

    def prepare(self, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """See `Drafter`."""
        return self._drafter.prepare(sequences)

    def settle(self, sequence: TokenSequence) -> None:
        """See `Drafter`."""
        self._drafter.settle(sequence)

    def forget(self, sequence: TokenSequence) -> None:
        """See `Drafter`."""
        self._drafter.forget(sequence)


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine, and the counts of its speculation if it speculates."""

    engine: Engine
    tally: Tally | None


def build_measured(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    acceptance: float | None = None,
    pace: FixedPace | None = None,
) -> MeasuredEngine:
    """An engine of `config` whose speculation keeps a `Tally`.

    With `acceptance` the drafts of a model that always says `SAID` are right that often. With
    `pace` it says how many tokens are drafted.
    """
    parts = build_parts(for_one_device(config, loaded))
    found = parts.speculation
    if found is None:
        return MeasuredEngine(Engine(parts), None)
    if pace is not None:
        found = SteadySpeculation(found, parts.config.speculation, pace)
    if acceptance is not None and found.drafter is not None:
        found.drafter = CoinDrafter(found.drafter, acceptance, loaded.device)
    found.counters = tally = Tally(found.most)
    scheduler = replace(parts.scheduler, drafts=found)
    return MeasuredEngine(Engine(replace(parts, scheduler=scheduler, speculation=found)), tally)


def say_always(loaded: LoadedModel) -> None:
    """Let the model say `SAID` at every place, whatever it computes."""
    head: nn.Module = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def decide(head: nn.Module, inputs: Any, logits: Tensor) -> None:
        logits[..., SAID] = SURE

    head.register_forward_hook(decide)


def load_measured(model: str | Path, *, random: bool, device: str = "auto") -> LoadedModel:
    """A model in bfloat16 on a GPU and in float32 on a CPU.

    With `random` it has random weights, and says the same everywhere.
    """
    name, load_format = str(model), "dummy" if random else "auto"
    dtype = "bfloat16" if find_device(device).type == "cuda" else "float32"
    loaded = load_model(name, dtype=dtype, device=device, load_format=load_format)
    if random:
        say_always(loaded)
    return loaded


def pool_gib(loaded: LoadedModel, sequences: int, tokens: int) -> float:
    """GiB of KV pages for so many sequences of `tokens` tokens, and a tenth more."""
    shape = loaded.geometry
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * loaded.dtype.itemsize
    return 1.1 * sequences * tokens * token_bytes / GIB


def with_speculation(config: EngineConfig, speculation: Mapping[str, Any] | None) -> EngineConfig:
    """`config` with this `speculative_config`."""
    return replace(config, speculative_config=speculation)
