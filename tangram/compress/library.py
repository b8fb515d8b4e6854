"""Find the profiles that fit a model and its options in folders of profile files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from tangram.compress.profile import ModelFingerprint, Profile
from tangram.compress.provenance import Parameter
from tangram.errors import ProfileError

_log = logging.getLogger(__name__)


class _Options(TypedDict):
    scorer: str
    scope: str
    chunk_tokens: int
    parameters: Mapping[str, Parameter] | None


def find_shipped_profiles() -> Path:
    """The folder of the profiles that come with Tangram."""
    return Path(__file__).parent.parent / "profiles"


def find_profile(
    directories: Iterable[str | Path],
    fingerprint: ModelFingerprint,
    scorer: str,
    scope: str,
    kv_retention: float,
    chunk_tokens: int,
    parameters: Mapping[str, Parameter] | None = None,
) -> Profile | None:
    """That of `find_profiles` for ρ = `kv_retention`, or None."""
    found = find_profiles(directories, fingerprint, scorer, scope, chunk_tokens, parameters)
    return found.get(float(kv_retention))


def find_profiles(
    directories: Iterable[str | Path],
    fingerprint: ModelFingerprint,
    scorer: str,
    scope: str,
    chunk_tokens: int,
    parameters: Mapping[str, Parameter] | None = None,
) -> dict[float, Profile]:
    """The first `*.json` that fits, for each ρ. Directories are read in order, and files by name.

    A profile of exactly these weights precedes one that names no weights. A file that is no valid
    profile is skipped with a logged warning that says what is wrong with it. Folders that do not
    exist count as empty. `parameters` are those of the scorer that will run; None leaves them
    unchecked.
    """
    options: _Options = {
        "scorer": scorer,
        "scope": scope,
        "chunk_tokens": chunk_tokens,
        "parameters": parameters,
    }
    exact, without_weights = dict[float, Profile](), dict[float, Profile]()
    for path in (
        path for directory in directories for path in sorted(Path(directory).glob("*.json"))
    ):
        profile = _load(path)
        if profile is not None and _fits(profile, fingerprint, options):
            known = without_weights if profile.model.weights_sha256 is None else exact
            known.setdefault(profile.kv_retention, profile)
    return without_weights | exact


def _load(path: Path) -> Profile | None:
    try:
        return Profile.load(path)
    except ProfileError as error:
        _log.warning("passed over: %s", error)
        return None


def _fits(profile: Profile, fingerprint: ModelFingerprint, options: _Options) -> bool:
    try:
        profile.check_model(fingerprint)
        profile.check_options(**options, kv_retention=profile.kv_retention)
    except ProfileError:
        return False
    return True
