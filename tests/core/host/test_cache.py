"""Pages of sequences: reserved exactly, shared while equal, let go when nobody needs them, never
written twice.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.accounting import check_accounting
from tangram.cache.layout import Layout
from tangram.cache.pages import Ledger
from tangram.cache.sequence_cache import SequenceCache
from tangram.errors import IntegrityError
from tangram.types import Int64
from tests.core.host.device_double import (
    NumberedCache,
    geometry,
    held_by_group,
    layout,
    layout_sets,
    recount,
    retentions,
)
from tests.mentions import mentioning

FEW = settings(max_examples=50, deadline=None)
WINDOWED = geometry(3, 2, (None, 11, None))


def manager(*layouts: Layout, pages: int = 1000, caching: bool = True) -> NumberedCache:
    return NumberedCache(
        retentions(*layouts), total_pages=pages, max_sequences=8, prefix_caching=caching
    )


def tokens_of(count: int, seed: int = 0) -> Int64:
    return np.random.default_rng(seed).integers(0, 50, count)


def admit(
    cache: NumberedCache, tokens: Int64, *, layout: int = 0, salt: str = "", limit: int = 96
) -> SequenceCache:
    seq = cache.enter(layout, salt, tokens, limit)
    assert seq is not None
    return seq


def compute(cache: NumberedCache, seq: SequenceCache, tokens: Int64) -> None:
    """Steps that compute `tokens`: whole chunks are sealed, the rest comes in one piece."""
    size = seq.layout.chunk_tokens
    while seq.computed_tokens < len(tokens):
        begin = seq.sealed_chunks * size
        if len(tokens) - begin >= size:
            cache.seal(seq)
        else:
            cache.grow(seq, len(tokens) - seq.computed_tokens)
        cache.commit(seq, tokens)
        recount(cache)


def decode(cache: NumberedCache, seq: SequenceCache, tokens: Int64) -> None:
    """Steps that compute `tokens` one by one; full chunks are sealed."""
    for count in range(seq.computed_tokens + 1, len(tokens) + 1):
        if not seq.raw_tokens:
            assert cache.extend(seq, 96)
        cache.grow(seq, 1)
        cache.commit(seq, tokens[:count])
        recount(cache)
        if seq.raw_tokens == seq.layout.chunk_tokens:
            cache.seal(seq)
            cache.commit(seq, tokens[:count])
            recount(cache)


def pages_of(cache: NumberedCache, seq: SequenceCache) -> set[int]:
    return {page for pages in held_by_group(cache, seq.slot) for page in pages}


@FEW
@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 30)), min_size=1, max_size=6))
def test_rows_that_grow_together_hold_what_they_hold_one_by_one(
    sequences: list[tuple[int, int]],
) -> None:
    """Also where their layouts have unlike groups."""
    layouts = layout(1), layout(3, model=geometry(2, 2, (None, 11)))
    together, apart = manager(*layouts), manager(*layouts)
    for number, (which, count) in enumerate(sequences):
        for cache in (together, apart):
            seq = admit(cache, tokens_of(count, number), layout=which)
            compute(cache, seq, tokens_of(count, number))
            assert cache.extend(seq, 96)
    for _ in range(8):
        rows = [one for one in together.sequences.values() if one.raw_tokens < 8]
        together.grow_each(rows)
        for one in rows:
            apart.grow(apart.sequences[one.slot], 1)
        recount(together)
        for slot, one in together.sequences.items():
            other, groups = apart.sequences[slot], len(one.layout.groups)
            assert (one.raw_tokens, one.held_pages) == (other.raw_tokens, other.held_pages)
            assert (together.lengths[slot, :groups] == apart.lengths[slot, :groups]).all()
    assert together.spare_pages == apart.spare_pages
    full = [one for one in together.sequences.values() if one.raw_tokens == 8]
    if full:
        with pytest.raises(IntegrityError, match=mentioning("chunk 8")):
            together.grow_each(full)


# -- the ledger ------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9)), max_size=40
    )
)
def test_a_page_is_free_exactly_when_nobody_refers_to_it(program: list[tuple[str, int]]) -> None:
    ledger, held, expected = Ledger(12), list[np.ndarray](), Counter[int]()
    for action, number in program:
        if action == "take" and number > 12 - len(+expected):
            with pytest.raises(IntegrityError, match=mentioning(f"{number} {ledger.free} 12")):
                ledger.take(number)
        elif action == "take":
            held.append(ledger.take(number))
            assert len(set(held[-1].tolist())) == number and not set(held[-1].tolist()) & set(
                +expected
            )
            expected.update(held[-1].tolist())
        elif held and action == "share":
            held.append(held[number % len(held)])
            ledger.share(held[-1])
            expected.update(held[-1].tolist())
        elif held:
            gone = held.pop(number % len(held))
            ledger.release(gone)
            expected.subtract(gone.tolist())
        assert ledger.free == 12 - len(+expected)
        ledger.check(np.asarray([expected[page] for page in range(12)], np.int32))


def test_the_ledger_names_a_miscounted_page_and_a_page_that_is_free_twice() -> None:
    ledger = Ledger(4)
    pages = ledger.take(2)
    with pytest.raises(IntegrityError, match=mentioning("page 0 1")):
        ledger.check(np.zeros(4, np.int32))
    ledger.release(pages)
    ledger.references[1] = 1
    with pytest.raises(IntegrityError, match=mentioning("free 4")):
        ledger.check(np.asarray([0, 1, 0, 0], np.int32))


def test_check_finds_a_lost_page_a_wrong_footprint_and_a_promise_without_pages() -> None:
    cache = manager(layout(2))
    seq = admit(cache, tokens_of(20))
    compute(cache, seq, tokens_of(20))
    seq.promised_pages += 2000
    with pytest.raises(IntegrityError, match=mentioning("2004 4")):
        check_accounting(cache)
    cache.counted_owed_pages += 2000
    with pytest.raises(IntegrityError, match=mentioning("promised exist")):
        check_accounting(cache)
    seq.promised_pages -= 2000
    cache.counted_owed_pages -= 2000
    lost = seq.raw_pages.pop()
    with pytest.raises(IntegrityError, match=mentioning("formula")):
        check_accounting(cache)
    seq.raw_pages.append(lost)
    cache.ledger.references[lost[0]] += 1
    with pytest.raises(IntegrityError, match="miscounted"):
        check_accounting(cache)


# -- reservation -----------------------------------------------------------------------------------


@FEW
@given(layout_sets(), st.integers(1, 40), st.integers(0, 12), st.integers(0, 1))
def test_space_for_the_promise_admits_and_one_page_less_does_not(
    layouts: list[Layout], known: int, more: int, which: int
) -> None:
    limit = known + more
    needed = layouts[which].count_promised_pages(known, limit)
    assert manager(*layouts, pages=needed - 1).enter(which, "", tokens_of(known), limit) is None
    cache = manager(*layouts, pages=needed)
    seq = admit(cache, tokens_of(known), layout=which, limit=limit)
    compute(cache, seq, tokens_of(known))
    fits = seq.layout.chunk_tokens * (known // seq.layout.chunk_tokens + 1)
    cache.grow(seq, min(limit, fits) - known)
    recount(cache)


@FEW
@given(layout_sets(), st.integers(1, 45), st.booleans())
def test_the_footprint_is_the_formula_at_every_length_and_nothing_is_left(
    layouts: list[Layout], length: int, caching: bool
) -> None:
    cache, tokens = manager(*layouts, caching=caching), tokens_of(length)
    for which in (0, 1):
        decode(cache, admit(cache, tokens[:1], layout=which), tokens)
    for seq in list(cache.sequences.values()):
        assert seq.held_pages == seq.layout.count_held_pages(
            *divmod(length, seq.layout.chunk_tokens)
        )
        cache.close(seq)
    cache.prefix.clear()
    assert cache.ledger.free == cache.ledger.total


def test_who_finds_no_pages_or_no_slot_leaves_no_trace() -> None:
    cache, tokens = manager(layout(2), pages=40), tokens_of(17)
    first = admit(cache, tokens, limit=24)
    compute(cache, first, tokens)
    before = (cache.spare_pages, cache.ledger.free, cache.ledger.references.copy())
    assert cache.enter(0, "", np.concatenate([tokens, tokens_of(70, 1)]), 96) is None
    recount(cache)
    assert (cache.spare_pages, cache.ledger.free) == before[:2] and (
        cache.ledger.references == before[2]
    ).all()
    cache = manager(layout(2))
    for seed in range(8):
        admit(cache, tokens_of(4, seed))
    assert cache.enter(0, "", tokens_of(4, 9), 96) is None


def test_growing_over_the_end_of_a_chunk_is_refused() -> None:
    cache = manager(layout(2))
    with pytest.raises(IntegrityError, match=mentioning("3 6 8")):
        seq = admit(cache, tokens_of(3))
        cache.grow(seq, 3)
        cache.grow(seq, 6)


# -- sharing ---------------------------------------------------------------------------------------


@FEW
@given(layout_sets(), st.integers(2, 40), st.integers(0, 40), st.integers(1, 5))
def test_equal_starts_share_pages_until_they_part(
    layouts: list[Layout], length: int, common: int, more: int
) -> None:
    cache, one = manager(*layouts), tokens_of(length)
    other = np.concatenate([one[:common], tokens_of(more, 1) + 50])
    compute(cache, first := admit(cache, one), one)
    second, full = admit(cache, other), layouts[0].full_groups
    if not layouts[0].window_chunks:
        assert second.cached_tokens == shareable_tokens(layouts[0], one, other)
    theirs = held_by_group(cache, first.slot)
    for group, pages in enumerate(held_by_group(cache, second.slot)[:full]):
        assert pages == theirs[group][: len(pages)]
    compute(cache, second, other)
    mine = held_by_group(cache, second.slot)
    cache.close(first)
    cache.prefix.clear()
    recount(cache)
    assert held_by_group(cache, second.slot) == mine


def shareable_tokens(layout: Layout, first: Int64, second: Int64) -> int:
    """Of `second`, what whole chunks and whole raw pages of the tail of `first` hold."""
    size, page = layout.chunk_tokens, layout.page_tokens
    shared = int(np.cumprod(first[: len(second)] == second[: len(first)]).sum())
    chunks = shared // size
    both_end_here = len(first) // size == chunks == len(second) // size
    return chunks * size + (shared % size // page * page if both_end_here else 0)


def test_other_salts_and_other_profiles_share_nothing() -> None:
    cache, tokens = manager(layout(2), layout(2)), tokens_of(30)
    seqs = []
    for which, salt in ((0, ""), (0, "a"), (1, ""), (1, "a"), (0, "\ud800")):
        seqs.append(admit(cache, tokens, layout=which, salt=salt))
        assert seqs[-1].cached_tokens == 0
        compute(cache, seqs[-1], tokens)
    counts = Counter(page for seq in seqs for page in pages_of(cache, seq))
    assert max(counts.values()) == 1
    assert admit(cache, tokens, salt="a").cached_tokens == 28


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    cache, tokens = manager(layout(2), caching=False), tokens_of(30)
    compute(cache, first := admit(cache, tokens), tokens)
    assert admit(cache, tokens).cached_tokens == 0
    cache.close(first)
    assert cache.ledger.free == cache.ledger.total


def test_two_that_compute_the_same_at_once_end_on_one_copy() -> None:
    cache, tokens = manager(layout(2, model=WINDOWED)), tokens_of(22)
    seqs = [admit(cache, tokens), admit(cache, tokens)]
    for seq in seqs:
        compute(cache, seq, tokens)
    sealed, windows, raw = 2 * 2 * 2, 2 * 4, 3 * 3
    assert len(pages_of(cache, seqs[0])) == sealed + windows + raw
    assert pages_of(cache, seqs[0]) == pages_of(cache, seqs[1])


@pytest.mark.parametrize("chunk", [2, 8])
def test_decoded_tokens_are_found_by_the_next_turn(chunk: int) -> None:
    cache, tokens = manager(layout(1, model=WINDOWED, chunk=chunk)), tokens_of(41)
    seq = admit(cache, tokens[:3])
    decode(cache, seq, tokens)
    cache.close(seq)
    assert admit(cache, tokens).cached_tokens == 40


def test_the_cache_gives_way_to_the_living_least_recently_used_first() -> None:
    def visit(tokens: Int64, limit: int) -> int:
        seq = admit(cache, tokens, limit=limit)
        compute(cache, seq, tokens)
        cache.close(seq)
        return seq.cached_tokens

    cache = manager(layout(4), pages=28)  # a chunk is 8 pages, a raw page of both groups 2
    one, two, three, four = (tokens_of(8, seed) for seed in range(4))
    assert [visit(tokens, 8) for tokens in (one, two, three)] == [0, 0, 0]
    assert visit(np.append(one, 1), 9) == 8
    assert visit(four, 8) == 0
    assert visit(np.append(one, 1), 9) == 8
    assert visit(np.append(two, 1), 9) == 0


# -- sliding windows -------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_window_part_stays_until_the_step_that_reads_it_last_is_done(caching: bool) -> None:
    cache, tokens = manager(layout(2, model=WINDOWED), caching=caching), tokens_of(40)
    seq = admit(cache, tokens)
    assert seq.layout.window_chunks == 2
    for chunk in range(5):
        before = [pages.tolist() for pages in seq.window_spans]
        cache.seal(seq)
        assert [pages.tolist() for pages in seq.window_spans[:-1]] == before
        assert all((cache.ledger.references[pages] >= 1).all() for pages in seq.window_spans)
        cache.commit(seq, tokens)
        assert len(seq.window_spans) == min(chunk + 1, 2)
        recount(cache)
    idle = cache.prefix.idle_pages
    assert idle == (3 * 4 if caching else 0)  # what slid out can be found again, or is free
    assert cache.ledger.free == 1000 - seq.held_pages - idle


@pytest.mark.parametrize("caching", [True, False])
def test_chunks_of_one_step_keep_their_window_parts_until_it_is_done(caching: bool) -> None:
    cache, tokens = manager(layout(2, model=WINDOWED), caching=caching), tokens_of(40)
    seq = admit(cache, tokens)
    chunk_tokens = seq.layout.chunk_tokens
    for _ in range(4):
        cache.seal(seq)
        assert cache.can_go_on(seq, chunk_tokens)
    assert len(seq.window_spans) == 4 and seq.held_pages == seq.booked_pages
    cache.commit(seq, tokens)
    assert len(seq.window_spans) == 2
    recount(cache)
    cache.close(seq)
    for chunks in range(5 if caching else 0):  # every boundary can be continued from
        again = admit(cache, tokens[: chunks * chunk_tokens + 1])
        assert again.cached_tokens == chunks * chunk_tokens
        cache.close(again)


@pytest.mark.parametrize("spare", [0, 4, 100])
def test_a_step_goes_on_only_where_pages_beyond_the_promise_are_spare(spare: int) -> None:
    whole = layout(2, model=WINDOWED)
    tokens = tokens_of(6 * whole.chunk_tokens)
    promised = whole.count_promised_pages(len(tokens), len(tokens))
    cache = manager(whole, pages=promised + spare)
    seq, steps = admit(cache, tokens, limit=len(tokens)), 0
    while seq.sealed_chunks < 6:
        cache.seal(seq)
        assert cache.spare_pages >= 0
        if seq.sealed_chunks == 6 or not cache.can_go_on(seq, whole.chunk_tokens):
            cache.commit(seq, tokens)
            recount(cache)
            steps += 1
    assert steps == {0: 3, 4: 2, 100: 1}[spare]


def test_a_chain_whose_newest_windows_were_evicted_is_used_only_as_far_as_windows_reach() -> None:
    cache, tokens = manager(layout(2, model=WINDOWED), pages=70), tokens_of(41)
    seq = admit(cache, tokens, limit=41)
    compute(cache, seq, tokens)
    cache.prefix.clear()  # the windows of the first three chunks go, the chunks stay
    partial = admit(cache, tokens[:25], limit=25)
    assert partial.cached_tokens == 0
    cache.close(partial)
    assert admit(cache, tokens, limit=41).cached_tokens == 40


@FEW
@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=8))
def test_what_was_drafted_and_refused_leaves_nothing(
    prompt: int, rounds: list[tuple[int, int]]
) -> None:
    """Drafts grow the tail, refused ones shrink it; two caches of equal tokens hold equal pages."""
    cache = manager(layout(2))
    tokens = tokens_of(200)
    seq = admit(cache, tokens[:prompt], limit=96)
    compute(cache, seq, tokens[:prompt])
    size = seq.layout.chunk_tokens
    for drafted, accepted in rounds:
        fits = size - seq.raw_tokens
        if fits <= 0:
            break
        drafted = min(drafted, fits)
        accepted = min(accepted, drafted)
        cache.grow(seq, drafted)
        cache.shrink(seq, drafted - accepted)
        cache.commit(seq, tokens[: seq.computed_tokens])
        check_accounting(cache)
        assert seq.held_pages == seq.formula_pages
        assert (
            cache.lengths[seq.slot, : len(seq.layout.groups)]
            == seq.layout.lengths(seq.sealed_chunks, seq.raw_tokens)
        ).all()
    cache.close(seq)
    check_accounting(cache)


def test_what_others_may_share_cannot_be_taken_back() -> None:
    cache = manager(layout(2))
    tokens = tokens_of(100)
    seq = admit(cache, tokens[:1])
    cache.grow(seq, seq.layout.page_tokens)
    cache.commit(seq, tokens[: seq.computed_tokens])
    with pytest.raises(IntegrityError, match=mentioning("1 prefix")):
        cache.shrink(seq, 1)
