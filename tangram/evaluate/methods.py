"""The ways of keeping KV entries that `tangram eval` compares, and the engine configuration of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from tangram.compress.profile import ALPHA, SINK_TOKENS, Scope
from tangram.config import EngineConfig
from tangram.errors import ConfigError

MethodName = Literal["full", "uniform", "dynamic", "static", "one-shot"]
NAMES: tuple[MethodName, ...] = get_args(MethodName)
WITH_PROFILE: frozenset[MethodName] = frozenset({"uniform", "static"})
_BY_INPUT: frozenset[MethodName] = frozenset({"dynamic", "one-shot"})
GATED = "fastkvzip"  # the scorer that takes a gate file
_LEAST_BATCHED_TOKENS = EngineConfig.max_num_batched_tokens


@dataclass(frozen=True)
class Method:
    """One way of keeping entries; a field is None where it makes no difference.

    - full: everything stays.
    - uniform: every head keeps the same share of a chunk.
    - static: heads keep what a calibrated profile says, B = μ + α·σ (Tangram, arXiv 2606.06302).
    - dynamic: the scores of each chunk decide how much each head keeps, as in the methods that profiles are calibrated
      from (Ada-KV, arXiv 2407.11550, in scope "layer"; KVzip, arXiv 2505.23416, in scope "model").
    - one-shot: dynamic, with the whole context as one chunk, as these were published.

    `window_tokens` None is the profile's default, C / 64.
    """

    name: MethodName
    kv_retention: float = 1.0
    scorer: str | None = None
    chunk_tokens: int | None = None
    scope: Scope | None = None
    alpha: float | None = None
    sink_tokens: int | None = None
    window_tokens: int | None = None

    @property
    def title(self) -> str:
        """In words, with everything that tells it from others."""
        parts = [self.name, *([self.scorer] if self.scorer else []), f"ρ {self.kv_retention:g}", *self.variant()]
        return ", ".join(parts)

    def variant(self) -> list[str]:
        """Everything but name, scorer and ρ, as far as it makes a difference: "C 512", "α 2", …"""
        named = {
            "C": self.chunk_tokens, "α": self.alpha, "scope": self.scope, "sinks": self.sink_tokens,
            "window": self.window_tokens,
        }  # fmt: skip
        return [
            f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}"
            for name, value in named.items()
            if value is not None
        ]

    def config(self, base: EngineConfig, profile: str | None = None) -> EngineConfig:
        """`base`, made to keep entries this way; `profile` is the file of those methods that have one."""
        changes: dict[str, Any] = {"kv_retention": self.kv_retention, "profile": (profile,) if profile else ()}
        named = {"scorer": self.scorer, "scope": self.scope, "chunk_tokens": self.chunk_tokens}
        changes |= {name: value for name, value in named.items() if value is not None}
        if self.name in _BY_INPUT:
            changes |= {"reclamation": "by-input", "enable_prefix_caching": False}
        if self.scorer != GATED:
            changes["gate"] = None
        chunk = self.chunk_tokens or base.chunk_tokens
        changes["max_num_batched_tokens"] = max(_LEAST_BATCHED_TOKENS, chunk + base.max_num_seqs)
        return replace(base, **changes)


@dataclass(frozen=True)
class Grid:
    """Which methods are compared: every combination, as far as it makes a difference.

    `window_tokens` None is C / 64. Raises `ConfigError` naming the field that is empty or out of range, or that some
    of the methods cannot follow.
    """

    names: Sequence[MethodName]
    scorers: Sequence[str]
    retentions: Sequence[float]
    chunk_tokens: Sequence[int] = (EngineConfig.chunk_tokens,)
    alphas: Sequence[float] = (ALPHA,)
    scopes: Sequence[Scope] = ("model",)
    sink_tokens: int = SINK_TOKENS
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("names", "scorers", "retentions", "chunk_tokens", "alphas", "scopes"):
            if not getattr(self, field):
                raise ConfigError(f"{_OPTIONS.get(field, field)} is empty, it must name at least one")
        for name in self.names:
            if name not in NAMES:
                raise ConfigError(f"methods has {name!r}, known are {', '.join(NAMES)}: name one of these")
        for retention in self.retentions:
            if not 0.0 < retention < 1.0:
                raise ConfigError(
                    f"retentions has {retention}, each must lie in (0, 1): method full stands for 1.0, ask for it there"
                )
        kept = (self.sink_tokens, self.window_tokens)
        if kept != (SINK_TOKENS, None) and (fixed := [name for name in self.names if name in _BY_INPUT]):
            raise ConfigError(
                f"sink_tokens is {self.sink_tokens} and window_tokens {self.window_tokens}, but method {fixed[0]} "
                f"always keeps {SINK_TOKENS} and C / 64: leave them out, or the method"
            )

    def methods(self, context_tokens: int) -> list[Method]:
        """All of them, each once, in the order of the names; `context_tokens` is the chunk of one-shot."""
        found = (method for name in self.names for method in self._of(name, context_tokens))
        return list(dict.fromkeys(found))

    def _of(self, name: MethodName, context_tokens: int) -> Iterator[Method]:
        if name == "full":
            yield Method("full")
            return
        chunks = (context_tokens,) if name == "one-shot" else self.chunk_tokens
        scopes = (None,) if name == "uniform" else self.scopes
        alphas = self.alphas if name == "static" else (None,)
        kept = (self.sink_tokens, self.window_tokens) if name in WITH_PROFILE else (None, None)
        for scorer, chunk, scope, alpha, retention in product(self.scorers, chunks, scopes, alphas, self.retentions):
            yield Method(name, retention, scorer, chunk, scope, alpha, *kept)


_OPTIONS = {"names": "methods"}
