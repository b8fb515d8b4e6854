"""Drafts of a model that lies on several devices: rank 0 chooses them, all ranks compute them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from tangram.cache.part_tables import PartTables
from tangram.engine.drafts.draft_round import DraftRound, count_drafts
from tangram.engine.drafts.self_drafts import SelfDrafter
from tangram.engine.drafts.speculation import Drafting
from tangram.engine.passes.passes import Passes
from tangram.engine.ranks.rank_runner import RankRunner


class RankDrafter(SelfDrafter):
    """A `SelfDrafter` of rank 0, whose `runner` tells the other ranks what it drafts."""

    def __init__(self, passes: Passes, tables: PartTables, runner: RankRunner) -> None:
        super().__init__(passes, tables)
        self._runner = runner

    def draft(self, drafting: Sequence[Drafting]) -> Tensor:
        """See `Drafter`."""
        rows, counts = [each.row for each in drafting], count_drafts(drafting)
        with self._runner.drafting(rows, counts, self.epoch_of(drafting)):
            return super().draft(drafting)

    def _choose(self, drafts: DraftRound) -> Tensor:
        tokens = super()._choose(drafts)
        dist.broadcast(tokens, 0)
        return tokens
