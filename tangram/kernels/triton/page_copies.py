"""Copy whole pages by index (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["source_pages", "target_pages"]
)
def copy_pages(
    source, source_pages, target, target_pages, count, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """target[target_pages[i]] = source[source_pages[i]] for i < count, pages of WORDS int32.

    Grid (programs,).
    """
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        read = source + tl.load(source_pages + i).to(tl.int64) * WORDS
        write = target + tl.load(target_pages + i).to(tl.int64) * WORDS
        for first in range(0, WORDS, BLOCK):
            word = first + tl.arange(0, BLOCK)
            tl.store(write + word, tl.load(read + word, mask=word < WORDS), mask=word < WORDS)


def copy(
    source: Tensor, source_pages: Tensor, target: Tensor, target_pages: Tensor, *, programs: int
) -> None:
    """Copy pages `source_pages` int32 [n] of `source` to `target_pages` of `target`.

    Both are int32 [pages, words]; either may be pinned host memory. `programs` bounds the share of
    the device that copies.
    """
    count, size = len(source_pages), source.shape[1]
    copy_pages[(min(programs, count),)](
        source,
        source_pages,
        target,
        target_pages,
        count,
        WORDS=size,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=8,
    )
