"""The pages of one sequence in the pool. Its state is (sealed chunks, raw tokens) alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.cache.prefix import Node
from tangram.types import Int32


@dataclass(eq=False)
class SequenceCache:
    """The pages of one sequence and its row in the block tables (`slot`).

    `spans[c]` are the pages of sealed chunk c over the full-attention groups. `window_spans` are
    those of the newest chunks over the sliding-window groups, oldest first. `raw_pages` are the
    tail. The last `open_chunks` of the chunks are as decode filled them, and `open_nodes` are the
    raw links of their pages. `keys` are those of the sequence. The node lists name the prefix-cache
    links that it uses.
    `snapshots` are pages of the recurrent state behind chunks that are not published yet. The cache
    had the first `left_chunks` when it came with `begun_tokens`, some without such a state.
    `passing_state` is the link of a state behind a chunk that decode filled, until the next.
    It may grow to `promised_pages` without a new promise. `arriving` is true if the moves before
    the next step fill pages in its tables. `counted_owed_pages` are its part of the manager's sum.
    """

    slot: int
    keys: ChunkKeys
    spans: list[Int32] = field(default_factory=list)
    window_spans: list[Int32] = field(default_factory=list)
    raw_pages: list[Int32] = field(default_factory=list)
    raw_tokens: int = 0
    chunk_nodes: list[Node] = field(default_factory=list)
    window_nodes: list[Node] = field(default_factory=list)
    raw_nodes: list[Node] = field(default_factory=list)
    open_chunks: int = 0
    open_nodes: list[Node] = field(default_factory=list)
    snapshots: dict[int, Int32] = field(default_factory=dict)
    left_chunks: int = 0
    begun_tokens: int = 0
    passing_state: Node | None = None
    promised_pages: int = 0
    cached_tokens: int = 0
    arriving: bool = False
    counted_owed_pages: int = 0
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = self.keys.retention.layout

    @property
    def sealed_chunks(self) -> int:
        """Chunks in their final pages."""
        return len(self.spans)

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV state is in the pool."""
        return self.sealed_chunks * self.layout.chunk_tokens + self.raw_tokens

    @property
    def held_pages(self) -> int:
        """Pages held now; equals `layout.count_held_pages(sealed_chunks, raw_tokens)`."""
        return (
            sum(map(len, self.spans))
            + sum(map(len, self.window_spans))
            + sum(map(len, self.raw_pages))
        )

    @property
    def formula_pages(self) -> int:
        """The pages held between two steps according to the footprint formula."""
        return self.layout.count_held_pages(self.sealed_chunks, self.raw_tokens)

    @property
    def booked_pages(self) -> int:
        """`held_pages` without counting: the formula, and window parts still being read."""
        overdue = max(0, len(self.window_spans) - self.layout.window_chunks)
        return self.formula_pages + overdue * self.layout.window_span_pages

    @property
    def owed_pages(self) -> int:
        """Promised pages that it does not hold."""
        return max(0, self.promised_pages - self.booked_pages)
