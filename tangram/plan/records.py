"""The records of decode plans and of prefill rows: what each int32 word is.

NumPy and compiled loops read the words of a record by name. Triton's kernels, which see int32
alone, read them at the places that `list_words` gives.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tangram.types import Int32

Records = npt.NDArray[np.void]


class RangeKind(IntEnum):
    """The kind of a task's range `a`, `b`.

    ABS     [a, b)                        an immutable span, which rows may share (PAT, pack)
    OPEN    [a, length)                   a growing tail
    FRAC    share a of b equal shares of [0, length) in whole tiles, worked out at execution
            (Tangram, AOT load balancing); EMPTY for some shares while there are fewer tiles
    WINDOW  [max(0, length - a), length)  a sliding window of a tokens
    """

    ABS = 0
    OPEN = 1
    FRAC = 2
    WINDOW = 3


def _record(*words: str, **inner: np.dtype[np.void]) -> np.dtype[np.void]:
    """A record of int32 words, with other records behind them."""
    return np.dtype([*((word, np.int32) for word in words), *inner.items()], align=True)


# Where a head of a row keeps its entries.
ADDRESS = _record(
    "table",  # the offset of its first page entry in the flat block tables
    "column",  # its column in its group's pages
    "length_index",  # the place of its length, which every step rewrites
)
# Where a head of a prefill row keeps its past, of `length` entries.
PAST = _record("table", "column", "length")
# A prefill row in the flattened batch: its queries, its keys, and the position of the first key.
SPAN = _record("query_begin", "query_end", "key_begin", "key_end", "position")
# A row that a task serves: an entry of the row list.
ENTRY = _record(
    "row",  # its query row
    "direct",  # 1 if the task writes the row's output, else 0
    "slot",  # the place of its partial result, counted from 0 in each layer
    "before",  # how many parts in the slots before it the task merges, 0 in a plan
)
TASK = _record(
    "table",  # these three: the `ADDRESS` of the first row served
    "length_index",
    "column",
    "head",  # KV head
    "kind",  # a `RangeKind`
    "a",
    "b",
    "row_begin",  # the rows served: [row_begin, row_end) of the row list
    "row_end",
    first=ENTRY,  # the first of them, repeated
)
# A (row, KV head) with several parts.
SEGMENT = _record(
    "row",
    "head",
    "first_slot",  # its parts: [first_slot, end_slot), merged in this order
    "end_slot",
)


def list_words(record: np.dtype[Any]) -> list[str]:
    """The names of a record's words in their order; words of a record inside it are `outer.inner`.

    >>> list_words(TASK)[8:11]
    ['row_end', 'first.row', 'first.direct']
    """
    return [
        f"{name}.{inner}" if inner else name
        for name in record.names or ()
        for inner in (list_words(record[name]) or [""])
    ]


def as_words(records: Records) -> Int32:
    """Contiguous records [...] as their int32 words [..., W]; a view, which NumPy copies faster."""
    return records.view(np.int32).reshape(*records.shape, len(list_words(records.dtype)))
