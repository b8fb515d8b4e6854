"""KVzip: scores by the attention that reconstructs the text (Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tangram.compress.scorers.attention_weights import causal_softmax, compute_grouped_logits
from tangram.compress.scorers.base import ChunkView, Encode, Reconstruction, Scorer, Tokens, require
from tangram.errors import ConfigError

REPEAT_FIRST = "\n\nRepeat the previous context exactly."
REPEAT_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
PREVIOUS_TOKENS = 8

# Bounds the logits to Q · 64 · (s + C + T) floats: 70 MB for 64 query heads and a chunk of 2,048
# tokens.
QUERY_TILE_TOKENS = 64


@dataclass(frozen=True)
class KVzip(Scorer):
    """The largest attention weight that any token of the repeat pass gives a key.

    The maximum runs over the query group too. The softmax of a repeat token runs over the chunk and
    the repeat pass up to that token. If the chunk is not the first, it also runs over the first
    `sinks` tokens of the sequence, as many as every head keeps.
    """

    name: ClassVar[str] = "kvzip"
    needs: ClassVar[frozenset[str]] = frozenset({"reconstruction"})
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"sinks is {self.sinks}, it must be at least 0")

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32 in [0, 1]. The repeat queries are processed in tiles to bound memory."""
        repeat = require(chunk.reconstruction, "reconstruction", self)
        sink_keys = self._sink_keys(chunk)
        keys = torch.cat([sink_keys, chunk.keys, repeat.keys], dim=1).float()
        scores = keys.new_zeros(chunk.kv_heads, chunk.tokens)
        for begin in range(0, repeat.queries.shape[1], QUERY_TILE_TOKENS):
            attention = _tile_attention(repeat, keys, begin, chunk.scaling)
            seen = attention[..., sink_keys.shape[1] : sink_keys.shape[1] + chunk.tokens]
            scores = torch.maximum(scores, seen.amax(dim=(1, 2)))
        return scores

    def repeat_tokens(
        self, encode: Encode, chunk: Tokens, previous: Tokens | None = None, suffix: Tokens = ()
    ) -> list[int]:
        """See `Scorer`: prompt, `suffix`, the chunk again.

        The last 8 tokens of `previous` say where to start.
        """
        if previous is None:
            return [*encode(REPEAT_FIRST), *suffix, *chunk]
        return [*encode(REPEAT_NEXT), *previous[-PREVIOUS_TOKENS:], *suffix, *chunk]

    def _sink_keys(self, chunk: ChunkView) -> Tensor:
        """[H, s, D]: s is 0 in the first chunk, which holds the sinks itself."""
        if chunk.start == 0:
            return chunk.keys[:, :0]
        return require(chunk.sink_keys, "sink_keys", self)[:, : self.sinks]


def _tile_attention(repeat: Reconstruction, keys: Tensor, begin: int, scaling: float) -> Tensor:
    """[H, G, tile, n]: attention of one tile of repeat queries over the keys of its last query."""
    queries = repeat.queries[:, begin : begin + QUERY_TILE_TOKENS]
    context = keys.shape[1] - repeat.keys.shape[1]
    return causal_softmax(
        compute_grouped_logits(queries, keys[:, : context + begin + queries.shape[1]], scaling)
    )
