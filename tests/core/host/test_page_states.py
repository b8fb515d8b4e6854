"""Pages by state add up to the pool at any time: between two steps and in the middle of one,
counted page by page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache.accounting import PageStates
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tests.core.host.any_schedule import run_any_schedule
from tests.core.host.device_double import geometry, layout_sets
from tests.core.host.scheduled_device import MAX_TOKENS, ScheduledDevice


def check_states(manager: CacheManager) -> PageStates:
    """What the books say, if it is what their pages say one by one."""
    held = {
        page
        for seq in manager.sequences.values()
        for pages in (*seq.spans, *seq.window_spans, *seq.raw_pages)
        for page in pages.tolist()
    }
    cached = {page for node in manager.prefix.nodes.values() for page in node.pages.tolist()} - held
    free = set(np.flatnonzero(manager.ledger.references == 0).tolist())
    states = PageStates.of(manager)
    assert (states.held, states.cached, states.free) == (len(held), len(cached), len(free))
    assert states.held + states.cached + states.free == manager.ledger.total
    assert held | cached | free == set(range(manager.ledger.total))
    assert 0 <= states.promised <= states.cached + states.free, (
        "a promise of pages that there are not"
    )
    return states


def check_slots(manager: CacheManager) -> None:
    """Entries by the tables' lengths, which the kernels follow, beside the formula and the space in
    the pages.
    """
    for seq in manager.sequences.values():
        layout, dropped = (
            seq.layout,
            max(0, seq.sealed_chunks - seq.layout.window_chunks) * seq.layout.chunk_tokens,
        )
        used = sum(
            len(members)
            * (
                int(manager.lengths[seq.slot, group])
                - (dropped if group >= layout.full_groups else 0)
            )
            for group, members in enumerate(layout.groups)
        )
        assert used == layout.count_held_entries(seq.sealed_chunks, seq.raw_tokens)
        assert used <= seq.held_pages * layout.page_slots


class WatchedDevice(ScheduledDevice):
    """Looks at the states while a step is scheduled and not yet committed, too."""

    promises = 0

    def _check_step(self, *scheduled: Any) -> None:
        super()._check_step(*scheduled)
        self.promises = max(self.promises, check_states(self.manager).promised)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), layouts=layout_sets(max_tokens=MAX_TOKENS))
def test_states_add_up_to_the_pool_at_any_time(data: st.DataObject, layouts: list[Layout]) -> None:
    def check(manager: CacheManager) -> None:
        check_states(manager)
        check_slots(manager)

    service = run_any_schedule(data, layouts, WatchedDevice, check)
    assert check_states(service.manager).held == check_states(service.manager).promised == 0


def test_a_growing_sequence_is_promised_pages_that_others_hold_nothing_of() -> None:
    """One chunk's worth: what it does not hold yet is promised, and no longer once it has ended."""
    service = WatchedDevice(
        [
            Layout.lay_out_uncompressed(
                geometry(), chunk_tokens=8, page_tokens=2, heads_per_page=2, max_tokens=96
            )
        ],
        slack_pages=0,
        max_num_seqs=1,
    )
    service.submit([1, 2, 3], 4)
    service.step()
    assert PageStates.of(service.manager).promised > 0
    service.drain()
    assert PageStates.of(service.manager).promised == 0 < service.promises
