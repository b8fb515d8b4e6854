"""The GPU that kernels run on: its features and its sizes.

This is the only module that queries torch for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

HOPPER = (9, 0)
LEAST = (8, 0)  # Ampere: older cards cannot multiply bfloat16


@dataclass(frozen=True)
class Card:
    """A GPU. `capability` is CUDA's compute capability, (9, 0) for an H100.

    `shared_bytes` is the shared memory that one block may take, and `processors` counts
    multiprocessors.
    """

    capability: tuple[int, int]
    shared_bytes: int
    processors: int

    @property
    def chains(self) -> bool:
        """Programmatic dependent launch: a launch may begin while the one before it ends."""
        return self.capability >= HOPPER

    @property
    def copies_tiles(self) -> bool:
        """Whether one instruction loads a whole tile (tensor memory access)."""
        return self.capability >= HOPPER

    @property
    def converts_fp8(self) -> bool:
        """Whether there are instructions to and from E4M3."""
        return self.capability >= (8, 9)

    @property
    def multiplies_shared(self) -> bool:
        """Whether products of 64 rows read their operands from shared memory (wgmma, tcgen05)."""
        return self.capability[0] in (9, 10)

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of `device`; `INTERPRETED` for host memory, where Triton's interpreter runs."""
        return _ask_driver(device) if device.type == "cuda" else INTERPRETED


# An H100's limits, one program at a time.
INTERPRETED = Card(HOPPER, shared_bytes=227 << 10, processors=1)


@cache
def _ask_driver(device: torch.device) -> Card:
    found: Any = torch.cuda.get_device_properties(device)
    return Card(
        (found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count
    )


def explain_unserved(device: torch.device | None = None) -> str | None:
    """Why the kernels do not run on the accelerator that torch sees; None if they do."""
    if torch.version.hip is not None:
        return f"this is an AMD GPU (ROCm {torch.version.hip}), and the kernels are for NVIDIA GPUs"
    card = Card.of(device or torch.device("cuda"))
    if card.capability >= LEAST:
        return None
    major, minor = card.capability
    found = f"this GPU has compute capability {major}.{minor}"
    return f"{found}, and the kernels need 8.0 (Ampere) or more"
