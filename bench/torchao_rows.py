"""Linear maps of rounded weights on a CPU, ours and torchao's: `python -m bench.torchao_rows`.

A map of 576 inputs and 1,536 outputs in bfloat16, on one thread. Each product is asked whether a
row's bits depend on the rows beside it, and timed (CPU time, the least of some turns). torchao must
be installed (`pip install torchao`); of its forms of 4 bits only a prototype runs on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.prototype.quantization.int4 import Int4OpaqueTensor
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerRow,
    quantize_,
)

from tangram.model.cpu_weights import Int4Linear, Int8Linear, Int8WeightLinear, PackedLinear

INPUTS, OUTPUTS = 576, 1536
ROWS = (1, 32, 512)
SLICES = ((0, 1), (7, 9), (100, 116), (3, 35), (0, 512))


def make_map() -> nn.Linear:
    """The same map each time."""
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16).requires_grad_(False)


def round_by_torchao(config: object) -> nn.Module:
    """The map in a form of torchao."""
    part = nn.Sequential(make_map())
    quantize_(part, config)
    return part


def round_to_opaque() -> nn.Module:
    """The map in torchao's 4 bits for a CPU."""
    part = make_map()
    part.weight = nn.Parameter(Int4OpaqueTensor.from_hp(part.weight, [1, 32]), requires_grad=False)
    return part


PRODUCTS: dict[str, Callable[[], nn.Module]] = {
    "bfloat16, PyTorch": make_map,
    "bfloat16, packed": lambda: PackedLinear(make_map()),
    "int8, ours": lambda: Int8Linear(make_map()),
    "int8 weights, ours": lambda: Int8WeightLinear(make_map()),
    "int4, ours": lambda: Int4Linear(make_map()),
    "int8, torchao": lambda: round_by_torchao(
        Int8DynamicActivationInt8WeightConfig(granularity=PerRow())
    ),
    "int8 weights, torchao": lambda: round_by_torchao(Int8WeightOnlyConfig()),
    "int4, torchao": round_to_opaque,
}


def time_rows(part: nn.Module, x: Tensor) -> float:
    """Microseconds of a product."""
    taken = []
    for _ in range(12):
        begin_s = time.thread_time()
        part(x)
        taken.append(time.thread_time() - begin_s)
    return 1e6 * min(taken[2:])


@torch.inference_mode()
def main() -> None:
    """Print a line for each product."""
    torch.set_num_threads(1)
    x = (torch.randn(512, INPUTS) * torch.logspace(-3, 3, 512)[:, None]).bfloat16()
    for name, make in PRODUCTS.items():
        part = make()
        whole = part(x)
        alone = all(torch.equal(part(x[begin:end]), whole[begin:end]) for begin, end in SLICES)
        times = ", ".join(f"{time_rows(part, x[:rows]):,.0f} µs for {rows}" for rows in ROWS)
        print(f"{name}: rows {'alone' if alone else 'depend on each other'}; {times}")


if __name__ == "__main__":
    main()
