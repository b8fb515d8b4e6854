"""The cards that kernels are compiled for, as NVIDIA's tables have them."""

from __future__ import annotations

from tangram.kernels.card import Card


def _card(
    capability: int, shared_kib: int, processors: int, clock_mhz: float, gigabytes_a_second: float
) -> Card:
    return Card(
        divmod(capability, 10),
        shared_kib << 10,
        processors,
        shared_kib + 1 << 10,  # a block takes one of its own
        clock_mhz,
        gigabytes_a_second * 1e3,
    )


# A100, RTX 3090, RTX 4090, H100, B200, RTX 5090.
CARDS = {
    80: _card(80, 163, 108, 1410, 1935),
    86: _card(86, 99, 82, 1695, 936),
    89: _card(89, 99, 128, 2520, 1008),
    90: _card(90, 227, 132, 1980, 3352),
    100: _card(100, 227, 148, 1965, 7672),
    120: _card(120, 99, 170, 2407, 1792),
}
REGISTERS = 65536  # of a block, and of a multiprocessor, on all of them
REGISTERS_A_THREAD = 255
