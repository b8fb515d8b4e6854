"""What `tangram calibrate` says of its profile, and the command that serves with it."""

from __future__ import annotations

import shlex
from pathlib import Path

from tangram.cli.options import find_changed
from tangram.compress.profile import Profile
from tangram.config import EngineConfig

# Above _ALIKE, a kind of text loses under a point with the budgets of another
# (docs/calibration.md). Below _MIXED, a mean suits the heads of few texts.
_ALIKE, _MIXED = 0.8, 0.5


def meaning(profile: Profile) -> list[str]:
    """The meaning of a profile's figures, one sentence each."""
    from tangram.calibrate.observations import reserved_fractions

    shares, stability = reserved_fractions(profile), profile.calibration.rank_stability
    sentences = [
        f"A sealed chunk keeps at most {profile.realised_retention:.1%} of its entries. The shares "
        f"of the heads range from {shares.min():.0%} to {shares.max():.0%}."
    ]
    if stability is None:
        return [*sentences, "The agreement of texts is not known: it needs two samples."]
    ranked = (
        f"The rank correlation of heads between texts is {stability.mean:.2f}, at least "
        f"{stability.min:.2f}: "
    )
    if stability.mean >= _ALIKE:
        said = "the budgets also suit other texts."
    elif stability.mean >= _MIXED:
        said = "the budgets are a compromise. Calibrate on texts like yours (--data)."
    else:
        said = "the budgets suit few of them. Calibrate on texts like yours (--data), and on more."
    return [*sentences, f"{ranked}{said}"]


def serve_line(config: EngineConfig, profile: Path) -> str:
    """The command that serves the model with the new profile."""
    words = ["tangram", "serve", config.model, "--kv-retention", f"{config.kv_retention:g}"]
    words += ["--profile", str(profile)]
    names = ["chunk_tokens", "page_tokens", "heads_per_page", "gate", "dtype"]
    names += ["quantization", "load_format", "device"]
    for name, value in find_changed(config, *names).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
