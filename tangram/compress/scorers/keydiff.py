"""KeyDiff: keys unlike the others (Park et al., arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from tangram.compress.scorers.base import ChunkView, Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Minus the cosine between a key and the chunk's mean direction. It reads only the keys."""

    name: ClassVar[str] = "keydiff"
    kernel: ClassVar[str | None] = "keydiff"

    def count_queries(self, chunk_tokens: int) -> int:
        """See `Scorer`: none."""
        return 0

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32 in [-1, 1]."""
        keys = chunk.keys.float()
        anchor = functional.normalize(keys, dim=-1).mean(dim=1, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)
