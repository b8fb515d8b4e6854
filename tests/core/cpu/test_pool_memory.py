"""The memory of a pool on a CPU: any dtype, as large as asked, in huge pages if there are any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tangram.kernels.narrow import NARROW
from tangram.kernels.pool_memory import allocate_pool

CPU = torch.device("cpu")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *NARROW.values()])
@pytest.mark.parametrize("shape", [(3, 2, 2, 16, 64), (0, 2, 2, 16, 64)])
def test_a_pool_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = allocate_pool(shape, dtype, CPU)
    assert pool.shape == shape and pool.dtype is dtype and pool.is_contiguous()
    pool.view(torch.uint8).fill_(56)
    assert (pool.view(torch.uint8) == 56).all()


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="Linux has no huge pages here"
)
def test_linux_is_asked_for_huge_pages() -> None:
    """Whether it has enough of them just then is not ours."""
    pool = allocate_pool((64 << 20,), torch.uint8, CPU)
    assert "hg" in read_flags(pool.data_ptr())
    plain = torch.empty(64 << 20, dtype=torch.uint8)
    assert "hg" not in read_flags(plain.data_ptr())


def read_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping of this process that holds `address` (proc(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")
