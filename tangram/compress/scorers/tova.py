"""TOVA: the attention of the last token (Oren et al., arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tangram.compress.scorers.attention_weights import append_forced, trailing_attention
from tangram.compress.scorers.base import ChunkView, Scorer
from tangram.config import Scope
from tangram.errors import ConfigError
from tangram.types import Int64


@dataclass(frozen=True)
class TOVA(Scorer):
    """The last query's attention, averaged over all query heads of the layer.

    Every KV head gets the same ranking.
    """

    name: ClassVar[str] = "tova"
    scope: ClassVar[Scope] = "layer"  # one ranking a layer: those of several are not comparable

    def of_heads(self, heads: Int64) -> Scorer:
        """See `Scorer`: refused."""
        raise ConfigError(
            f"scorer is {self.name!r}, which averages over all heads of a layer; with "
            "tensor_parallel_size above 1 these lie on several devices: choose another scorer"
        )

    @property
    def fewest_tokens(self) -> int:
        """The last token is the query, the others are scored."""
        return 2

    def count_queries(self, chunk_tokens: int) -> int:
        """See `Scorer`: the last one."""
        return 1

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32; the last token outranks all others. Raises `ConfigError` if C is 1."""
        self.check_tokens(chunk.tokens)
        mean = trailing_attention(chunk, 1).mean(dim=(0, 1, 2))
        return append_forced(mean.expand(chunk.kv_heads, -1), 1)
