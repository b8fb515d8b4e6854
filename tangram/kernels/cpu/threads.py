"""The number of CPU threads: torch and the compiled kernels share one pool."""

from __future__ import annotations

import torch


def use_threads(count: int | None) -> None:
    """Let torch and the kernels compute on `count` threads of this process from now on.

    None keeps torch's number, initially the cores that this process may run on.
    """
    if count is not None:
        torch.set_num_threads(count)
