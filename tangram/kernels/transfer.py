"""Integers from the host to the device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tangram.types import Int32, Int64


def staged(array: Int32 | Int64, device: torch.device) -> Tensor:
    """`array` as a host tensor from which a `non_blocking` copy to `device` does not make the host wait."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def upload(arrays: Sequence[Int32], device: torch.device) -> list[Tensor]:
    """Copies of `arrays` on `device`, by one transfer; they lie in one buffer."""
    flat = np.concatenate([array.ravel() for array in arrays])
    whole = staged(flat, device).to(device, non_blocking=True)
    parts = torch.split(whole, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
