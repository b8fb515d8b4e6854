"""The map of pages says of every page what the books say of them all."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.accounting import PageStates
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.page_map import PageMap
from tangram.watch import PageState
from tests.core.host.any_schedule import run_any_schedule
from tests.core.host.device_double import geometry, layout_sets
from tests.core.host.scheduled_device import MAX_TOKENS, ScheduledDevice


def check_map(manager: CacheManager) -> np.ndarray[Any, Any]:
    """How many pages have each state, if they add up to the books and are whose they seem."""
    sequences = list(manager.sequences.values())
    pages, books = PageMap.of(manager, sequences), PageStates.of(manager)
    counts = np.bincount(pages.states, minlength=len(PageState) + 1)
    assert counts[1] == 0, "a promise is of no particular page"
    held = counts[[PageState.RAW, PageState.SEALED, PageState.SHARED]].sum()
    found = held, counts[PageState.CACHED], counts[PageState.FREE]
    assert found == (books.held, books.cached, books.free)
    assert ((pages.holders >= 0) == np.isin(pages.states, (2, 3, 4))).all()
    holders = np.zeros(len(pages.states), np.int64)
    for number, seq in enumerate(sequences):
        sealed, raw = [*seq.spans, *seq.window_spans], seq.raw_pages
        for parts, state in ((sealed, PageState.SEALED), (raw, PageState.RAW)):
            for own in parts:
                holders[own] += 1
                alone = pages.holders[own] == number
                assert np.isin(pages.states[own][alone], (state, PageState.SHARED)).all()
    assert ((pages.states == PageState.SHARED) == (holders > 1)).all()
    assert ((pages.holders >= 0) == (holders > 0)).all()
    return counts


class Mapped(ScheduledDevice):
    """Looks at the map while a step is scheduled and not yet committed, too."""

    def _check_step(self, *scheduled: Any) -> None:
        super()._check_step(*scheduled)
        check_map(self.manager)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), layouts=layout_sets(max_tokens=MAX_TOKENS))
def test_pages_of_any_schedule_add_up(data: st.DataObject, layouts: list[Layout]) -> None:
    service = run_any_schedule(data, layouts, Mapped, check_map)
    counts = check_map(service.manager)
    assert counts[[PageState.RAW, PageState.SEALED, PageState.SHARED]].sum() == 0


def test_two_that_begin_alike_share_sealed_pages() -> None:
    """The pages of the common beginning are shared while both run, then kept for nobody."""
    layout = Layout.lay_out_uncompressed(
        geometry(), chunk_tokens=8, page_tokens=2, heads_per_page=2, max_tokens=96
    )
    service = Mapped([layout], slack_pages=60, max_num_seqs=2)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    service.submit([*prompt, 4], 8)
    service.step()
    service.submit([*prompt, 2], 8)
    most = 0
    while service.alive:
        service.step()
        most = max(most, int(check_map(service.manager)[PageState.SHARED]))
    assert most >= layout.span_pages
    assert check_map(service.manager)[PageState.CACHED] > 0
