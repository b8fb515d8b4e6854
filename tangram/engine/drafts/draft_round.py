"""Draft passes one behind the other: each computes what the pass before has chosen.

The host reads no token of them, so a GPU runs them without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import Row
from tangram.engine.drafts.speculation import Drafting
from tangram.engine.passes.passes import Passes, carry_nothing
from tangram.engine.sampling.sampler import choose_tokens
from tangram.kernels.transfer import upload
from tangram.types import Int64


class DraftPasses:
    """Passes of `rows`, which decode the newest tokens of sequences, and then what was drafted.

    `counts` int64 [n] is how many drafts each sequence gets. `epoch` is that of the set of them.
    """

    def __init__(self, passes: Passes, rows: Sequence[Row], counts: Int64, epoch: int) -> None:
        self.counts = counts
        self._pass = passes.begin(passes.batcher.build(rows, epoch), carry_nothing)
        self._drafts: list[Tensor] = []  # [n] each

    def compute(self, beyond: int = 0) -> Tensor:
        """Logits [n, V] behind the newest token of each sequence, then behind each draft.

        A sequence that has all its drafts repeats its last pass until the others have theirs. With
        `beyond` 1 this pass computes its last draft, too.
        """
        if self._drafts:
            growth = (self.counts + beyond > len(self._drafts)).astype(np.int32)
            self._pass = self._pass.follow(self._drafts[-1], growth)
        return self._pass.logits()

    def take(self, tokens: Tensor) -> None:
        """The next draft of each sequence is its one of `tokens`, int64 [n]."""
        self._drafts.append(tokens)


class DraftRound(DraftPasses):
    """What `passes` draft for the sequences of `drafting`, whose newest tokens `rows` decode.

    `vocabulary` is how many tokens the drafts are chosen from.
    """

    def __init__(
        self,
        passes: Passes,
        drafting: Sequence[Drafting],
        rows: Sequence[Row],
        epoch: int,
        vocabulary: int,
    ) -> None:
        super().__init__(passes, rows, count_drafts(drafting), epoch)
        self._drafting, self._vocabulary = drafting, vocabulary

    def choose(self, logits: Tensor) -> Tensor:
        """The next drafts, int64 [n], as the model that is drafted for would choose them.

        It chooses from `logits` [n, V].
        """
        number = len(self._drafts)
        found = torch.stack(self._drafts, dim=1) if number else None
        samplers = [
            each.sampler.ahead(
                number, None if found is None or not each.sampler.remembers else found[at]
            )
            for at, each in enumerate(self._drafting)
        ]
        tokens = choose_tokens(_fit(logits, self._vocabulary), samplers)
        self.take(tokens)
        return tokens

    def drafts(self) -> Tensor:
        """int64 [Σ counts]: the drafts of one sequence after the other."""
        drafts = torch.stack(self._drafts, dim=1)
        wanted = np.flatnonzero(np.arange(drafts.shape[1]) < self.counts[:, None])
        return drafts.flatten().index_select(0, upload(wanted, drafts.device))


def count_drafts(drafting: Sequence[Drafting]) -> Int64:
    """int64 [n]: how many drafts each sequence gets."""
    return np.array([each.row.drafts for each in drafting], np.int64)


def _fit(logits: Tensor, vocabulary: int) -> Tensor:
    """`logits` [n, V] of a model whose vocabulary is padded to another size."""
    missing = vocabulary - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
