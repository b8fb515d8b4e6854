"""The cards that kernels are compiled for, as NVIDIA's tables have them."""

from __future__ import annotations

from tangram.kernels.card import Card


def _card(capability: int, shared_kib: int, processors: int) -> Card:
    return Card(divmod(capability, 10), shared_kib << 10, processors)


# A100, RTX 3090, RTX 4090, H100, B200, RTX 5090.
CARDS = {
    80: _card(80, 163, 108),
    86: _card(86, 99, 82),
    89: _card(89, 99, 128),
    90: _card(90, 227, 132),
    100: _card(100, 227, 148),
    120: _card(120, 99, 170),
}
REGISTERS = 65536  # of a block, and of a multiprocessor, on all of them
REGISTERS_A_THREAD = 255
