"""The form of a block: every page has one place, raw and sealed."""

from __future__ import annotations

import numpy as np
import pytest

from engines import CHUNK, smollm2_profile, tiny_profile
from tangram.cache.layout import Layout
from tangram.types import Int64
from tangram_vllm.slab import NoteForm, Slab, full_geometry


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


def pages_at(slab: Slab, blocks: Int64, numbers: Int64) -> Int64:
    """The pages of the pool that are raw pages `numbers` of a chunk in `blocks`."""
    return blocks[numbers // slab.pages] * slab.pages + numbers % slab.pages


def test_worked_example() -> None:
    slab = small([3, 1, 2])
    assert (slab.pages, slab.raw_ends, slab.columns) == (6, (0, 8, 16), 3)
    assert slab.sealed_places.tolist() == [0, 3, 5, 1, 2, 4]
    assert pages_at(slab, np.array([10, 20]), slab.raw_numbers).tolist() == [
        [60, 61, 62],
        [63, 64, 65],
        [120, 121, 122],
        [123, 124, 125],
    ]


def test_whole_chunks_are_sealed_as_they_lie() -> None:
    slab = small([4, 4])
    assert (slab.raw_blocks, slab.columns, slab.kept_share) == (1, 1, 1.0)
    rows = pages_at(slab, np.array([0]), slab.raw_numbers)
    assert rows.T.ravel().tolist() == slab.sealed_places.tolist()


@pytest.mark.parametrize("kv_retention", [0.15, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    "notes", [None, NoteForm(0, 2), NoteForm(0, 128), NoteForm(20, 128), NoteForm(63, 7)]
)
def test_a_block_has_one_place_for_each_thing(kv_retention: float, notes: NoteForm | None) -> None:
    profile = tiny_profile(kv_retention=kv_retention)
    geometry = full_geometry(3, 2, 4, 32)
    slab = Slab.lay_out(geometry, profile, profile.chunk_tokens, 1024, notes)
    assert sorted(slab.sealed_places.tolist()) == list(range(slab.layout.span_pages))
    assert slab.pages <= slab.layout.span_pages * (1 + 1 / 32)
    blocks = np.arange(slab.raw_blocks) + 3
    raw = pages_at(slab, blocks, slab.raw_numbers)
    pages = raw.ravel().tolist()
    assert len(set(pages)) == len(pages) == slab.layout.chunk_pages * len(slab.layout.groups)
    noted = np.arange(0 if notes is None else notes.first, CHUNK)
    numbers, vectors = slab.note_numbers(noted)
    found = pages_at(slab, blocks, numbers) * slab.page_vectors + vectors
    assert found[0, 0].size * slab.note_vector == (0 if notes is None else notes.elements)
    assert len(np.unique(found)) == found.size
    held = found // slab.page_vectors
    assert not set(held.ravel().tolist()) & set(pages)
    # The first tokens need the first blocks alone.
    for count, end in enumerate(slab.raw_ends):
        inside = [*raw[: end // slab.layout.page_tokens].ravel(), *held[:, noted < end].ravel()]
        assert all(page < (3 + count) * slab.pages for page in inside)
    assert slab.raw_ends[-1] == CHUNK


def test_notes_of_a_window_take_little() -> None:
    """32 of 512 tokens with queries: 6 % more at G = 3, which a third raw block holds."""
    profile, geometry = smollm2_profile("snapkv"), full_geometry(30, 3, 9, 64)
    slab = Slab.lay_out(geometry, profile, 512, 4096, NoteForm(512 - 32, 9 * 64))
    assert (slab.pages, slab.raw_blocks) == (360, 3)
    assert slab.raw_ends == (0, 240, 480, 512)


def test_a_little_padding_saves_a_raw_block() -> None:
    profile = smollm2_profile("keydiff")
    geometry = full_geometry(30, 3, 9, 64)
    slab = Slab.lay_out(geometry, profile, 512, 4096, None)
    assert (slab.layout.span_pages, slab.pages, slab.raw_blocks) == (360, 368, 2)
