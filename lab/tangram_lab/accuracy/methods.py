"""The compression methods that `tangram eval` compares, and the engine configuration of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from tangram.compress.profile import ALPHA, SINK_TOKENS
from tangram.config import EngineConfig, Scope
from tangram.errors import ConfigError
from tangram.speculative_config import CompressedKv

MethodName = Literal["full", "uniform", "dynamic", "static", "one-shot", "lossless"]
NAMES: tuple[MethodName, ...] = get_args(MethodName)
WITH_PROFILE: frozenset[MethodName] = frozenset({"uniform", "static"})
BY_INPUT: frozenset[MethodName] = frozenset({"dynamic", "one-shot"})  # no engine follows them
GATED = "fastkvzip"  # the scorer that takes a gate file


@dataclass(frozen=True)
class Method:
    """One compression method; a field that does not apply is None.

    - full: everything stays.
    - uniform: every head keeps the same share of a chunk.
    - static: the profile sets each head's budget, B = μ + α·σ (Tangram, arXiv 2606.06302).
    - dynamic: the scores of each chunk decide how much each head keeps. Scope "layer" is Ada-KV
      (arXiv 2407.11550), scope "model" is KVzip (arXiv 2505.23416).
    - one-shot: dynamic, with the whole context as one chunk, as these were published.
      Results have both; what they keep is computed from scores, but no engine answers by them.
    - lossless: everything stays, and drafts read what static keeps (compressed_kv).

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
        """The method in words, with all its settings."""
        parts = [
            self.name,
            *([self.scorer] if self.scorer else []),
            f"ρ {self.kv_retention:g}",
            *self.variant(),
        ]
        return ", ".join(parts)

    def variant(self) -> list[str]:
        """Settings that are not defaults, without name, scorer and ρ: "C 512", "α 2", …"""
        named = {
            "C": self.chunk_tokens,
            "α": self.alpha,
            "scope": self.scope,
            "sinks": None if self.sink_tokens == SINK_TOKENS else self.sink_tokens,
            "window": self.window_tokens,
        }
        return [
            f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}"
            for name, value in named.items()
            if value is not None
        ]

    @property
    def budgeted(self) -> Method | None:
        """The uniform or static method that has the same profile; None without a profile."""
        if self.name == "lossless":
            return replace(self, name="static", kv_retention=CompressedKv.kv_retention)
        return self if self.name in WITH_PROFILE else None

    @property
    def company(self) -> Method:
        """Equal for methods that one engine can serve: their profiles differ in ρ only."""
        return replace(self, kv_retention=1.0) if self.name in WITH_PROFILE else self

    def config(self, base: EngineConfig, *profiles: str) -> EngineConfig:
        """`base`, changed for this method; `profiles` are the profile files of its engine.

        Raises `ConfigError` for a method that no engine follows.
        """
        if self.name in BY_INPUT:
            raise ConfigError(
                f"methods has {self.name}, which no engine follows: what it answered is in "
                "docs/accuracy-tables.md; name other methods"
            )
        changes: dict[str, Any] = {"kv_retention": self.kv_retention, "profile": profiles}
        named = {"scorer": self.scorer, "scope": self.scope, "chunk_tokens": self.chunk_tokens}
        changes |= {name: value for name, value in named.items() if value is not None}
        if self.name == "lossless":
            changes["speculative_config"] = {"method": CompressedKv().method}
        if self.scorer != GATED:
            changes["gate"] = None
        chunk = self.chunk_tokens or base.chunk_tokens
        changes["max_num_batched_tokens"] = max(
            base.max_num_batched_tokens, chunk + base.max_num_seqs
        )
        return replace(base, **changes)


