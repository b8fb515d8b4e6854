"""Tangram: LLM serving on a KV cache that is compressed head by head and reused between turns."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tangram.errors import (
    ConfigError,
    IntegrityError,
    ModelError,
    ProfileError,
    RequestError,
    TangramError,
)
from tangram.version import __version__ as __version__

if TYPE_CHECKING:
    from tangram.compress.profile import Profile
    from tangram.engine.llm import LLM, CompletionOutput, RequestOutput
    from tangram.types import SamplingParams

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

_MODULES = {
    "Profile": "tangram.compress.profile",
    "SamplingParams": "tangram.types",
    **dict.fromkeys(("LLM", "CompletionOutput", "RequestOutput"), "tangram.engine.llm"),
}


def __getattr__(name: str) -> Any:
    """Import a name with its module at its first use.

    The command imports this package before it can report a Ctrl-C, so this must take no time.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
