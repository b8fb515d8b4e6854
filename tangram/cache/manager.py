"""Pages for sequences: admit, grow, seal, commit, close. Host integers only, no positions.

Admission promises a sequence every page that it will need until its chunk ends (Tangram, budget
reservation). The counts are a formula of its length, so the promise is exact and nothing is
reclaimed. This always holds:

    Σ max(0, promised − held)  +  crowded transient pages   ≤   free + idle cached pages
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from tangram.cache.disk import DiskTier
from tangram.cache.host import HostTier
from tangram.cache.keys import ChunkKeys, raw_key, state_key
from tangram.cache.layout import Layout
from tangram.cache.pages import Ledger
from tangram.cache.part_tables import PartTables
from tangram.cache.prefix import Chain, Link, Node, PrefixCache
from tangram.cache.retention import Retention
from tangram.cache.sequence_cache import SequenceCache
from tangram.cache.snapshots import keeps_snapshot
from tangram.errors import IntegrityError
from tangram.types import Int32, Int64, LinkName, Move, StateLoad
from tangram.watch import ChunkStored, LinkChange

# Drafts read an open chunk less well than a sealed one: one may be open for so many sealed ones.
_CLOSED_OF_OPEN = 4


class CacheManager:
    """The one owner of the pool's pages and of the `host_pages` behind them, if there are any.

    Sealed chunks are written to `disk`, from where they come back by way of host memory.

    `tables` is int32 [max_sequences, width]: row `slot` holds the page ids of every group at
    `Layout.group_offset`. `lengths` is int32 [max_sequences, groups]: entries by group. `drafts`
    are the tables of what drafts read, if a retention has a draft. `rounds_chunks` says whether
    sealing rounds entries. A snapshot of a sequence's recurrent state takes `state_pages`, 0 in a
    model without such states. `counted_owed_pages` is the sum of `SequenceCache.owed_pages`, which
    is kept.
    """

    def __init__(
        self,
        retentions: Sequence[Retention],
        *,
        total_pages: int,
        max_sequences: int,
        prefix_caching: bool,
        host_pages: int = 0,
        rounds_chunks: bool = False,
        state_pages: int = 0,
        disk: DiskTier | None = None,
    ) -> None:
        layouts = [retention.layout for retention in retentions]
        self.ledger = Ledger(total_pages)
        self.host, self.disk = HostTier(host_pages, total_pages), disk
        self.prefix = PrefixCache(self.ledger, self.host, state_pages > 0)
        self.state_pages = state_pages
        self._begun: dict[int, Node | None] = {}  # slots whose states the device does not have yet
        self.prefix_caching, self.rounds_chunks = prefix_caching, rounds_chunks
        # All lie in one pool.
        self.page_tokens, self.chunk_tokens = layouts[0].page_tokens, layouts[0].chunk_tokens
        width = max(int(layout.group_offset[-1]) for layout in layouts)
        groups = max(len(layout.groups) for layout in layouts)
        self.tables: Int32 = np.zeros((max_sequences, width), np.int32)
        self._follower: Callable[[int, Int64], None] | None = None
        self.lengths: Int32 = np.zeros((max_sequences, groups), np.int32)
        drafted = {entry: entry.draft.layout for entry in retentions if entry.draft is not None}
        self.drafts = PartTables(drafted, max_sequences) if drafted else None
        self._slots = list(range(max_sequences - 1, -1, -1))
        self.sequences: dict[int, SequenceCache] = {}
        self.counted_owed_pages = 0  # of all sequences: added up again only where one changes
        self._arriving: list[SequenceCache] = []

    # -- capacity ----------------------------------------------------------------------------------

    @property
    def spare_pages(self) -> int:
        """Pages that are neither held nor promised."""
        free = self.ledger.free + self.prefix.idle_pages
        return free - self.prefix.crowded_pages - self.counted_owed_pages

    def extend(self, seq: SequenceCache, limit: int, tokens: int | None = None) -> bool:
        """Promise `seq` the pages that it needs until its current chunk ends.

        With `tokens`, it is the chunk that so many tokens reach. Returns False if there are not
        enough pages now.
        """
        reached = seq.sealed_chunks * seq.layout.chunk_tokens if tokens is None else tokens
        wanted = seq.layout.count_promised_pages(reached, limit)
        if (more := wanted - seq.promised_pages) > 0 and more > self.spare_pages:
            return False
        seq.promised_pages = max(wanted, seq.formula_pages)
        self._count_owed(seq)
        return True

    @property
    def arriving_tokens(self) -> int:
        """The cached tokens of all sequences that are `arriving`."""
        return sum(seq.cached_tokens for seq in self._arriving)

    def can_go_on(self, seq: SequenceCache, tokens: int) -> bool:
        """Whether the step that seals a chunk of `seq` has pages for `tokens` more, up to a chunk.

        What its rows read of a sliding window stays until the step ends, beyond what was promised.
        """
        layout = seq.layout
        if not layout.window_chunks:
            return True
        raw = -(-tokens // layout.page_tokens) * len(layout.groups)
        pages = layout.span_pages if tokens == layout.chunk_tokens else raw
        return pages - seq.owed_pages <= self.spare_pages

    def new_tokens(self, keys: ChunkKeys, tokens: Int64) -> int:
        """How many of `tokens` int64 [n] are not in cached chunks now and would be computed."""
        return (
            len(tokens) - len(self._chain(keys, tokens).chunks) * keys.retention.layout.chunk_tokens
        )

    # -- a sequence's states -----------------------------------------------------------------------

    def admit(
        self, keys: ChunkKeys, tokens: Int64, limit: int, reusable: Int64 | None = None
    ) -> SequenceCache | None:
        """Admit the sequence of `keys`: `tokens` int64 [n], which may grow to `limit` tokens.

        Returns None if there are not enough pages now. Links that the prefix cache has, on the
        device or in host memory, are attached; `cached_tokens` counts their tokens. At least one
        token of the `reusable` is always left to compute; these begin `tokens`, or are all. A chunk
        that the tokens fill is either wholly cached or wholly computed.
        """
        if not self._slots:
            return None
        reusable = tokens if reusable is None else reusable
        layout, chain = keys.retention.layout, self._chain(keys, reusable)
        promise = layout.count_promised_pages(len(tokens), limit)
        if not self._acquire(chain, promise):
            # Until it is loaded, a state takes pages beyond the promise.
            chain = Chain([], [], None, chain.known)
            if not self.state_pages or promise > self.spare_pages:
                return None
        seq = SequenceCache(self._slots.pop(), keys, promised_pages=promise)
        self.sequences[seq.slot] = seq
        with self.host.holding(chain.keys):
            self._attach(seq, chain, tokens)
            if self.state_pages:
                self._begin_state(seq, chain, len(tokens))
        if self._keeps_raw and len(tokens) - seq.computed_tokens < layout.chunk_tokens:
            self._attach_raw(seq, reusable)
        seq.cached_tokens = seq.computed_tokens
        self._write_lengths(seq)
        self._count_owed(seq)
        return seq

    def take_moves(
        self, slots: Collection[int]
    ) -> tuple[tuple[Move, ...], bool, tuple[StateLoad, ...]]:
        """The copies that the device must make before the next step, in order.

        The second value is true if a row of `slots` touches a page that they fill. Later steps find
        everything in place. The third are the states with which sequences in `slots` begin.
        """
        arriving, self._arriving = self._arriving, []
        awaited = bool(arriving) and any(self.sequences[slot].arriving for slot in slots)
        for seq in arriving:
            seq.arriving = False
        loads = tuple(
            StateLoad(slot, self._end_begin(slot)) for slot in [*self._begun] if slot in slots
        )
        return self.host.take_moves(), awaited, loads

    def grow(self, seq: SequenceCache, tokens: int) -> None:
        """Take pages for `tokens` more raw tokens of the current chunk, out of the promise.

        Raises `IntegrityError` if the chunk has no place for them.
        """
        self._take_raw(seq, tokens)
        self.lengths[seq.slot, : len(seq.layout.groups)] += tokens

    def grow_each(self, seqs: Sequence[SequenceCache]) -> None:
        """`grow` each of `seqs`, all different, by one token."""
        page_tokens, full = self.page_tokens, defaultdict[Retention, list[SequenceCache]](list)
        for seq in seqs:
            if seq.raw_tokens % page_tokens:
                seq.raw_tokens += 1
            else:
                full[seq.keys.retention].append(seq)
        for retention, alike in full.items():
            self._take_page_each(retention.layout, alike)
        # Beyond the groups of a layout with fewer there is nothing that anyone reads.
        self.lengths[[seq.slot for seq in seqs]] += 1

    def shrink(self, seq: SequenceCache, tokens: int) -> None:
        """Release the last `tokens` raw tokens, which were drafted and refused.

        Raises `IntegrityError` if the tail has fewer, or if the prefix cache has a page of theirs.
        """
        layout, left = seq.layout, seq.raw_tokens - tokens
        if left < len(seq.raw_nodes) * layout.page_tokens:
            raise IntegrityError(
                f"{tokens} of {seq.raw_tokens} raw tokens cannot be taken back: "
                f"{len(seq.raw_nodes)} pages of them are in the prefix cache"
            )
        kept = -(-left // layout.page_tokens)
        for pages in seq.raw_pages[kept:]:
            self.ledger.release(pages)
        del seq.raw_pages[kept:]
        seq.raw_tokens = left
        self.lengths[seq.slot, : len(layout.groups)] -= tokens
        self._count_owed(seq)

    def seal(self, seq: SequenceCache) -> None:
        """Release the raw tail and take the final pages of the current chunk.

        The step that follows fills them whole. Raises `IntegrityError` behind an open chunk.
        """
        if seq.open_chunks:
            raise IntegrityError(f"slot {seq.slot} would seal a chunk behind an open one")
        self._drop_raw(seq)
        layout, chunk = seq.layout, seq.sealed_chunks
        pages = self._take(layout.span_pages)
        self._enter(seq, layout.span_entries(chunk), pages)
        seq.spans.append(pages[: layout.full_span_pages])
        if layout.window_span_pages:
            seq.window_spans.append(pages[layout.full_span_pages :])
        self._write_lengths(seq)
        self._count_owed(seq)

    def take_snapshot(self, seq: SequenceCache, tokens: int) -> Int32 | None:
        """Pages int32 [n] for the state behind the chunk that was just sealed, of `tokens` known.

        None if it is not kept, or if there are not enough pages that nobody needs.
        """
        if not self.state_pages or not self.prefix_caching or self.state_pages > self.spare_pages:
            return None
        if not self.keeps_state(seq, tokens):
            return None
        pages = seq.snapshots[seq.sealed_chunks - 1] = self._take(self.state_pages)
        return pages

    def keeps_state(self, seq: SequenceCache, tokens: int) -> bool:
        """Whether the state behind the newest chunk of `seq`, of `tokens` known, is worth pages."""
        return keeps_snapshot(seq.sealed_chunks, tokens, self.chunk_tokens, seq.left_chunks)

    def can_leave_open(self, seq: SequenceCache) -> bool:
        """Whether decode has filled a chunk that can be read without being sealed.

        Drafts read the newest entries of it, not the best. So few of a sequence that is drafted for
        stay open.
        """
        retention, closed = seq.keys.retention, seq.sealed_chunks - seq.open_chunks
        many = retention.draft is not None and seq.open_chunks >= max(1, closed // _CLOSED_OF_OPEN)
        full = seq.raw_tokens == seq.layout.chunk_tokens and not self.state_pages
        return full and retention.keeps_whole_chunks and not (many or self.rounds_chunks)

    def leave_open(self, seq: SequenceCache) -> None:
        """Take the raw tail, a whole chunk, for a chunk as decode has filled it.

        Its entries may differ from those of a sealed one by rounding, so nobody else gets it. If
        drafts read a part of it, the newest pages come first. Raises `IntegrityError` unless
        `can_leave_open`.
        """
        if not self.can_leave_open(seq):
            raise IntegrityError(f"slot {seq.slot} has no chunk that can stay open")
        newest_first = seq.keys.retention.draft is not None
        pages = np.stack(seq.raw_pages[::-1] if newest_first else seq.raw_pages, axis=1).ravel()
        seq.spans.append(pages)
        if newest_first:
            self._enter(seq, seq.layout.span_entries(seq.sealed_chunks - 1), pages)
        seq.open_nodes += seq.raw_nodes
        seq.open_chunks += 1
        seq.raw_pages, seq.raw_nodes, seq.raw_tokens = [], [], 0
        self._count_owed(seq)

    def drop_open(self, seq: SequenceCache) -> None:
        """Release the open chunks of `seq` and the raw tail: they are to be computed and sealed."""
        self._drop_raw(seq)
        closed = seq.sealed_chunks - seq.open_chunks
        for pages in seq.spans[closed:]:
            self.ledger.release(pages)
        for node in reversed(seq.open_nodes):
            self.prefix.release(node)
        del seq.spans[closed:]
        seq.open_nodes, seq.open_chunks = [], 0
        self._write_lengths(seq)
        self._count_owed(seq)

    def commit(self, seq: SequenceCache, tokens: Int64) -> None:
        """After the step: publish the newest chunks or raw pages, and release what left the window.

        Only full raw pages are published, and nothing behind an open chunk. `tokens` int64 [n] are
        all tokens of the sequence. Where the cache already has the link, its pages replace the
        sequence's copies.
        """
        layout = seq.layout
        while self.prefix_caching and len(seq.chunk_nodes) < seq.sealed_chunks - seq.open_chunks:
            self._publish_chunk(seq, tokens)
        while len(seq.window_spans) > layout.window_chunks:
            self._drop_oldest_window(seq)
            self._count_owed(seq)
        if not self._keeps_raw or seq.open_chunks:
            return
        for page in range(len(seq.raw_nodes), seq.raw_tokens // layout.page_tokens):
            self._publish_raw(seq, tokens, page)

    def close(self, seq: SequenceCache) -> None:
        """Release everything that `seq` holds. What it published stays cached until evicted."""
        self._drop_raw(seq)
        for node in reversed(seq.open_nodes):
            self.prefix.release(node)
        if self.disk is not None and seq.chunk_nodes:
            root, links = seq.chunk_nodes[0].key, [*seq.chunk_nodes, *seq.window_nodes]
            self.host.touch([LinkName(root, node.key) for node in links])
        while seq.window_spans:
            self._drop_oldest_window(seq)
        for pages in seq.spans:
            self.ledger.release(pages)
        for node in reversed(seq.chunk_nodes):
            self.prefix.release(node)
        for pages in seq.snapshots.values():
            self.ledger.release(pages)
            self.host.clear_pages(pages)
        if seq.slot in self._begun:
            self._end_begin(seq.slot)
        self.counted_owed_pages -= seq.counted_owed_pages
        if seq.arriving:
            self._arriving.remove(seq)
        del self.sequences[seq.slot]
        self._slots.append(seq.slot)

    def next_key(self, seq: SequenceCache, tokens: Int64) -> bytes | None:
        """The prefix key of the chunk of `tokens` int64 [n] that `seq` seals next.

        None if the chunk is not full or prefix caching is off.
        """
        filled = seq.sealed_chunks + 1
        if not self.prefix_caching or len(tokens) < filled * seq.layout.chunk_tokens:
            return None
        return seq.keys.after(filled, tokens)

    def follow(self, follower: Callable[[int, Int64], None]) -> None:
        """Tell `follower` the slot and the entries [n] of every later write to the block tables."""
        self._follower = follower

    def note_changes(self) -> None:
        """From now on note which links of the prefix cache come and go."""
        self.prefix.changes = self.host.changes = []

    def take_changes(self) -> Sequence[LinkChange]:
        """The changes noted since the last call, in order."""
        noted = self.prefix.changes or []
        self.note_changes()
        return noted

    # -- internals ---------------------------------------------------------------------------------

    @property
    def _keeps_raw(self) -> bool:
        """Whether raw pages are published: no sequence can begin within a chunk without a state."""
        return self.prefix_caching and not self.state_pages

    def _acquire(self, chain: Chain, promise: int) -> bool:
        """Use and share the links of `chain` that are on the device, for a sequence with `promise`.

        False, and nothing is done, if there are not enough pages.
        """
        here = [node for key in chain.keys if (node := self.prefix.find(key)) is not None]
        for node in here:
            self.prefix.acquire(node)
        shared = [node.pages for node in here if node.link is not Link.STATE]
        # Pages that are restored or found raw come out of the promise, so they change nothing here.
        restored = chain.state is not None and self.prefix.find(chain.state) is None
        wanted = promise - sum(map(len, shared)) + restored * self.state_pages
        if wanted > self.spare_pages:
            for node in reversed(here):
                self.prefix.release(node)
            return False
        if shared:
            self.ledger.share(np.concatenate(shared))
        return True

    def _begin_state(self, seq: SequenceCache, chain: Chain, tokens: int) -> None:
        """The device must bring the state behind `chain` to `seq`, which has so many tokens.

        The link of the state stays until then.
        """
        seq.left_chunks, seq.begun_tokens = chain.known, tokens
        node = None
        if chain.state is not None:
            was_here = self.prefix.find(chain.state) is not None
            node = self._reach(chain.state, seq.chunk_nodes[-1], Link.STATE, self.state_pages)
            if not was_here:  # no sequence holds its pages
                self.ledger.release(node.pages)
            if self.host.arriving[node.pages].any() and not seq.arriving:
                seq.arriving = True
                self._arriving.append(seq)
        self._begun[seq.slot] = node

    def _end_begin(self, slot: int) -> Int32 | None:
        """The pages of the state with which the sequence in `slot` begins, which may be evicted."""
        node = self._begun.pop(slot)
        if node is None:
            return None
        self.prefix.release(node)
        return node.pages

    def _chain(self, keys: ChunkKeys, tokens: Int64) -> Chain:
        return self.prefix.longest(keys, tokens if self.prefix_caching else tokens[:0])

    def _count_owed(self, seq: SequenceCache) -> None:
        """What `seq` is owed has changed."""
        owed = seq.owed_pages
        self.counted_owed_pages += owed - seq.counted_owed_pages
        seq.counted_owed_pages = owed

    def _take_raw(self, seq: SequenceCache, tokens: int) -> None:
        """Take pages for `tokens` more raw tokens, which count from now on."""
        layout = seq.layout
        wanted = -(-(seq.raw_tokens + tokens) // layout.page_tokens)
        if seq.raw_tokens + tokens > layout.chunk_tokens:
            raise IntegrityError(
                f"{seq.raw_tokens} + {tokens} raw tokens exceed the chunk of {layout.chunk_tokens}"
            )
        while len(seq.raw_pages) < wanted:
            pages = self._take(len(layout.groups))
            self._enter(seq, layout.raw_entries(seq.sealed_chunks, len(seq.raw_pages)), pages)
            seq.raw_pages.append(pages)
        seq.raw_tokens += tokens
        self._count_owed(seq)

    def _take_page_each(self, layout: Layout, seqs: Sequence[SequenceCache]) -> None:
        """Take a raw page of every group for each of `seqs`, of `layout`, and its first token."""
        if any(seq.raw_tokens == layout.chunk_tokens for seq in seqs):
            raise IntegrityError(f"a raw token exceeds the chunk of {layout.chunk_tokens}")
        pages = self._take(len(seqs) * len(layout.groups)).reshape(len(seqs), -1)
        chunks, number = np.array([(len(seq.spans), len(seq.raw_pages)) for seq in seqs]).T
        entries = layout.raw_entries(chunks[:, None], number)
        for seq, where, taken in zip(seqs, entries, pages, strict=True):
            self._enter(seq, where, taken)
            seq.raw_pages.append(taken)
            seq.raw_tokens += 1
            self._count_owed(seq)

    def _take(self, count: int) -> Int32:
        if count > self.ledger.free:
            self.prefix.evict(count - self.ledger.free)
        return self.ledger.take(count)

    def _enter(self, seq: SequenceCache, entries: Int64, pages: Int32) -> None:
        """Enter `pages` in the row of `seq` in the block tables."""
        self.tables[seq.slot, entries] = pages
        if self.host.total and not seq.arriving and self.host.arriving[pages].any():
            seq.arriving = True
            self._arriving.append(seq)
        if self._follower is not None:
            self._follower(seq.slot, entries)
        if self.drafts is not None:
            self.drafts.enter(seq.slot, seq.keys.retention, seq.sealed_chunks, entries, pages)

    def _enter_all(self, seq: SequenceCache, entries: Int64, pages: Sequence[Int32]) -> None:
        if pages:
            self._enter(seq, entries.ravel(), np.concatenate(pages))

    def _write_lengths(self, seq: SequenceCache) -> None:
        layout = seq.layout
        self.lengths[seq.slot, : len(layout.groups)] = layout.lengths(
            *divmod(seq.computed_tokens, layout.chunk_tokens)
        )

    def _drop_raw(self, seq: SequenceCache) -> None:
        if seq.raw_pages:
            self.ledger.release(np.concatenate(seq.raw_pages))
        for node in reversed(seq.raw_nodes):
            self.prefix.release(node)
        seq.raw_pages, seq.raw_nodes, seq.raw_tokens = [], [], 0

    def _drop_oldest_window(self, seq: SequenceCache) -> None:
        self.ledger.release(seq.window_spans.pop(0))
        # A sequence that ends within a step has parts without a link: its newest.
        if seq.window_nodes:
            self.prefix.release(seq.window_nodes.pop(0))

    def _attach(self, seq: SequenceCache, chain: Chain, tokens: Int64) -> None:
        """Attach `chain` to `seq`.

        Its links on the device are acquired; the others are restored.
        """
        layout, full = seq.layout, seq.layout.full_span_pages
        windows = list(enumerate(chain.windows, len(chain.chunks) - len(chain.windows)))
        absent = {
            chunk
            for chunk, key in [*enumerate(chain.chunks), *windows]
            if self.prefix.find(key) is None
        }
        self.host.restored_tokens += len(absent) * layout.chunk_tokens
        for chunk, key in enumerate(chain.chunks):
            if self.prefix.find(key) is None:
                self._note_stored(seq, tokens, chunk)
            seq.chunk_nodes.append(
                self._reach(key, seq.chunk_nodes[-1] if chunk else None, Link.CHUNK, full)
            )
        for chunk, key in windows:
            seq.window_nodes.append(
                self._reach(key, seq.chunk_nodes[chunk], Link.WINDOW, layout.window_span_pages)
            )
        seq.spans, seq.window_spans = (
            [node.pages for node in nodes] for nodes in (seq.chunk_nodes, seq.window_nodes)
        )
        chunks = np.arange(len(chain.chunks))
        self._enter_all(seq, layout.span_entries(chunks)[:, :full], seq.spans)
        self._enter_all(
            seq,
            layout.span_entries(chunks[len(chunks) - len(windows) :])[:, full:],
            seq.window_spans,
        )

    def _reach(self, key: bytes, parent: Node | None, link: Link, pages: int) -> Node:
        """The link for `key`: acquired and shared already, or restored from host memory."""
        node = self.prefix.find(key)
        if node is not None:
            return node
        taken = self._take(pages)
        self.host.restore(key, taken)
        node = self.prefix.insert(key, parent, taken, link)
        self.prefix.acquire(node)
        return node

    def _attach_raw(self, seq: SequenceCache, tokens: Int64) -> None:
        layout, key = seq.layout, seq.keys.after(seq.sealed_chunks, tokens)
        for begin in range(
            seq.computed_tokens, len(tokens) - layout.page_tokens, layout.page_tokens
        ):
            key = raw_key(key, tokens[begin : begin + layout.page_tokens])
            node = self.prefix.find(key)
            if node is None:
                break
            self.prefix.acquire(node)
            seq.raw_nodes.append(node)
        seq.raw_pages = [node.pages for node in seq.raw_nodes]
        seq.raw_tokens = len(seq.raw_pages) * layout.page_tokens
        if seq.raw_pages:
            self.ledger.share(np.concatenate(seq.raw_pages))
        self._enter_all(
            seq, layout.raw_entries(seq.sealed_chunks, np.arange(len(seq.raw_pages))), seq.raw_pages
        )

    def _publish_chunk(self, seq: SequenceCache, tokens: Int64) -> None:
        layout, chunk = seq.layout, len(seq.chunk_nodes)
        parent = seq.chunk_nodes[-1] if seq.chunk_nodes else None
        key = seq.keys.after(chunk + 1, tokens)
        full = layout.full_span_pages
        places = partial(layout.span_entries, chunk)
        if self.prefix.find(key) is None:
            self._note_stored(seq, tokens, chunk)
        node = self._adopt(seq, lambda: places()[:full], key, parent, seq.spans[chunk], Link.CHUNK)
        seq.spans[chunk] = node.pages
        seq.chunk_nodes.append(node)
        if (snapshot := seq.snapshots.pop(chunk, None)) is not None:
            self._publish_state(seq, chunk, snapshot)
        if layout.window_span_pages:
            window = seq.keys.window_after(chunk + 1, tokens)
            place = chunk - seq.sealed_chunks  # from the end: older parts were released
            newest = self._adopt(
                seq, lambda: places()[full:], window, node, seq.window_spans[place], Link.WINDOW
            )
            seq.window_spans[place] = newest.pages
            seq.window_nodes.append(newest)

    def _publish_state(self, seq: SequenceCache, chunk: int, pages: Int32) -> None:
        """`pages` hold the state behind chunk number `chunk` of `seq`.

        If decode filled the chunk, it replaces the state behind the one before.
        """
        parent = seq.chunk_nodes[chunk]
        key = state_key(parent.key)
        if (node := self.prefix.find(key)) is None:
            node = self.prefix.insert(key, parent, pages, Link.STATE)
            self.prefix.acquire(node)
            self.prefix.release(node)  # from now on it may be evicted
        else:
            self.host.clear_pages(pages)
        self.ledger.release(pages)
        if (chunk + 1) * self.chunk_tokens <= seq.begun_tokens:
            return
        passed, seq.passing_state = seq.passing_state, node
        if passed is not None and self.prefix.find(passed.key) is passed and not passed.users:
            self.prefix.remove(passed)

    def _note_stored(self, seq: SequenceCache, tokens: Int64, chunk: int) -> None:
        """Chunk `chunk` of `seq` is new in the prefix cache, if that is noted."""
        if self.prefix.changes is None:
            return
        size, retention = seq.layout.chunk_tokens, seq.keys.retention
        stored = ChunkStored(
            seq.keys.after(chunk + 1, tokens),
            seq.keys.after(chunk, tokens) if chunk else None,
            tokens[chunk * size : (chunk + 1) * size].copy(),
            retention.kv_retention,
            retention.scorer,
            salted=bool(seq.keys.salt),
        )
        self.prefix.changes.append(stored)

    def _publish_raw(self, seq: SequenceCache, tokens: Int64, page: int) -> None:
        layout, before = seq.layout, seq.raw_nodes or seq.chunk_nodes
        parent = before[-1] if before else None
        begin = seq.sealed_chunks * layout.chunk_tokens + page * layout.page_tokens
        parent_key = (
            seq.raw_nodes[-1].key if seq.raw_nodes else seq.keys.after(seq.sealed_chunks, tokens)
        )
        key = raw_key(parent_key, tokens[begin : begin + layout.page_tokens])
        entries = partial(layout.raw_entries, seq.sealed_chunks, page)
        node = self._adopt(seq, entries, key, parent, seq.raw_pages[page], Link.RAW)
        seq.raw_pages[page] = node.pages
        seq.raw_nodes.append(node)

    def _save(self, name: LinkName, pages: Int32) -> None:
        """Write a new link to disk, unless it is there since before."""
        if self.disk is not None and not self.disk.store.has(name):
            self.host.save(name, pages)

    def _adopt(
        self,
        seq: SequenceCache,
        entries: Callable[[], Int64],
        key: bytes,
        parent: Node | None,
        pages: Int32,
        link: Link,
    ) -> Node:
        """The link for `key`, made of `pages` if it is new.

        If it exists, its pages replace `pages` at `entries`.
        """
        node = self.prefix.find(key)
        if node is None:
            node = self.prefix.insert(key, parent, pages, link)
            if self.disk is not None and link in (Link.CHUNK, Link.WINDOW):
                self._save(LinkName(seq.keys.list_known(1)[0], key), pages)
        else:
            self.ledger.share(node.pages)
            self.ledger.release(pages)
            self._enter(seq, entries(), node.pages)
        self.prefix.acquire(node)
        return node