@dataclass(frozen=True)
class Grid:
    """The methods to compare: every combination of these settings that a method uses.

    `scorers` None is the one that serves the model (`name_scorer`). `scopes` None is the scope that
    each scorer is served with. `window_tokens` None is C / 64. Raises `ConfigError` naming the
    field that is empty or out of range, or that some of the methods cannot follow.
    """

    names: Sequence[MethodName]
    scorers: Sequence[str] | None
    retentions: Sequence[float]
    chunk_tokens: Sequence[int] = (EngineConfig.chunk_tokens,)
    alphas: Sequence[float] = (ALPHA,)
    scopes: Sequence[Scope] | None = None
    sink_tokens: int = SINK_TOKENS
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        for field, option in _LISTS.items():
            if getattr(self, field) is not None and not getattr(self, field):
                raise ConfigError(f"{option} is empty, it must name at least one")
        for name in self.names:
            _refuse_unless(
                name in NAMES, "methods", name, f"known are {', '.join(NAMES)}: name one of these"
            )
        for retention in self.retentions:
            limit = "each must lie in (0, 1): method full stands for 1.0, ask for it there"
            _refuse_unless(0.0 < retention < 1.0, "retentions", retention, limit)
        for scope in self.scopes or ():
            _refuse_unless(scope in get_args(Scope), "scopes", scope, "it must be layer or model")
        for chunk in self.chunk_tokens:
            _refuse_unless(chunk >= 1, "chunk_tokens", chunk, "each must be at least 1")
        for alpha in self.alphas:
            _refuse_unless(
                math.isfinite(alpha) and alpha >= 0.0, "alphas", alpha, "each must be at least 0"
            )
        kept = (self.sink_tokens, self.window_tokens)
        if kept != (SINK_TOKENS, None) and (
            fixed := [name for name in self.names if name in BY_INPUT]
        ):
            raise ConfigError(
                f"sink_tokens is {self.sink_tokens} and window_tokens {self.window_tokens}, but "
                f"method {fixed[0]} always keeps {SINK_TOKENS} and C / 64: leave them out, or the "
                "method"
            )
        for field, changed, users in (
            ("alphas", tuple(self.alphas) != (ALPHA,), {"static"}),
            ("scopes", self.scopes is not None, {"static", *BY_INPUT}),
            ("sink_tokens", self.sink_tokens != SINK_TOKENS, WITH_PROFILE),
            ("window_tokens", self.window_tokens is not None, WITH_PROFILE),
        ):
            if changed and not users & set(self.names):
                limit = (
                    f"only {', '.join(sorted(users))} would look at it: add one of these methods, "
                    "or leave it out"
                )
                raise ConfigError(
                    f"{field} is {getattr(self, field)}, methods {', '.join(self.names)}: {limit}"
                )

    def name_scorer(self, scorer: str) -> Grid:
        """The same grid, with `scorer` if it names none."""
        return self if self.scorers is not None else replace(self, scorers=(scorer,))

    def methods(self, context_tokens: int, scope_of: Callable[[str], Scope]) -> list[Method]:
        """All methods, each once, in the order of the names.

        `context_tokens` is the chunk of one-shot, `scope_of` the scope that a scorer is served
        with. Raises `ValueError` where no scorer is named.
        """
        found = (
            method for name in self.names for method in self._of(name, context_tokens, scope_of)
        )
        return list(dict.fromkeys(found))

    def _of(
        self, name: MethodName, context_tokens: int, scope_of: Callable[[str], Scope]
    ) -> Iterator[Method]:
        if name == "full":
            yield Method("full")
            return
        if name == "lossless":
            yield from self._lossless(scope_of)
            return
        chunks = (context_tokens,) if name == "one-shot" else self.chunk_tokens
        alphas = self.alphas if name == "static" else (None,)
        kept = (self.sink_tokens, self.window_tokens) if name in WITH_PROFILE else (None, None)
        for scorer, chunk in product(self._named_scorers, chunks):
            scopes = (None,) if name == "uniform" else self.scopes or (scope_of(scorer),)
            for scope, alpha, retention in product(scopes, alphas, self.retentions):
                yield Method(name, retention, scorer, chunk, scope, alpha, *kept)

    def _lossless(self, scope_of: Callable[[str], Scope]) -> Iterator[Method]:
        """One method a scorer and chunk: no answer depends on what drafts read."""
        for scorer, chunk in product(self._named_scorers, self.chunk_tokens):
            served = (scope_of(scorer), ALPHA, SINK_TOKENS)
            yield Method("lossless", 1.0, scorer, chunk, *served)

    @property
    def _named_scorers(self) -> Sequence[str]:
        if self.scorers is None:
            raise ValueError("no scorer is named: say with `name_scorer` which one serves")
        return self.scorers


def choose_alignment(
    methods: Sequence[Method], *, align: bool, unit: int | None = None
) -> int | None:
    """The number of tokens that context lengths are multiples of; None without `align`.

    It is `unit`, or the largest chunk of `methods`. Raises `ConfigError` if a chunk would not end
    there. Without `align`, one-shot and `unit` raise it, too.
    """
    if not align:
        if unit is not None:
            raise ConfigError(
                f"align_tokens is {unit}, but no_align leaves the end of contexts raw: leave one "
                "out"
            )
        if any(method.name == "one-shot" for method in methods):
            raise ConfigError(
                "methods has one-shot, whose one chunk is the whole context: that needs align"
            )
        return None
    chunks = {method.chunk_tokens for method in methods if method.chunk_tokens is not None}
    unit, named = (
        (max(chunks, default=1), "the largest chunk") if unit is None else (unit, "align_tokens")
    )
    if uneven := sorted(chunk for chunk in chunks if unit % chunk):
        raise ConfigError(
            f"chunk_tokens has {uneven[0]}, of which {named}, {unit}, is no multiple (one-shot's "
            "is context_tokens): choose sizes that divide it, or --no-align"
        )
    return unit


_LISTS = {
    "names": "methods",
    "scorers": "scorers",
    "retentions": "retentions",
    "chunk_tokens": "chunk_tokens",
    "alphas": "alphas",
    "scopes": "scopes",
}


def _refuse_unless(good: bool, option: str, value: object, limit: str) -> None:
    if not good:
        raise ConfigError(f"{option} has {value!r}, {limit}")
