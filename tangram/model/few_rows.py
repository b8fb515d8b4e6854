"""Linear maps of few rows in float32 on a CPU.

MKL's product of a few rows with a weight, [M, K] · [K, N], reads the weight at a fraction of the
memory's speed. As the weight times the transposed rows, [N, K] · [K, M], it reads it at full speed,
for two rows and more (docs/cpu.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOST_ROWS = 16  # more rows gain little
_LEAST_WEIGHTS = 1 << 17  # fewer stay in the cache of a core


class FewRowsLinear(nn.Module):
    """y = x·Wᵀ + b with W [N, K], computed as (W·xᵀ)ᵀ where x has up to `most_rows` rows."""

    def __init__(self, source: nn.Linear, most_rows: int = _MOST_ROWS) -> None:
        super().__init__()
        self.weight, self.bias, self.most_rows = source.weight, source.bias, most_rows

    def forward(self, x: Tensor) -> Tensor:
        """[…, K] to […, N]."""
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        if not 0 < count <= self.most_rows:
            return nn.functional.linear(x, self.weight, self.bias)
        if count == 1:
            rows = torch.cat([rows, rows])  # a product of one row is the slow one
        product = torch.mm(self.weight, rows.t())[:, :count].t().contiguous()
        if self.bias is not None:
            product += self.bias
        return product.view(*x.shape[:-1], len(self.weight))


def multiply_few_rows_fast(model: nn.Module, chunk_tokens: int) -> None:
    """Replace the large float32 linear maps of `model`, which is on a CPU, by those above.

    A pass with a chunk of `chunk_tokens` has too many rows for the other order of sums: the entries
    of a chunk must not depend on the rows beside it. Engines that share a model keep to the
    smallest of their chunks.
    """
    most_rows = min(_MOST_ROWS, chunk_tokens - 1)
    for part in model.modules():
        if isinstance(part, FewRowsLinear):
            part.most_rows = min(part.most_rows, most_rows)
    maps = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    for name, part in maps.items():
        if part.weight.dtype is torch.float32 and part.weight.numel() >= _LEAST_WEIGHTS:
            model.set_submodule(name, FewRowsLinear(part, most_rows))
