"""Tangram: LLM serving on a KV cache that is compressed head by head and reused between turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tangram.compress.profile import Profile
from tangram.errors import (
    ConfigError,
    IntegrityError,
    ModelError,
    ProfileError,
    RequestError,
    TangramError,
)
from tangram.types import SamplingParams
from tangram.version import __version__ as __version__

if TYPE_CHECKING:
    from tangram.engine.llm import LLM, CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "IntegrityError",
    "ModelError",
    "Profile",
    "ProfileError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TangramError",
]


def __getattr__(name: str) -> Any:
    """Import `LLM` and its results, and torch with them, at their first use."""
    if name in ("LLM", "CompletionOutput", "RequestOutput"):
        from tangram.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
