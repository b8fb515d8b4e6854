"""Every rank's block tables name what its own heads keep, whatever happens to sequences."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import PartTables
from tangram.cache.step import Step
from tangram.cache.write_log import WriteLog
from tangram.engine.ranks.rank_shares import RankShares, share_retentions
from tangram.engine.ranks.rank_wire import OrderCodec, StepOrder
from tests.core.host.device_double import held_by_group, layout_sets, retentions
from tests.core.host.scheduled_device import MAX_TOKENS, ScheduledDevice
from tests.core.host.test_scheduler import prompt_of
from tests.examples import examples

RANKS = 3


def share_layouts(layouts: list[Layout]) -> list[RankShares]:
    """The shares of all ranks in retentions of `layouts`."""
    whole = retentions(*layouts)
    return [share_retentions(whole, layouts[0].geometry, rank, RANKS) for rank in range(RANKS)]


def check_tables(cache: CacheManager, tables: PartTables, shares: RankShares) -> None:
    """Compare a rank's rows with the pages that sequences hold of its heads."""
    numbers = {common.fingerprint: own.layout for common, own in shares.local.items()}
    for seq in cache.sequences.values():
        layout, held = numbers[seq.keys.retention.fingerprint], held_by_group(cache, seq.slot)
        for group, kept in enumerate(layout.sealed_pages.tolist()):
            windowed = group >= layout.full_groups
            gone = max(0, seq.sealed_chunks - layout.window_chunks) if windowed else 0
            size, sealed = int(seq.layout.sealed_pages[group]), seq.sealed_chunks - gone
            chunks = [held[group][at * size : (at + 1) * size] for at in range(sealed)]
            expected = [page for pages in chunks for page in pages[:kept]]
            expected += held[group][sealed * size :]
            begin = int(layout.group_offset[group]) + gone * kept
            row = tables.tables[seq.slot, begin : begin + len(expected)]
            assert row.tolist() == expected


@settings(max_examples=examples(60), deadline=None)
@given(layout_sets(max_tokens=MAX_TOKENS), st.integers(0, 2**16), st.sampled_from([0, 40]))
def test_ranks_know_the_pages_of_their_heads(
    layouts: list[Layout], seed: int, host_pages: int
) -> None:
    """Prompts of several chunks, decoded tokens, preemption, hits and restored pages."""
    assume(layouts[0].geometry.kv_heads == RANKS)
    rng, shares = random.Random(seed), share_layouts(layouts)
    service = ScheduledDevice(
        layouts,
        slack_pages=rng.choice([0, 30, 500]),
        max_num_seqs=3,
        slack_tokens=rng.choice([0, 60]),
        host_pages=host_pages,
        kept=shares[0].common,
    )
    log = WriteLog(service.manager)
    tables = [
        PartTables({common: part.layout for common, part in share.local.items()}, 3)
        for share in shares
    ]

    def step() -> bool:
        worked = service.step() is not None
        writes = log.take()
        told = OrderCodec(shares[0].common).encode(StepOrder(Step((), 0), writes))
        for own, share in zip(tables, shares, strict=True):
            order = OrderCodec(share.common).decode(told)
            assert isinstance(order, StepOrder)
            own.copy(order.writes)
            check_tables(service.manager, own, share)
        return worked

    for _ in range(6):
        prompt = prompt_of(rng.randrange(2), rng.randrange(40), [rng.randrange(3)])
        service.submit(prompt, rng.randrange(1, 12), layout=rng.randrange(2))
        for _ in range(rng.randrange(8)):
            step()
    while step():
        pass


@settings(max_examples=examples(60), deadline=None)
@given(layout_sets(max_tokens=MAX_TOKENS))
def test_each_head_keeps_what_the_profile_lets_it_keep(layouts: list[Layout]) -> None:
    """Whatever the number of ranks is, and all ranks count the same page numbers."""
    assume(layouts[0].geometry.kv_heads == RANKS)
    shares = share_layouts(layouts)
    for number, layout in enumerate(layouts):
        commons = [share.common[number].layout for share in shares]
        assert len({tuple(common.sealed_pages.tolist()) for common in commons}) == 1
        kept = np.zeros_like(layout.head_kept_tokens)
        for share in shares:
            own = share.local[share.common[number]].layout
            assert (own.sealed_pages <= commons[0].sealed_pages).all()
            np.put_along_axis(kept, share.heads, own.head_kept_tokens, axis=1)
        assert (kept == layout.head_kept_tokens).all()
