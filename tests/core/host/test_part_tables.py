"""What drafts read is always the first pages of each sealed chunk and the raw tail."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import PartTables
from tangram.types import Int64
from tests.core.host.device_double import held_by_group, kept_first, layout, layout_sets
from tests.core.host.scheduled_device import MAX_TOKENS, ScheduledDevice
from tests.core.host.test_scheduler import prompt_of
from tests.core.host.test_speculative_schedule import drafts_of


class PartTableCopy:
    """The draft tables, copied where they say that they were written."""

    def __init__(self, drafts: PartTables) -> None:
        self._drafts, self.tables = drafts, drafts.tables.copy()
        drafts.follow(self._write)

    def _write(self, slot: int, places: Int64) -> None:
        self.tables[slot, places] = self._drafts.tables[slot, places]


def check_tables(cache: CacheManager, copy: PartTableCopy) -> int:
    """Compare every sequence's row with its pages; returns how many pages drafts do not read."""
    assert cache.drafts is not None
    left_out = 0
    for seq in cache.sequences.values():
        draft = seq.keys.retention.draft
        assert draft is not None
        layout, held = draft.layout, held_by_group(cache, seq.slot)
        for group, kept in enumerate(layout.sealed_pages.tolist()):
            windowed = group >= layout.full_groups
            gone = max(0, seq.sealed_chunks - layout.window_chunks) if windowed else 0
            # Of a chunk, drafts read its first pages; of the raw tail all.
            size, sealed = layout.chunk_pages, seq.sealed_chunks - gone
            chunks = [held[group][at * size : (at + 1) * size] for at in range(sealed)]
            expected = [page for pages in chunks for page in pages[:kept]]
            expected += held[group][sealed * size :]
            begin = int(layout.group_offset[group]) + gone * kept
            for tables in (cache.drafts.tables, copy.tables):
                assert tables[seq.slot, begin : begin + len(expected)].tolist() == expected
            left_out += len(held[group]) - len(expected)
    return left_out


@settings(max_examples=60, deadline=None)
@given(layout_sets(max_tokens=MAX_TOKENS), st.integers(0, 2**16), st.sampled_from([0, 40]))
def test_tables_follow_whatever_happens_to_sequences(
    layouts: list[Layout], seed: int, host_pages: int
) -> None:
    """Prompts of several chunks, decoded and drafted tokens, preemption, hits and restored pages.

    A step may seal several chunks, some of which another sequence has published meanwhile.
    """
    rng = random.Random(seed)
    service = ScheduledDevice(
        layouts,
        slack_pages=rng.choice([0, 30, 500]),
        max_num_seqs=3,
        slack_tokens=rng.choice([0, 60]),
        host_pages=host_pages,
        drafts=drafts_of(seed),
        kept=[kept_first(entry, str(at)) for at, entry in enumerate(layouts)],
    )
    assert service.manager.drafts is not None
    copy = PartTableCopy(service.manager.drafts)
    for _ in range(6):
        prompt = prompt_of(rng.randrange(2), rng.randrange(40), [rng.randrange(3)])
        service.submit(prompt, rng.randrange(1, 12), layout=rng.randrange(2))
        for _ in range(rng.randrange(8)):
            service.step()
            check_tables(service.manager, copy)
    while service.step() is not None:
        check_tables(service.manager, copy)


@pytest.mark.parametrize("tail", [1, 3, 7])
def test_equal_prompts_in_one_step_end_on_one_copy_of_what_drafts_read(tail: int) -> None:
    """Both compute three chunks and a tail in one step; the later one adopts the pages."""
    kept = [kept_first(layout(2), "only")]
    cache = CacheManager(kept, total_pages=200, max_sequences=2, prefix_caching=True)
    assert cache.drafts is not None
    copy = PartTableCopy(cache.drafts)
    tokens, keys = np.asarray(prompt_of(1, 30, [1])), ChunkKeys(kept[0], "")
    seqs = [cache.admit(keys, tokens, 40) for _ in range(2)]
    for seq in seqs:
        assert seq is not None
        for _ in range(3):
            cache.seal(seq)
        cache.grow(seq, tail)
    for seq in seqs:
        assert seq is not None
        cache.commit(seq, tokens)
        assert check_tables(cache, copy) == 2 * 2 * 3 * 2, "two groups, three chunks, of 4 pages 2"
    first, second = (cache.drafts.tables[seq.slot] for seq in seqs if seq is not None)
    full_pages = 3 * 2 + tail // 2  # of a group: kept of three chunks, and raw ones that are full
    assert first[:full_pages].tolist() == second[:full_pages].tolist()


def test_of_a_chunk_that_decode_filled_drafts_read_the_newest_pages() -> None:
    kept = [kept_first(layout(3), "only")]
    cache = CacheManager(kept, total_pages=200, max_sequences=1, prefix_caching=True)
    assert cache.drafts is not None and kept[0].draft is not None
    copy = PartTableCopy(cache.drafts)
    seq = cache.admit(ChunkKeys(kept[0], ""), np.zeros(9, np.int64), 40)
    assert seq is not None
    cache.seal(seq)
    cache.grow(seq, 8)
    raw = [pages.tolist() for pages in seq.raw_pages]
    cache.leave_open(seq)
    cache.grow(seq, 3)
    check_tables(cache, copy)
    for group, begin in enumerate(kept[0].draft.layout.group_offset[:-1].tolist()):
        read = copy.tables[seq.slot, begin + 3 : begin + 8].tolist()
        newest = [pages[group] for pages in (raw[3], raw[2], raw[1])]
        assert read == newest + [pages[group] for pages in seq.raw_pages]


def test_restored_chunks_are_entered_again() -> None:
    """The pool holds one sequence, so that chunks come back from host memory in other pages."""
    kept = [kept_first(layout(2), "only")]
    service = ScheduledDevice(
        [layout(4)], slack_pages=8, max_num_seqs=2, host_pages=1000, kept=kept
    )
    assert service.manager.drafts is not None
    copy = PartTableCopy(service.manager.drafts)
    for start in (1, 2, 3, 4, 1, 2):
        service.submit([start] * 28, 3)
        while service.step() is not None:
            check_tables(service.manager, copy)
    assert service.manager.host.restored_tokens > 0


def test_a_pass_reads_what_is_kept_before_its_token_and_the_token() -> None:
    retention = kept_first(layout(1, chunk=8, page=2), "only")
    drafts = PartTables({retention: retention.draft.layout}, 3)  # type: ignore
    positions = np.array([3, 8, 21])
    drafts.set_positions(retention.draft.layout, np.array([2, 0, 1]), positions)  # type: ignore
    assert drafts.lengths.tolist() == [[2 + 1] * 2, [2 * 2 + 5 + 1] * 2, [3 + 1] * 2]
