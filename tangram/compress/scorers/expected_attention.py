"""Expected Attention: attention of future queries (Devoto et al., arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tangram.compress.scorers.attention_weights import group_queries
from tangram.compress.scorers.base import ChunkView, Scorer, require
from tangram.compress.scorers.rotation import rotate, unrotate
from tangram.errors import ConfigError


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Scores keys by normally distributed future queries.

    Their mean μ and covariance Σ are those of the chunk's queries before RoPE. Let R be the mean
    rotation of the next `future_tokens` positions, s the attention scale and k a key. The score is
    (softmax(s·k·Rμ + s²/2·k·RΣRᵀ·k) averaged over the query group + `epsilon`)·‖v‖. The first
    `sinks` tokens of the sequence are outliers: they are left out of μ, Σ and the softmax, and
    outrank all others. With `epsilon` 0 a token that no query is expected to see loses its value
    norm too, and answers collapse.
    """

    name: ClassVar[str] = "expected_attention"
    needs: ClassVar[frozenset[str]] = frozenset({"rotary"})
    reads_of_heads: ClassVar[str | None] = "the values of each head and queries before rotation"
    future_tokens: int = 512
    sinks: int = 4
    epsilon: float = 1e-2

    def __post_init__(self) -> None:
        if self.future_tokens < 1:
            raise ConfigError(f"future_tokens is {self.future_tokens}, it must be at least 1")
        if self.sinks < 0:
            raise ConfigError(f"sinks is {self.sinks}, it must be at least 0")
        if not 0.0 <= self.epsilon < float("inf"):
            raise ConfigError(f"epsilon is {self.epsilon}, it must be finite and at least 0")

    @property
    def fewest_tokens(self) -> int:
        """The attention sinks of a first chunk and one token to score."""
        return self.sinks + 1

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32. Raises `ConfigError` if the first chunk is no longer than the sinks."""
        sinks = self.sinks if chunk.start == 0 else 0
        self.check_tokens(chunk.tokens)
        keys = chunk.keys[:, sinks:].float()
        expected = self._expect_attention(
            keys, *self._query_statistics(chunk, sinks), chunk.scaling
        )
        scores = (expected + self.epsilon) * chunk.values[:, sinks:].float().norm(dim=-1)
        forced = (scores.max() + 1).expand(chunk.kv_heads, sinks)
        return torch.cat([forced, scores], dim=1)

    def _query_statistics(self, chunk: ChunkView, sinks: int) -> tuple[Tensor, Tensor]:
        """Mean [H, G, D] and covariance [H, G, D, D] of the queries at the future positions."""
        device = chunk.queries.device
        rotary = require(chunk.rotary, "the rotary embedding", self)
        end = chunk.start + chunk.tokens
        cos, sin = (
            part.float() for part in rotary(torch.arange(chunk.start + sinks, end, device=device))
        )
        queries = group_queries(
            unrotate(chunk.queries[:, sinks:].float(), cos, sin), chunk.kv_heads
        )
        mean = queries.mean(dim=2, keepdim=True)
        centred = queries - mean
        covariance = centred.transpose(-1, -2) @ centred / queries.shape[2]
        future = rotary(torch.arange(end, end + self.future_tokens, device=device))
        cos, sin = (part.float().mean(dim=0, keepdim=True) for part in future)
        half_turned = rotate(covariance, cos, sin)
        return rotate(mean, cos, sin).squeeze(2), rotate(half_turned.transpose(-1, -2), cos, sin)

    @staticmethod
    def _expect_attention(keys: Tensor, mean: Tensor, covariance: Tensor, scaling: float) -> Tensor:
        """[H, n]: softmax of the expected logits over `keys` [H, n, D], mean of the query group."""
        heads, tokens, dim = keys.shape
        linear = mean @ keys.transpose(-1, -2)
        # One product with the group's covariances side by side: keys are not copied per query head.
        turned = (keys @ covariance.transpose(1, 2).reshape(heads, dim, -1)).reshape(
            heads, tokens, -1, dim
        )
        quadratic = (turned * keys.unsqueeze(2)).sum(dim=-1).transpose(1, 2)
        return (scaling * linear + 0.5 * scaling**2 * quadratic).softmax(dim=-1).mean(dim=1)
