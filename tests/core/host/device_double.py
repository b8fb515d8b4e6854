"""A stand-in for the device, and the rules of the house counted anew: what the host tests share.

`Device` keeps a label in every entry of every page and says whether each row of a step reads what
it must. `recount` goes over a cache manager's books by page, not by the totals it keeps. Hypothesis
derandomises itself in CI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tangram.cache.accounting import check_accounting
from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout, adjacent_groups
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.cache.step import Row, RowKind, Step
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.types import Geometry, HostFill, Int32, Int64, LinkTouch, Move, PageMove, PageSave

Label = tuple[Any, ...]


def geometry(
    layers: int = 2, kv_heads: int = 2, windows: Sequence[int | None] | None = None
) -> Geometry:
    """A tiny model; every layer sees the whole context unless `windows` says otherwise."""
    return Geometry(
        layers, kv_heads, 2 * kv_heads, 8, 50, 4096, tuple(windows) if windows else (None,) * layers
    )


def layout(
    sealed_pages: int = 1, *, model: Geometry | None = None, chunk: int = 8, page: int = 2
) -> Layout:
    """A layout of adjacent heads, two a page, whose groups all keep `sealed_pages` of a chunk."""
    model = model or geometry()
    groups = adjacent_groups(model.full_layers, model.kv_heads, 2)
    return Layout.build(
        model,
        chunk_tokens=chunk,
        page_tokens=page,
        heads_per_page=2,
        max_tokens=96,
        groups=groups,
        sealed_pages=[sealed_pages] * len(groups),
    )


def retentions(*layouts: Layout, one_chunk_a_step: frozenset[int] = frozenset()) -> list[Retention]:
    """One for each of `layouts`, under names of their own."""
    return [
        Retention(1.0, entry, f"profile {number}", one_chunk_a_step=number in one_chunk_a_step)
        for number, entry in enumerate(layouts)
    ]


def kept_first(drafted: Layout, name: str) -> Retention:
    """A retention that keeps everything, of which drafts read what `drafted` keeps."""
    full = drafted.full_groups
    whole = Layout.build(
        drafted.geometry,
        chunk_tokens=drafted.chunk_tokens,
        page_tokens=drafted.page_tokens,
        heads_per_page=drafted.heads_per_page,
        max_tokens=drafted.max_tokens,
        groups=drafted.groups[:full],
        sealed_pages=[drafted.chunk_pages] * full,
    )
    draft = Retention(0.5, drafted, f"profile {name}", scorer="keydiff")
    return Retention(1.0, whole, f"full: profile {name}", scorer="keydiff", draft=draft)


class NumberedCache(CacheManager):
    """A cache manager whose tests name retentions by their number."""

    def __init__(self, retentions: Sequence[Retention], **options: Any) -> None:
        super().__init__(retentions, **options)
        self.retentions = retentions

    def enter(self, which: int, salt: str, tokens: Int64, limit: int) -> SequenceCache | None:
        return self.admit(ChunkKeys(self.retentions[which], salt), tokens, limit)


@st.composite
def layout_sets(draw: st.DrawFn, *, count: int = 2, max_tokens: int = 48) -> list[Layout]:
    """Layouts of one model and page size, as one engine has them; groups, counts and windows are
    anything legal.
    """
    page, chunk_pages = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4))
    chunk, per_page = page * chunk_pages, draw(st.integers(1, 3))
    window = st.none() | st.integers(1, 3 * chunk)
    windows = draw(st.lists(window, min_size=1, max_size=3))
    model = geometry(len(windows), draw(st.sampled_from([1, 3])), windows)
    heads = [(layer, head) for layer in model.full_layers for head in range(model.kv_heads)]
    built = []
    for _ in range(count):
        order = draw(st.permutations(heads))
        groups = [order[start : start + per_page] for start in range(0, len(order), per_page)]
        fewest = draw(st.sampled_from([1, chunk_pages]))  # the second keeps everything
        pages = draw(
            st.lists(st.integers(fewest, chunk_pages), min_size=len(groups), max_size=len(groups))
        )
        built.append(
            Layout.build(
                model,
                chunk_tokens=chunk,
                page_tokens=page,
                heads_per_page=per_page,
                max_tokens=max_tokens,
                groups=groups,
                sealed_pages=pages,
            )
        )
    return built


Work = tuple[Row, dict[int, Label], dict[int, Label]]


class Device:
    """The pool as labels: an entry's label names everything that its KV state may depend on, and
    nothing else.
    """

    def __init__(self, manager: CacheManager, page_tokens: int) -> None:
        self.manager, self.page_tokens = manager, page_tokens
        self.entries: list[Label | None] = [None] * (manager.ledger.total * self.page_tokens)
        self.host: list[Label | None] = [None] * (manager.host.total * self.page_tokens)
        # The recurrent states of slots: at the end of the newest sealed chunk, behind the newest
        # token.
        self.sealed, self.newest = dict[int, Label](), dict[int, Label]()

    def run(self, step: Step, sequences: dict[int, TokenSequence]) -> None:
        """All rows write, then every row reads what it must; nobody writes what a row of another
        sequence touches.
        """
        work = [(row, *self._work(row, sequences[row.slot])) for row in step.rows]
        self._check_touched(work)
        self.move(step.moves)
        if not step.awaited:
            coming = {
                page
                for move in step.moves
                if isinstance(move, PageMove) and move.inward and move.slots is not None
                for page in move.pages.tolist()
            }
            touched = {
                place // self.page_tokens
                for _, reads, writes in work
                for place in (*reads, *writes)
            }
            assert not coming & touched, "a row touches a page that is still being copied"
        for row in {row.slot: row for row in step.rows}.values():  # the last of each sequence
            self._check_length(row)
        for _, _, writes in work:
            for place, label in writes.items():
                self.entries[place] = label
        if self.manager.state_pages:
            self._carry_states(step, sequences)
        for row, reads, _ in work:
            for place, label in reads.items():
                assert self.entries[place] == label, (
                    f"{row.kind} at {row.start} reads {self.entries[place]}, not {label}"
                )

    def _carry_states(self, step: Step, sequences: dict[int, TokenSequence]) -> None:
        """Each row begins from the state that its tokens make, and leaves one."""
        for load in step.loads:
            self.sealed[load.slot] = ()
            if load.pages is not None:
                (self.sealed[load.slot],) = set(self._of_pages(load.pages))
        for row in step.rows:
            layout, sequence = row.retention.layout, sequences[row.slot]
            owner, end = (row.retention, sequence.keys.salt, "state"), row.start + len(row.tokens)
            held = self.newest if row.start % layout.chunk_tokens else self.sealed
            before, after = (
                (*owner, hash(tuple(sequence.tokens[:at].tolist()))) if at else ()
                for at in (row.start, end)
            )
            assert held[row.slot] == before, f"{row.kind} at {row.start} begins from another state"
            (self.sealed if row.kind is RowKind.SEAL else self.newest)[row.slot] = after
            if row.snapshot is not None:
                assert row.kind is RowKind.SEAL
                assert len(row.snapshot) == self.manager.state_pages
                assert (self.manager.ledger.references[row.snapshot] == 1).all()
                for page in row.snapshot.tolist():
                    span = slice(page * self.page_tokens, (page + 1) * self.page_tokens)
                    self.entries[span] = [after] * self.page_tokens

    def _of_pages(self, pages: Int32) -> list[Label]:
        size = self.page_tokens
        found = [self.entries[page * size + at] for page in pages.tolist() for at in range(size)]
        return [label or ("nothing",) for label in found]

    def check_raw(self, sequence: TokenSequence, end: int) -> None:
        """The raw tail of `sequence` up to position `end` holds what its tokens make of it."""
        assert sequence.cache is not None
        start = sequence.cache.sealed_chunks * sequence.cache.layout.chunk_tokens
        layout, owner = sequence.retention.layout, (sequence.retention, sequence.keys.salt)
        for group, pages in enumerate(layout.sealed_pages):
            sealed = sequence.cache.sealed_chunks * int(pages) * layout.page_tokens
            for position in range(start, end):
                place = self._place(sequence.cache.slot, layout, group, sealed + position - start)
                tokens = sequence.tokens[: position + 1].tolist()
                assert self.entries[place] == (*owner, group, position, hash(tuple(tokens)))

    def move(self, moves: Sequence[Move]) -> None:
        """Copies between the pool, host memory and the disk, one after the other; what leaves is
        read before any comes in.
        """
        size, before = self.page_tokens, list(self.entries)
        for move in moves:
            if isinstance(move, HostFill):
                for slot, labels in zip(move.slots.tolist(), move.words, strict=True):
                    self.host[slot * size : (slot + 1) * size] = labels
                continue
            if isinstance(move, PageSave):
                self._save(move, before)
                continue
            if isinstance(move, LinkTouch):
                assert self.manager.disk is not None
                self.manager.disk.touch(move.names)
                continue
            if move.slots is None:
                for page in move.pages.tolist():
                    self.entries[page * size : (page + 1) * size] = [None] * size
                continue
            assert (
                len(set(move.pages.tolist()))
                == len(move.pages)
                == len(set(move.slots.tolist()))
                > 0
            )
            for page, slot in zip(move.pages.tolist(), move.slots.tolist(), strict=True):
                inside, outside = (
                    slice(page * size, (page + 1) * size),
                    slice(slot * size, (slot + 1) * size),
                )
                if move.inward:
                    self.entries[inside] = self.host[outside]
                else:
                    self.host[outside] = before[inside]

    def _save(self, move: PageSave, entries: list[Label | None]) -> None:
        size, disk = self.page_tokens, self.manager.disk
        assert disk is not None
        labels: Any = [entries[page * size : (page + 1) * size] for page in move.pages.tolist()]
        if disk.accepts(1):
            disk.save(move.name, 1, lambda: labels)

    def _check_touched(self, work: list[Work]) -> None:
        readers, writers = dict[int, set[int]](), dict[int, set[int]]()
        for row, reads, writes in work:
            for places, by_page in ((reads, readers), (writes, writers)):
                for place in places:
                    by_page.setdefault(place // self.page_tokens, set()).add(row.slot)
        for page, slots in writers.items():
            assert len(slots) == 1, "two sequences write to one page"
            assert readers.get(page, slots) == slots, (
                "a row writes to a page that another sequence reads"
            )
            assert self.manager.ledger.references[page] == 1, "a row writes to a shared page"
        published = {
            page for node in self.manager.prefix.nodes.values() for page in node.pages.tolist()
        }
        assert not writers.keys() & published, "a row writes to a page of the prefix cache"

    def _work(self, row: Row, sequence: TokenSequence) -> tuple[dict[int, Label], dict[int, Label]]:
        layout = row.retention.layout
        tokens, size = sequence.tokens[: row.start + len(row.tokens)].tolist(), layout.chunk_tokens
        owner = (row.retention, sequence.keys.salt)
        sealed = row.start // size
        assert sequence.cache is not None
        closed = sealed - sequence.cache.open_chunks
        reads, writes = dict[int, Label](), dict[int, Label]()
        for group, members in enumerate(layout.groups):
            kept = int(layout.sealed_pages[group]) * layout.page_tokens

            def pack_labels(chunk: int, group: int = group, kept: int = kept) -> dict[int, Label]:
                mark = (*owner, group, chunk, hash(tuple(tokens[: (chunk + 1) * size])))
                return {
                    self._at(row, group, chunk * kept + entry): (*mark, entry)
                    for entry in range(kept)
                }

            def raw(position: int, group: int = group, kept: int = kept) -> tuple[int, Label]:
                mark = (*owner, group, position, hash(tuple(tokens[: position + 1])))
                entry = sealed * kept + position - sealed * size
                if position < sealed * size and row.retention.draft is not None:
                    page, within = divmod(position % size, self.page_tokens)  # the newest first
                    last = layout.chunk_pages - 1
                    entry = position // size * size + (last - page) * self.page_tokens + within
                return self._at(row, group, entry), mark

            seen = _first_seen(layout, members[0][0], row.start)
            if closed < sealed:  # chunks as decode has filled them
                reads |= dict(raw(position) for position in range(closed * size, sealed * size))
            for chunk in range(closed):
                if group < layout.full_groups:
                    reads |= pack_labels(chunk)
                else:
                    labels = list(pack_labels(chunk).items())
                    reads |= dict(labels[max(0, seen - chunk * size) :])
            reads |= dict(raw(position) for position in range(max(seen, sealed * size), row.start))
            if row.kind is RowKind.SEAL:
                writes |= pack_labels(sealed)
            else:
                writes |= dict(raw(position) for position in range(row.start, len(tokens)))
        return reads, writes

    def _check_length(self, row: Row) -> None:
        layout = row.retention.layout
        chunks, raw = divmod(row.start + len(row.tokens), layout.chunk_tokens)
        if row.kind is not RowKind.SEAL and raw == 0:  # a chunk that is full and not yet sealed
            chunks, raw = chunks - 1, layout.chunk_tokens
        for group, pages in enumerate(layout.sealed_pages):
            assert (
                self.manager.lengths[row.slot, group] == chunks * pages * layout.page_tokens + raw
            )

    def _at(self, row: Row, group: int, entry: int) -> int:
        return self._place(row.slot, row.retention.layout, group, entry)

    def _place(self, slot: int, layout: Layout, group: int, entry: int) -> int:
        page = self.manager.tables[
            slot, int(layout.group_offset[group]) + entry // self.page_tokens
        ]
        return int(page) * self.page_tokens + entry % self.page_tokens


def _first_seen(layout: Layout, layer: int, position: int) -> int:
    """The first position that a query at `position` or later sees in `layer`."""
    window = layout.geometry.windows[layer]
    return 0 if window is None else max(0, position - window + 1)


def recount(manager: CacheManager) -> None:
    """Count pages one by one, between two steps, and compare with every total the manager keeps."""
    check_accounting(manager)
    sequences, nodes = manager.sequences.values(), manager.prefix.nodes.values()
    closed = [span for seq in sequences for span in seq.spans[: _count_closed(seq)]]
    lasting = Counter(page for span in closed for page in span.tolist())
    transient = [
        pages
        for seq in sequences
        for pages in seq.window_spans + seq.spans[_count_closed(seq) :] + seq.raw_pages
    ]
    passing = Counter(page for pages in transient for page in pages.tolist())
    cached = Counter(page for node in nodes for page in node.pages.tolist())
    assert not lasting.keys() & passing.keys()
    assert not cached or max(cached.values()) == 1, "a page belongs to two links"
    held = lasting.keys() | passing.keys()
    assert manager.ledger.free == manager.ledger.total - len(held | cached.keys())
    used = held | {page for node in nodes if node.users for page in node.pages.tolist()}
    assert manager.prefix.idle_pages == len(cached.keys() - used)
    assert manager.prefix.crowded_pages == sum(passing.values()) - len(passing)
    promised = sum(seq.promised_pages for seq in sequences)
    begun = [node for node in manager._begun.values() if node is not None]
    awaited = len({page for node in begun for page in node.pages.tolist()})
    total = manager.ledger.total - awaited
    assert manager.spare_pages == total + sum(lasting.values()) - len(lasting) - promised >= 0
    assert all(seq.held_pages == seq.booked_pages <= seq.promised_pages for seq in sequences)
    for node in nodes:
        standing = (
            *(
                seq.chunk_nodes + seq.window_nodes + seq.open_nodes + seq.raw_nodes
                for seq in sequences
            ),
        )
        assert node.users == sum(chain.count(node) for chain in (*standing, begun))
        assert node.children == sum(other.parent is node for other in nodes)
        assert node.parent is None or manager.prefix.find(node.parent.key) is node.parent
    for seq in sequences:
        assert table_pages(manager, seq.slot) == held_by_group(manager, seq.slot)


def _count_closed(seq: SequenceCache) -> int:
    """Its chunks that were sealed, not filled by decode."""
    return seq.sealed_chunks - seq.open_chunks


def held_by_group(manager: CacheManager, slot: int) -> list[list[int]]:
    """Per group, the pages that the sequence says it holds, in the order of its entries."""
    seq = manager.sequences[slot]
    layout, counts = seq.layout, seq.layout.sealed_pages.tolist()
    lists: list[list[int]] = [[] for _ in counts]
    full, windowed = range(layout.full_groups), range(layout.full_groups, len(counts))
    for groups, span in [(full, span) for span in seq.spans] + [
        (windowed, span) for span in seq.window_spans
    ]:
        pages = iter(span.tolist())
        for group in groups:
            lists[group] += [next(pages) for _ in range(counts[group])]
        assert next(pages, None) is None
    for raw in seq.raw_pages:
        for group, page in enumerate(raw.tolist()):
            lists[group].append(page)
    return lists


def table_pages(manager: CacheManager, slot: int) -> list[list[int]]:
    """Per group, the pages that the block tables name within the group's length; a window group's
    dropped ones not.
    """
    seq, layout = manager.sequences[slot], manager.sequences[slot].layout
    dropped = max(0, seq.sealed_chunks - layout.window_chunks) * layout.chunk_pages
    lists = []
    for group in range(len(layout.groups)):
        begin, length = int(layout.group_offset[group]), int(manager.lengths[slot, group])
        row = manager.tables[slot, begin : begin + -(-length // layout.page_tokens)].tolist()
        lists.append(row if group < layout.full_groups else row[dropped:])
    return lists
