"""What rank 0 tells the other ranks, as bytes. Retentions travel as their numbers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from tangram.cache.part_tables import TableWrite
from tangram.cache.retention import Retention
from tangram.cache.step import Row, Step
from tangram.types import Int32, Int64


@dataclass(frozen=True)
class StepOrder:
    """The ranks plan `step`, after `writes` in the block tables."""

    step: Step
    writes: tuple[TableWrite, ...]


@dataclass(frozen=True)
class RunOrder:
    """The ranks compute the step that they have planned."""


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


Order = StepOrder | RunOrder | ClearOrder | MoveOrder | DraftOrder


class _NumberingPickler(pickle.Pickler):
    def __init__(self, target: BytesIO, numbers: Mapping[Retention, int]) -> None:
        super().__init__(target, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers[value] if isinstance(value, Retention) else None


class _NamingUnpickler(pickle.Unpickler):
    def __init__(self, told: bytes, retentions: Sequence[Retention]) -> None:
        super().__init__(BytesIO(told))
        self._retentions = retentions

    def persistent_load(self, number: int) -> Retention:
        return self._retentions[number]


class OrderCodec:
    """Orders as bytes, between processes that list the same `retentions` in one order."""

    def __init__(self, retentions: Sequence[Retention]) -> None:
        self._retentions = retentions
        self._numbers = {retention: number for number, retention in enumerate(retentions)}

    def encode(self, order: Order) -> bytes:
        """`order` for `decode`."""
        target = BytesIO()
        _NumberingPickler(target, self._numbers).dump(order)
        return target.getvalue()

    def decode(self, told: bytes) -> Order:
        """What this engine's rank 0 has encoded."""
        order: Order = _NamingUnpickler(told, self._retentions).load()
        return order
