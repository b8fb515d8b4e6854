"""What kernels read beside activations: the entries of a pool, and prefill rows in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tangram.kernels.triton.card import Card


@dataclass(frozen=True, eq=False)
class StoredPool:
    """A pool as kernels read it on `card`: `entries` [N_pages, Hp, S, P, D].

    FP8 entries are bytes if the card cannot convert them. They have `scales` float32 [L, H, 2], the
    factors of keys and values.
    """

    entries: Tensor
    scales: Tensor | None
    card: Card

    @classmethod
    def of(
        cls, entries: Tensor, scales: Tensor | None = None, card: Card | None = None
    ) -> StoredPool:
        """Of `entries` in the pool's dtype. `card` None is their own."""
        card = card or Card.of(entries.device)
        if entries.dtype == torch.float8_e4m3fn and not card.converts_fp8:
            entries = entries.view(torch.uint8)
        return cls(entries, scales, card)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """N prefill rows in one `layer`, whose pages the flat block `tables` list.

    `address` int32 [N, H, 3]: each head's table offset, column and past length in the pool. `spans`
    int32 [N, 5]: a row's queries [begin, end) in q, keys [begin, end) in k and v, and the position
    of its first key. `shortest` and `longest` are the least and the most queries of a row.
    """

    layer: int
    tables: Tensor
    address: Tensor
    spans: Tensor
    shortest: int
    longest: int
