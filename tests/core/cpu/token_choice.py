"""`choose`, with what it chose on the host."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tangram.engine.sampling.sampler import SampleRow, choose
from tangram.types import ChosenToken


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[ChosenToken]:
    """The tokens of `rows`, whose `logits` are finite."""
    tokens = choose(logits, rows).tokens_on_host()
    found = [token for token in tokens if token is not None]
    assert len(found) == len(tokens), "logits are NaN or infinite"
    return found
