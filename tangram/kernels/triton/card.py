"""The GPU that kernels run on: its features and its sizes.

No other module of this package asks torch for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

HOPPER = (9, 0)
LEAST = (8, 0)  # Ampere: older cards cannot multiply bfloat16
# By capability: 16-bit products that a multiprocessor adds up in float32 in a cycle, from NVIDIA's
# tables. A card that is not listed counts as the last before it, or as the first. GeForce cards do
# half as many.
PRODUCTS = {(8, 0): 1024, (8, 6): 512, (9, 0): 2048, (10, 0): 4096, (12, 0): 512}
# An H100's, where the driver of a virtual GPU tells neither.
CLOCK_KHZ, MEMORY_BYTES_PER_US = 1_980_000, 3.35e6


@dataclass(frozen=True)
class Card:
    """A GPU. `capability` is CUDA's compute capability, (9, 0) for an H100.

    `shared_bytes` is the shared memory that one block may take, `processor_shared_bytes` what all
    blocks of a multiprocessor may. `processors` counts multiprocessors. `memory_bytes_per_us` is
    the rate of the pins of its memory. `flops_per_us` are the most operations with 16-bit numbers
    that are added up in float32.
    """

    capability: tuple[int, int]
    shared_bytes: int
    processors: int
    processor_shared_bytes: int
    memory_bytes_per_us: float
    flops_per_us: float

    @property
    def chains(self) -> bool:
        """Programmatic dependent launch: a launch may begin while the last ends."""
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


def count_flops(capability: tuple[int, int], name: str, processors: int, clock_khz: float) -> float:
    """`Card.flops_per_us` of the card that calls itself `name`."""
    products = PRODUCTS[max((known for known in PRODUCTS if known <= capability), default=LEAST)]
    return 2 * products / (2 if "GeForce" in name else 1) * processors * clock_khz / 1e3


# An H100's limits, one program at a time.
INTERPRETED = Card(
    HOPPER,
    shared_bytes=227 << 10,
    processors=1,
    processor_shared_bytes=228 << 10,
    memory_bytes_per_us=MEMORY_BYTES_PER_US,
    flops_per_us=count_flops(HOPPER, "H100", 1, CLOCK_KHZ),
)


@cache
def _ask_driver(device: torch.device) -> Card:
    return read_card(torch.cuda.get_device_properties(device))


def read_card(found: Any) -> Card:
    """The card with the properties `found`, which torch has from the driver."""
    capability = found.major, found.minor
    # Two transfers a cycle of `memory_clock_rate`, in kHz.
    memory = 2 * found.memory_bus_width / 8 * found.memory_clock_rate / 1e3
    return Card(
        capability,
        found.shared_memory_per_block_optin,
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        memory_bytes_per_us=memory or MEMORY_BYTES_PER_US,
        flops_per_us=count_flops(
            capability, found.name, found.multi_processor_count, found.clock_rate or CLOCK_KHZ
        ),
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
