"""The memory of a pool of KV entries.

On a CPU decode reads small blocks from all over the pool. With memory pages of 4 KiB nearly each of
them costs a walk through the page table, so Linux is asked for pages of 2 MiB (transparent huge
pages, `madvise(2)`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


def allocate_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of undefined values; on a CPU in huge pages where the system has them."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
