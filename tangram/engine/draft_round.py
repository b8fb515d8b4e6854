"""Draft passes one behind the other: each computes what the one before has chosen.

No token of them is read by the host, so a GPU runs them without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import Row
from tangram.engine.graphs import Carry
from tangram.engine.passes import Passes
from tangram.engine.sampling import choose_tokens
from tangram.engine.speculation import Drafting
from tangram.kernels.transfer import place
from tangram.types import Int64


class DraftRound:
    """What `passes` draft for the sequences of `drafting`, one row of each in every pass.

    `epoch` is that of the set of them. `vocabulary` is how many tokens the drafts are chosen from.
    """

    def __init__(
        self, passes: Passes, drafting: Sequence[Drafting], epoch: int, vocabulary: int
    ) -> None:
        self._passes, self._drafting, self._epoch = passes, drafting, epoch
        self._vocabulary = vocabulary
        newest = np.concatenate([one.row.tokens[:1] for one in drafting])
        self._tokens = passes.upload(newest)  # [n] each: the newest ones, then drafts
        self.counts: Int64 = np.array([one.row.drafts for one in drafting], np.int64)

    def compute(self, rows: Sequence[Row], numbers: Int64) -> Tensor:
        """Logits of `rows`, one of each sequence.

        Row i computes draft `numbers` [i] of its sequence; number 0 is the newest token.
        """
        carry = partial(_carry, tokens=self._take(numbers))
        return self._passes.logits(rows, self._epoch, carry, replayed=True)[1]

    def choose(self, logits: Tensor) -> None:
        """The next drafts, as the model that is drafted for would choose from `logits`."""
        number = len(self._tokens) - 1
        found = torch.stack(self._tokens, dim=1)[:, 1:]
        samplers = [
            one.sampler.ahead(number, found[at] if one.sampler.remembers else None)
            for at, one in enumerate(self._drafting)
        ]
        self._tokens.append(choose_tokens(_fit(logits, self._vocabulary), samplers))

    def drafts(self) -> Tensor:
        """int64 [Σ counts]: the drafts of one sequence after the other."""
        drafts = torch.stack(self._tokens[1:], dim=1)
        wanted = np.flatnonzero(np.arange(drafts.shape[1]) < self.counts[:, None])
        return drafts.flatten().index_select(0, place(wanted, drafts.device))

    def _take(self, numbers: Int64) -> Tensor | None:
        """Tokens `numbers` [n] of the sequences; None if all of them are on the host."""
        if not numbers.any():
            return None
        tokens = torch.stack(self._tokens, dim=1)
        return tokens.gather(1, place(numbers, tokens.device)[:, None])[:, 0]


class Membership:
    """Numbers the sets of rows that passes decode, as plans see them."""

    def __init__(self) -> None:
        self._members: tuple[tuple[int, ...], ...] = ()
        self._epoch = 0

    def epoch_of(self, members: tuple[tuple[int, ...], ...]) -> int:
        """A number that changes when `members` do: the plan may no longer hold."""
        if members != self._members:
            self._members, self._epoch = members, self._epoch + 1
        return self._epoch


def _carry(rows: Sequence[Row], ends: Int64, tokens: Tensor | None) -> Carry:
    """What writes `tokens` [rows] into those of a pass."""
    if tokens is None:
        return lambda inputs: None
    target = place(ends, tokens.device)
    return lambda inputs: inputs.index_copy_(0, target, tokens)


def _fit(logits: Tensor, vocabulary: int) -> Tensor:
    """`logits` [n, V] of a model whose vocabulary is padded to another size."""
    missing = vocabulary - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
