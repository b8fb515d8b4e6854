"""What one step computes, in one forward pass or several: rows, and the page moves before them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from msgspec import Struct

from tangram.cache.retention import Retention
from tangram.types import Int32, Int64, Move, StateLoad


class RowKind(Enum):
    """What one row of a step does.

    DECODE computes the newest token of a sequence, and drafts behind it, against the row's cache.
    TAIL computes the end of a prompt that does not fill its chunk, and keeps it raw. SEAL computes
    one whole chunk in one piece and packs it into its final pages.
    """

    DECODE = "decode"
    TAIL = "tail"
    SEAL = "seal"


class Row(Struct, frozen=True, eq=False, gc=False):
    """One request's share of a step. `start` is the position of `tokens[0]`; `tokens` is int64 [n].

    `preceding` are the few tokens before them, for scorers whose prompt quotes them; a DECODE row,
    which none scores, has none. `slot` is the row of the block tables. With `pending` only the
    device knows the last of `tokens`, which the step before samples. In a row with drafts these are
    what only the device knows. `targets` int64 [m], if there are any, are the prompt tokens behind
    the first m of `tokens`, whose log-probabilities are asked for. `snapshot` int32 [n] are pages
    for the recurrent state behind its tokens, if it is kept. It is a struct because a step
    makes one for each sequence.
    """

    request_id: str
    slot: int
    retention: Retention
    kind: RowKind
    start: int
    tokens: Int64
    preceding: Int64
    sample: bool
    pending: bool = False
    targets: Int64 | None = None
    snapshot: Int32 | None = None

    @property
    def drafts(self) -> int:
        """How many of its tokens are drafts: all but the first of a DECODE row."""
        return len(self.tokens) - 1 if self.kind is RowKind.DECODE else 0


@dataclass(frozen=True)
class Step:
    """What the model computes next: DECODE rows first, then SEAL and TAIL rows.

    `epoch` changes when the DECODE membership changes. A sequence may have several SEAL rows and a
    TAIL row, in the order of its tokens. Each attends to the entries that the rows before it
    stored. `moves` are made before the rows, in their order. Unless they are `awaited`, no row
    touches a page that they fill, so the rows may run beside them. Later steps find them done.
    `loads` follow them: states of sequences whose first rows these are.
    """

    rows: tuple[Row, ...]
    epoch: int
    moves: tuple[Move, ...] = ()
    awaited: bool = False
    loads: tuple[StateLoad, ...] = ()

    @cached_property
    def decode_rows(self) -> int:
        """The number of DECODE rows; they come first."""
        decode = RowKind.DECODE
        return sum([row.kind is decode for row in self.rows])

    @cached_property
    def decode_tokens(self) -> int:
        """The tokens of its DECODE rows, drafts included."""
        return sum([len(row.tokens) for row in self.rows[: self.decode_rows]])

    @property
    def scored_rows(self) -> list[Row]:
        """The rows with `targets`."""
        return [row for row in self.rows[self.decode_rows :] if row.targets is not None]

    @property
    def drafts(self) -> int:
        """The tokens of its DECODE rows that are drafts."""
        return self.decode_tokens - self.decode_rows
