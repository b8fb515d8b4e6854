"""SnapKV: the attention of an observation window at the end (Li et al., arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from tangram.compress.scorers.attention_weights import append_forced, trailing_attention
from tangram.compress.scorers.base import ChunkView, Scorer
from tangram.errors import ConfigError


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Mean attention of the last `window_tokens` queries, pooled along the tokens.

    The result is averaged over the query group. Pooling (`kernel_tokens` wide, odd; the maximum, or
    the mean if `max_pooling` is False) keeps the neighbours of an attended token. It happens per
    query head, before the group is averaged. The window itself outranks all others. The defaults
    are those of the paper's long-context runs.
    """

    name: ClassVar[str] = "snapkv"
    window_tokens: int = 32
    kernel_tokens: int = 7
    max_pooling: bool = True

    def __post_init__(self) -> None:
        if self.window_tokens < 1:
            raise ConfigError(f"window_tokens is {self.window_tokens}, it must be at least 1")
        if self.kernel_tokens < 1 or self.kernel_tokens % 2 == 0:
            raise ConfigError(
                f"kernel_tokens is {self.kernel_tokens}, it must be odd and at least 1"
            )

    @property
    def fewest_tokens(self) -> int:
        """The observation window and one token to score."""
        return self.window_tokens + 1

    def count_queries(self, chunk_tokens: int) -> int:
        """See `Scorer`: the observation window."""
        return self.window_tokens

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32. Raises `ConfigError` if the chunk is no longer than the window."""
        self.check_tokens(chunk.tokens)
        pool = functional.max_pool1d if self.max_pooling else functional.avg_pool1d
        attention = trailing_attention(chunk, self.window_tokens).mean(dim=2)
        pooled = pool(attention, self.kernel_tokens, stride=1, padding=self.kernel_tokens // 2)
        return append_forced(pooled.mean(dim=1), self.window_tokens)
