"""The form of a block: every page has one place, raw and sealed."""

from __future__ import annotations

import numpy as np
import pytest

from engines import smollm2_profile, tiny_profile
from tangram.cache.layout import Layout
from tangram_vllm.slab import Slab, full_geometry


def small(sealed_pages: list[int]) -> Slab:
    groups = len(sealed_pages)
    geometry = full_geometry(groups, 1, 1, 4)
    return Slab(
        Layout.build(
            geometry,
            chunk_tokens=16,
            page_tokens=4,
            heads_per_page=1,
            max_tokens=64,
            groups=[[(layer, 0)] for layer in range(groups)],
            sealed_pages=sealed_pages,
        )
    )


def test_worked_example() -> None:
    slab = small([3, 1, 2])
    assert (slab.pages, slab.raw_rows, slab.raw_blocks, slab.columns) == (6, 2, 2, 3)
    assert slab.sealed_places.tolist() == [0, 3, 5, 1, 2, 4]
    assert slab.raw_pages(np.array([10, 20])).tolist() == [
        [60, 61, 62],
        [63, 64, 65],
        [120, 121, 122],
        [123, 124, 125],
    ]


def test_whole_chunks_are_sealed_as_they_lie() -> None:
    slab = small([4, 4])
    assert (slab.raw_blocks, slab.columns, slab.kept_share) == (1, 1, 1.0)
    rows = slab.raw_pages(np.array([0]))
    assert rows.T.ravel().tolist() == slab.sealed_places.tolist()


@pytest.mark.parametrize("kv_retention", [0.3, 0.5, 0.8])
def test_pages_of_a_block_are_used_once(kv_retention: float) -> None:
    profile = tiny_profile(kv_retention=kv_retention)
    geometry = full_geometry(3, 2, 4, 32)
    slab = Slab.lay_out(geometry, profile, profile.chunk_tokens, 1024)
    assert sorted(slab.sealed_places.tolist()) == list(range(slab.layout.span_pages))
    raw = slab.raw_pages(np.arange(slab.raw_blocks)).ravel()
    assert len(set(raw.tolist())) == len(raw) == slab.layout.chunk_pages * len(slab.layout.groups)
    assert raw.max() < slab.raw_blocks * slab.pages
    assert slab.kept_share <= kv_retention * (1 + 1 / 32)


def test_a_little_padding_saves_a_raw_block() -> None:
    profile = smollm2_profile("keydiff")
    geometry = full_geometry(30, 3, 9, 64)
    slab = Slab.lay_out(geometry, profile, 512, 4096)
    assert (slab.layout.span_pages, slab.pages, slab.raw_blocks) == (360, 368, 2)
