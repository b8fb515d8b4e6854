"""The scorers by name.

A new scorer is one file with one method, and one line here; see docs/scorers.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tangram.compress.profile import Profile
from tangram.compress.provenance import ModelFingerprint
from tangram.compress.scorers.base import ChunkView, Reconstruction, Scorer
from tangram.compress.scorers.expected_attention import ExpectedAttention
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.gate import find_gate, find_shipped_gates
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.compress.scorers.kvzip import KVzip
from tangram.compress.scorers.snapkv import SnapKV
from tangram.compress.scorers.streaming_llm import StreamingLLM
from tangram.compress.scorers.tova import TOVA
from tangram.config import EngineConfig, Scope
from tangram.errors import ConfigError, ProfileError
from tangram.speculative_config import CompressedKv

__all__ = [
    "SCORERS",
    "ChunkView",
    "Reconstruction",
    "Scorer",
    "ScorerChoice",
    "choose_scope",
    "choose_scorer",
    "default_scope",
    "make_scorer",
    "read_profiles",
    "takes_gate",
]

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer
    for scorer in (StreamingLLM, TOVA, SnapKV, KeyDiff, ExpectedAttention, KVzip, FastKVzip)
}


class ScorerChoice(NamedTuple):
    """What decides which entries stay: a scorer's name, and which heads compete by its scores."""

    scorer: str
    scope: Scope


def read_profiles(config: EngineConfig) -> dict[str, Profile]:
    """The profiles that `config` names, by path. Raises `ProfileError` for an unreadable one."""
    return {path: Profile.load(path) for path in config.profile}


def check_retention(config: EngineConfig) -> None:
    """Raise `ProfileError` if `config` names profiles, and none of them has its ρ.

    The default scorer decides, as far as it is known without the model.
    """
    profiles = read_profiles(config)
    scorer, scope = choose_scorer(config, None, profiles)
    ratios = [each.kv_retention for each in profiles.values() if each.scorer.name == scorer]
    if profiles and config.kv_retention not in (1.0, *ratios):
        raise explain_missing_retention(config, scorer, scope, ratios)


def explain_missing_retention(
    config: EngineConfig, scorer: str, scope: Scope, ratios: Sequence[float]
) -> ProfileError:
    """The error for profiles of `scorer` that have other `ratios` than that of `config`."""
    return ProfileError(
        f"kv_retention is {config.kv_retention}, the profiles given for scorer {scorer} are for "
        f"{', '.join(map(str, ratios))}: set kv_retention to one of them, or make another one "
        f"(tangram calibrate {config.model} -o FILE --kv-retention {config.kv_retention} --scorer "
        f"{scorer} --scope {scope} --chunk-tokens {config.chunk_tokens})"
    )


def choose_scorer(
    config: EngineConfig, model: ModelFingerprint | None, profiles: Mapping[str, Profile]
) -> ScorerChoice:
    """The default scorer and its scope: those of `config`, of its `profiles`, or the defaults.

    Of several profiles the first with the default ρ decides, or else the first. The defaults depend
    on its gate, on `model` and on the scorer. Raises `ProfileError` if profiles of the scorer do
    not agree on the scope.
    """
    scorer = config.scorer or _find_leading_scorer(config, list(profiles.values()))
    if scorer is None:
        gated = config.gate is not None or (
            model is not None and find_gate(find_shipped_gates(), model) is not None
        )
        scorer = FastKVzip.name if gated else KeyDiff.name
    return ScorerChoice(scorer, choose_scope(config, scorer, profiles))


def choose_scope(config: EngineConfig, scorer: str, profiles: Mapping[str, Profile]) -> Scope:
    """The scope of `config`, or else that of the `profiles` of `scorer`, or else its default.

    Raises `ProfileError` if the profiles decide and do not agree.
    """
    if config.scope is not None:
        return config.scope
    recorded = {
        path: profile.scope for path, profile in profiles.items() if profile.scorer.name == scorer
    }
    if len(set(recorded.values())) > 1:
        listed = ", ".join(f"{path} for {name}" for path, name in recorded.items())
        raise ProfileError(
            f"the profiles given for scorer {scorer} are for several scopes ({listed}): give "
            "profiles of one"
        )
    return next(iter(recorded.values()), default_scope(scorer))


def default_scope(name: str) -> Scope:
    """Which heads compete by the scores of `name` by default. Raises `ConfigError` if unknown."""
    return _find(name).scope


def _find_leading_scorer(config: EngineConfig, profiles: Sequence[Profile]) -> str | None:
    drafts = config.speculation
    wanted = drafts.kv_retention if isinstance(drafts, CompressedKv) else config.kv_retention
    leading = [profile for profile in profiles if profile.kv_retention == wanted] or profiles
    return leading[0].scorer.name if leading else None


def takes_gate(name: str) -> bool:
    """Whether the scorer called `name` takes the file of a gate; False if there is none."""
    return name in SCORERS and SCORERS[name].takes_gate


def make_scorer(
    name: str, *, gate: Path | None = None, model: ModelFingerprint | None = None
) -> Scorer:
    """The scorer called `name` with its default parameters.

    `gate` is the gate file of fastkvzip and of no other scorer. Without one fastkvzip takes the
    gate that ships for exactly the weights of `model`. Raises `ConfigError` if the name is unknown,
    if a gate is missing or damaged, or if the scorer takes no gate.
    """
    return _find(name).create(gate, model)


def _find(name: str) -> type[Scorer]:
    if name not in SCORERS:
        raise ConfigError(f"scorer is {name!r}, it must be one of {', '.join(sorted(SCORERS))}")
    return SCORERS[name]
