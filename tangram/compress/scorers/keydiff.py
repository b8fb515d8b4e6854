"""KeyDiff: keys unlike the others (Park et al., arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tangram.compress.scorers.base import ChunkView, Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Minus the cosine between a key and the chunk's mean direction: it reads the keys and nothing else."""

    name: ClassVar[str] = "keydiff"

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32 in [-1, 1]."""
        # Products of matrices may round by how their operands lie: strides must not follow the batch.
        keys = chunk.keys.contiguous().float()
        norms = keys.norm(dim=-1)
        anchor = norms.clamp_min(1e-12).reciprocal().unsqueeze(1) @ keys / chunk.tokens
        lengths = norms.clamp_min(1e-8) * anchor.norm(dim=-1).clamp_min(1e-8)
        cosines: Tensor = (keys @ anchor.transpose(1, 2)).squeeze(2) / lengths
        return -cosines
