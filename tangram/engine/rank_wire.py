"""What rank 0 tells the other ranks, as bytes. Retentions travel as their numbers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from tangram.cache.part_tables import TableWrite
from tangram.cache.retention import Retention
from tangram.cache.step import Row, Step
from tangram.types import Int32, Int64


@dataclass(frozen=True)
class StepOrder:
    """The ranks compute `step`, after `writes` in the block tables."""

    step: Step
    writes: tuple[TableWrite, ...]


@dataclass(frozen=True)
class ClearOrder:
    """The ranks fill `pages` [n] with zeros."""

    pages: Int32


@dataclass(frozen=True)
class MoveOrder:
    """The ranks move pages to host memory and back, as `step` says; it has no rows."""

    step: Step


@dataclass(frozen=True)
class DraftOrder:
    """The ranks decode `rows`, and then the drafts that rank 0 chooses, `counts` int64 [n] of them.

    `epoch` is that of the drafting sequences, `writes` are as in `StepOrder`.
    """

    rows: tuple[Row, ...]
    counts: Int64
    epoch: int
    writes: tuple[TableWrite, ...]


Order = StepOrder | ClearOrder | MoveOrder | DraftOrder


class OrderCodec:
    """Orders as bytes, between processes that list the same `retentions` in one order."""

    def __init__(self, retentions: Sequence[Retention]) -> None:
        self._retentions = retentions
        self._numbers = {retention: number for number, retention in enumerate(retentions)}

    def encode(self, order: Order) -> bytes:
        """`order` for `decode`."""
        numbers, target = self._numbers, BytesIO()

        class Numbering(pickle.Pickler):
            def persistent_id(self, value: Any) -> int | None:
                return numbers[value] if isinstance(value, Retention) else None

        Numbering(target, pickle.HIGHEST_PROTOCOL).dump(order)
        return target.getvalue()

    def decode(self, told: bytes) -> Order:
        """What this engine's rank 0 has encoded."""
        retentions = self._retentions

        class Naming(pickle.Unpickler):
            def persistent_load(self, number: int) -> Retention:
                return retentions[number]

        order: Order = Naming(BytesIO(told)).load()
        return order
