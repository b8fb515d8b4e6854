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
# By capability: 16-bit products that a multiprocessor adds up in float32 in a cycle, from NVIDIA's
# tables. A card that is not listed counts as the one before it.
PRODUCTS = {(8, 0): 1024, (8, 6): 256, (9, 0): 2048, (10, 0): 4096, (12, 0): 256}


@dataclass(frozen=True)
class Card:
    """A GPU. `capability` is CUDA's compute capability, (9, 0) for an H100.

    `shared_bytes` is the shared memory that one block may take, `processor_shared_bytes` what all
    blocks of a multiprocessor may. `processors` counts multiprocessors, which run at `clock_mhz`.
    `memory_bytes_per_us` is the rate of the pins of its memory.
    """

    capability: tuple[int, int]
    shared_bytes: int
    processors: int
    processor_shared_bytes: int
    clock_mhz: float
    memory_bytes_per_us: float

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

    @property
    def flops_per_us(self) -> float:
        """The most operations with 16-bit numbers that are added up in float32."""
        products = PRODUCTS[max(known for known in PRODUCTS if known <= self.capability)]
        return 2 * products * self.processors * self.clock_mhz

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of `device`; `INTERPRETED` for host memory, where Triton's interpreter runs."""
        return _ask_driver(device) if device.type == "cuda" else INTERPRETED


# An H100's limits, one program at a time.
INTERPRETED = Card(
    HOPPER,
    shared_bytes=227 << 10,
    processors=1,
    processor_shared_bytes=228 << 10,
    clock_mhz=1980.0,
    memory_bytes_per_us=3.35e6,
)


@cache
def _ask_driver(device: torch.device) -> Card:
    found: Any = torch.cuda.get_device_properties(device)
    return Card(
        (found.major, found.minor),
        found.shared_memory_per_block_optin,
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        clock_mhz=found.clock_rate / 1e3,
        # Two transfers a cycle of `memory_clock_rate`, in kHz.
        memory_bytes_per_us=2 * found.memory_bus_width / 8 * found.memory_clock_rate / 1e3,
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
