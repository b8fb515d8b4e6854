"""Pages for sequences: admit, grow, seal, commit, close. Host integers only; positions never come here.

Admission promises a sequence every page it will need until its chunk ends (Tangram, budget reservation): the counts are
a formula of its length, so the promise is exact and nothing is reclaimed. The books always satisfy

    Σ (promised − held)  +  crowded transient pages   ≤   free + idle cached pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tangram.cache.layout import Layout
from tangram.cache.pages import Ledger
from tangram.cache.prefix import Node, PrefixCache, chunk_key, raw_key, root_key, window_key
from tangram.cache.sequence import SequenceCache
from tangram.errors import IntegrityError
from tangram.types import Int32, Int64


class CacheManager:
    """The one owner of the pool's pages.

    `tables` is int32 [max_sequences, width]: row `slot` holds the page ids of every group at `Layout.group_offset`.
    `follower`, if set, hears of every write to `tables`: places in the flat tables, and the page ids that go there.
    `lengths` is int32 [max_sequences, groups]: entries addressable per group, kept current.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[str, Layout]],
        *,
        total_pages: int,
        max_sequences: int,
        prefix_caching: bool,
    ) -> None:
        self.fingerprints = [fingerprint for fingerprint, _ in layouts]
        self.layouts = [layout for _, layout in layouts]
        self.ledger = Ledger(total_pages)
        self.prefix = PrefixCache(self.ledger)
        self.prefix_caching = prefix_caching
        width = max(int(layout.group_offset[-1]) for layout in self.layouts)
        groups = max(len(layout.groups) for layout in self.layouts)
        self.tables: Int32 = np.zeros((max_sequences, width), np.int32)
        self.follower: Callable[[Int64, Int32], None] | None = None
        self.lengths: Int32 = np.zeros((max_sequences, groups), np.int32)
        self._slots = list(range(max_sequences - 1, -1, -1))
        self.sequences: dict[int, SequenceCache] = {}

    # -- room -----------------------------------------------------------------------------------------------------

    @property
    def spare_pages(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        owed = sum(seq.promised_pages - seq.booked_pages for seq in self.sequences.values())
        return self.ledger.free + self.prefix.idle_pages - self.prefix.crowded_pages - owed

    def extend(self, seq: SequenceCache, limit: int) -> bool:
        """Promise `seq` what it needs until its current chunk ends; False if there is no room now."""
        wanted = seq.layout.promised_pages(seq.sealed_chunks * seq.layout.chunk_tokens, limit)
        more = wanted - seq.promised_pages
        if more > 0 and more > self.spare_pages:
            return False
        seq.promised_pages = max(wanted, seq.formula_pages)
        return True

    # -- a sequence's life ----------------------------------------------------------------------------------------

    def admit(self, layout_index: int, salt: str, tokens: Int64, limit: int) -> SequenceCache | None:
        """Take in a sequence that knows `tokens` and may grow to `limit` tokens; None if there is no room now.

        What the prefix cache has of it is attached: `cached_tokens` says how much. At least one token is always left to
        compute, and a chunk that the tokens fill is either wholly cached or wholly computed.
        """
        layout = self.layouts[layout_index]
        if not self._slots:
            return None
        seq = SequenceCache(self._slots.pop(), layout_index, layout, [root_key(self.fingerprints[layout_index], salt)])
        self.sequences[seq.slot] = seq
        if self.prefix_caching:
            self._attach(seq, tokens)
        seq.cached_tokens = seq.computed_tokens
        promise = self._promise(layout, len(tokens), limit)
        seq.promised_pages = seq.formula_pages
        if promise - seq.formula_pages > self.spare_pages:
            self.close(seq)
            return None
        seq.promised_pages = max(promise, seq.formula_pages)
        self._write_lengths(seq)
        return seq

    def grow(self, seq: SequenceCache, tokens: int) -> None:
        """Make room for `tokens` more raw tokens of the current chunk, out of the promise."""
        layout = seq.layout
        wanted = -(-(seq.raw_tokens + tokens) // layout.page_tokens)
        if seq.raw_tokens + tokens > layout.chunk_tokens:
            raise IntegrityError(f"{seq.raw_tokens} + {tokens} raw tokens exceed the chunk of {layout.chunk_tokens}")
        while len(seq.raw_pages) < wanted:
            pages = self._take(len(layout.groups))
            self._enter(seq, layout.raw_entries(seq.sealed_chunks, len(seq.raw_pages)), pages)
            seq.raw_pages.append(pages)
        seq.raw_tokens += tokens
        self.lengths[seq.slot, : len(layout.groups)] += tokens

    def seal(self, seq: SequenceCache) -> None:
        """Let the raw tail go and take the final pages of the current chunk; the step that follows fills them whole."""
        self._drop_raw(seq)
        layout, chunk = seq.layout, seq.sealed_chunks
        pages = self._take_span(seq)
        self._enter(seq, layout.span_entries(chunk), pages)
        seq.spans.append(pages[: layout.full_span_pages])
        if layout.window_span_pages:
            seq.window_spans.append(pages[layout.full_span_pages :])
        self._write_lengths(seq)

    def commit(self, seq: SequenceCache, tokens: Int64) -> None:
        """After the step: let go what slid out of the window, and offer to others the newest chunk or full raw pages.

        `tokens` are all tokens of the sequence. Where the cache already has the link, its pages replace the copies.
        """
        layout = seq.layout
        if len(seq.window_spans) > layout.window_chunks:
            self._drop_oldest_window(seq)
        if not self.prefix_caching:
            return
        while len(seq.chunk_nodes) < seq.sealed_chunks:
            self._publish_chunk(seq, tokens)
        start = seq.sealed_chunks * layout.chunk_tokens
        for page in range(len(seq.raw_nodes), seq.raw_tokens // layout.page_tokens):
            begin = start + page * layout.page_tokens
            self._publish_raw(seq, tokens[begin : begin + layout.page_tokens], page)

    def close(self, seq: SequenceCache) -> None:
        """Give back everything `seq` holds; what it published stays cached until evicted."""
        self._drop_raw(seq)
        while seq.window_spans:
            self._drop_oldest_window(seq)
        for pages in seq.spans:
            self.ledger.release(pages)
        for node in reversed(seq.chunk_nodes):
            self.prefix.release(node)
        del self.sequences[seq.slot]
        self._slots.append(seq.slot)

    def next_key(self, seq: SequenceCache, tokens: Int64) -> bytes | None:
        """The prefix key of the chunk that `seq` seals next; None if `tokens` do not fill it or it is for nobody else.

        `seq` has committed all that it sealed.
        """
        begin = seq.sealed_chunks * seq.layout.chunk_tokens
        chunk = tokens[begin : begin + seq.layout.chunk_tokens]
        if not self.prefix_caching or len(chunk) < seq.layout.chunk_tokens:
            return None
        return chunk_key(seq.keys[-1], chunk)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _promise(self, layout: Layout, tokens: int, limit: int) -> int:
        return layout.promised_pages(tokens, limit)

    def _take_span(self, seq: SequenceCache) -> Int32:
        return self._take(seq.layout.span_pages)

    def _take(self, count: int) -> Int32:
        if count > self.ledger.free:
            self.prefix.evict(count - self.ledger.free)
        return self.ledger.take(count)

    def _enter(self, seq: SequenceCache, entries: Int64, pages: Int32) -> None:
        """Enter `pages` in the row of `seq` in the block tables."""
        self.tables[seq.slot, entries] = pages
        if self.follower is not None:
            self.follower(seq.slot * self.tables.shape[1] + entries, pages)

    def _write_lengths(self, seq: SequenceCache) -> None:
        lengths = seq.layout.lengths(seq.sealed_chunks, seq.raw_tokens)
        self.lengths[seq.slot, : len(lengths)] = lengths

    def _drop_raw(self, seq: SequenceCache) -> None:
        for pages in seq.raw_pages:
            self.ledger.release(pages)
        for node in reversed(seq.raw_nodes):
            self.prefix.release(node)
        seq.raw_pages, seq.raw_nodes, seq.raw_tokens = [], [], 0

    def _drop_oldest_window(self, seq: SequenceCache) -> None:
        self.ledger.release(seq.window_spans.pop(0))
        # The newest part may not be published yet, the oldest is unless caching is off.
        if seq.window_nodes:
            self.prefix.release(seq.window_nodes.pop(0))

    def _attach(self, seq: SequenceCache, tokens: Int64) -> None:
        """Stand `seq` on the longest chain of links that hold its tokens."""
        layout = seq.layout
        chunks = self._match_chunks(seq, tokens)
        for node in chunks:
            self._stand(node, seq.chunk_nodes)
            seq.keys.append(node.key)
            entries = layout.span_entries(seq.sealed_chunks)
            self._enter(seq, entries[: layout.full_span_pages], node.pages)
            seq.spans.append(node.pages)
        if layout.window_span_pages:
            first = len(chunks) - min(len(chunks), layout.window_chunks)
            for chunk in range(first, len(chunks)):
                node = self.prefix.nodes[window_key(chunks[chunk].key)]
                self._stand(node, seq.window_nodes)
                self._enter(seq, layout.span_entries(chunk)[layout.full_span_pages :], node.pages)
                seq.window_spans.append(node.pages)
        rest = len(tokens) - len(chunks) * layout.chunk_tokens
        if rest < layout.chunk_tokens:
            self._attach_raw(seq, tokens[len(chunks) * layout.chunk_tokens :])

    def _match_chunks(self, seq: SequenceCache, tokens: Int64) -> list[Node]:
        layout, key, found = seq.layout, seq.keys[0], list[Node]()
        for chunk in range((len(tokens) - 1) // layout.chunk_tokens):
            begin = chunk * layout.chunk_tokens
            key = chunk_key(key, tokens[begin : begin + layout.chunk_tokens])
            node = self.prefix.find(key)
            if node is None:
                break
            found.append(node)
        while found and layout.window_span_pages and not self._has_windows(layout, found):
            found.pop()
        return found

    def _has_windows(self, layout: Layout, chunks: list[Node]) -> bool:
        newest = chunks[len(chunks) - min(len(chunks), layout.window_chunks) :]
        return all(self.prefix.find(window_key(node.key)) is not None for node in newest)

    def _attach_raw(self, seq: SequenceCache, tail: Int64) -> None:
        layout, key = seq.layout, seq.keys[-1]
        for page in range((len(tail) - 1) // layout.page_tokens):
            begin = page * layout.page_tokens
            key = raw_key(key, tail[begin : begin + layout.page_tokens])
            node = self.prefix.find(key)
            if node is None:
                return
            self._stand(node, seq.raw_nodes)
            self._enter(seq, layout.raw_entries(seq.sealed_chunks, page), node.pages)
            seq.raw_pages.append(node.pages)
            seq.raw_tokens += layout.page_tokens

    def _stand(self, node: Node, nodes: list[Node]) -> None:
        self.prefix.acquire(node)
        self.ledger.share(node.pages)
        nodes.append(node)

    def _publish_chunk(self, seq: SequenceCache, tokens: Int64) -> None:
        layout, chunk = seq.layout, len(seq.chunk_nodes)
        parent = seq.chunk_nodes[-1] if seq.chunk_nodes else None
        key = chunk_key(seq.keys[-1], tokens[chunk * layout.chunk_tokens : (chunk + 1) * layout.chunk_tokens])
        seq.keys.append(key)
        entries = seq.layout.span_entries(chunk)
        node, seq.spans[chunk] = self._adopt(key, parent, seq.spans[chunk], transient=False)
        self._enter(seq, entries[: layout.full_span_pages], node.pages)
        seq.chunk_nodes.append(node)
        if layout.window_span_pages:
            newest, seq.window_spans[-1] = self._adopt(window_key(key), node, seq.window_spans[-1], transient=True)
            self._enter(seq, entries[layout.full_span_pages :], newest.pages)
            seq.window_nodes.append(newest)

    def _publish_raw(self, seq: SequenceCache, tokens: Int64, page: int) -> None:
        parent = seq.raw_nodes[-1] if seq.raw_nodes else (seq.chunk_nodes[-1] if seq.chunk_nodes else None)
        before = seq.raw_nodes[-1].key if seq.raw_nodes else seq.keys[-1]
        node, seq.raw_pages[page] = self._adopt(raw_key(before, tokens), parent, seq.raw_pages[page], transient=True)
        self._enter(seq, seq.layout.raw_entries(seq.sealed_chunks, page), node.pages)
        seq.raw_nodes.append(node)

    def _adopt(self, key: bytes, parent: Node | None, pages: Int32, *, transient: bool) -> tuple[Node, Int32]:
        """The link for `key`, made of `pages` if new; if not, its pages take the place of `pages`."""
        node = self.prefix.find(key)
        if node is None:
            node = self.prefix.insert(key, parent, pages, transient=transient)
        else:
            self.ledger.share(node.pages)
            self.ledger.release(pages)
        self.prefix.acquire(node)
        return node, node.pages

    def check(self) -> None:
        """Raise `IntegrityError` unless pages are accounted for, formulas hold and promises are covered."""
        expected = np.zeros(self.ledger.total, np.int32)
        for seq in self.sequences.values():
            for pages in (*seq.spans, *seq.window_spans, *seq.raw_pages):
                expected[pages] += 1
            if seq.held_pages != seq.formula_pages:
                raise IntegrityError(
                    f"slot {seq.slot} holds {seq.held_pages} pages, the formula says {seq.formula_pages}"
                )
        for node in self.prefix.nodes.values():
            expected[node.pages] += 1
        self.ledger.check(expected)
        idle = sum(len(node.pages) for node in self.prefix.nodes.values() if node.users == 0)
        if idle != self.prefix.idle_pages:
            raise IntegrityError(f"{idle} cached pages are idle, the books say {self.prefix.idle_pages}")
        if self.spare_pages < 0:
            raise IntegrityError(f"{-self.spare_pages} pages were promised that do not exist")
