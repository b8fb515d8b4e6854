"""StreamingLLM: recency alone (Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tangram.compress.scorers.base import ChunkView, Scorer


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """A token's score is its place in the chunk, in (0, 1].

    The selection protects the attention sinks.
    """

    name: ClassVar[str] = "streaming_llm"

    def count_queries(self, chunk_tokens: int) -> int:
        """See `Scorer`: none."""
        return 0

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32: the same for every head."""
        places = torch.arange(1, chunk.tokens + 1, dtype=torch.float32, device=chunk.keys.device)
        return (places / chunk.tokens).expand(chunk.kv_heads, -1)
