"""The cards that kernels are compiled for, as NVIDIA's tables have them."""

from __future__ import annotations

from tangram.kernels.triton.card import Card, count_flops


def _card(
    name: str, capability: int, shared_kib: int, processors: int, clock_mhz: float, gb_per_s: float
) -> Card:
    version = divmod(capability, 10)
    return Card(
        version,
        shared_kib << 10,
        processors,
        shared_kib + 1 << 10,  # a block takes one of its own
        gb_per_s * 1e3,
        count_flops(version, name, processors, clock_mhz * 1e3),
    )


CARDS = {
    80: _card("A100", 80, 163, 108, 1410, 1935),
    86: _card("GeForce RTX 3090", 86, 99, 82, 1695, 936),
    89: _card("GeForce RTX 4090", 89, 99, 128, 2520, 1008),
    90: _card("H100", 90, 227, 132, 1980, 3352),
    100: _card("B200", 100, 227, 148, 1965, 7672),
    120: _card("GeForce RTX 5090", 120, 99, 170, 2407, 1792),
}
REGISTERS = 65536  # of a block, and of a multiprocessor, on all of them
REGISTERS_A_THREAD = 255
