"""Copies between host and device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.types import Int32


def stage(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` as a host tensor whose `non_blocking` copy to `device` does not block the host.

    Shape and dtype stay the same.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    pinned = torch.empty_like(host, device="cpu", pin_memory=True)
    # By NumPy: torch copies by all of its threads, and waits milliseconds for those that sleep.
    np.copyto(pinned.numpy(), array)
    return pinned


def upload(values: npt.ArrayLike, device: torch.device) -> Tensor:
    """A copy of `values` on `device`, of the shape and dtype that NumPy gives them."""
    return stage(np.asarray(values), device).to(device, non_blocking=True)


def upload_together(arrays: Sequence[Int32], device: torch.device) -> list[Tensor]:
    """Copies of `arrays` on `device` in their shapes, by one transfer; they lie in one buffer."""
    return views(upload(np.concatenate([array.ravel() for array in arrays]), device), arrays)


def views(whole: Tensor, arrays: Sequence[Int32]) -> list[Tensor]:
    """The consecutive parts of `whole` [Σ sizes], in the shapes of `arrays` and its own dtype."""
    parts = torch.split(whole, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class HostCopies:
    """Copies of `tensors` on their way to the host.

    Later work of the device does not delay them.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._arrival: Any = None
        self._host = list(tensors)
        if tensors[0].is_cuda:
            self._host = [torch.empty_like(x, device="cpu", pin_memory=True) for x in tensors]
            for host, source in zip(self._host, tensors, strict=True):
                host.copy_(source, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    @property
    def arrived(self) -> bool:
        """Whether `get` would not wait."""
        return self._arrival is None or bool(self._arrival.query())

    def get(self) -> list[Tensor]:
        """The copies, once they are there, in the shapes and dtypes of the tensors."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host
