"""The ways to keep entries that an engine serves: a retention for each profile, and ρ = 1.0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.compress.profile import Profile
from tangram.compress.scorers import Scorer
from tangram.engine.setup.profiles import Compression
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.speculative_config import NAME, CompressedKv

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class Served:
    """The `retentions` of an engine, the `scorers` they need by name, and `bases`.

    From these profiles, retentions of other ratios are derived. All retentions have pages of one
    shape. The first is the default.
    """

    scorers: Mapping[str, Scorer]
    retentions: Sequence[Retention]
    bases: Sequence[Profile] = ()


def find_served(compression: Compression, loaded: LoadedModel, max_tokens: int) -> Served:
    """The default, ρ = 1.0, then others, for sequences of up to `max_tokens`.

    Of these, those of the default scorer come first. Raises `ConfigError` if the model has no
    entries to choose among and an option asks for it, and `ProfileError` if a profile does not fit
    or cannot be made.
    """
    config, drafts = compression.config, compression.config.speculation
    full = _keep_everything(compression, loaded, max_tokens)
    if not loaded.geometry.full_layers:
        if isinstance(drafts, CompressedKv):
            raise ConfigError(
                f"{NAME}.method is {drafts.method}, but {config.model} has "
                "sliding-window layers only, of which drafts can leave out nothing: choose "
                "ngram or suffix"
            )
        _log.warning(
            "%s has sliding-window layers only: there is nothing to compress", config.model
        )
        return Served({}, [full])
    if config.kv_retention == 1.0 and not config.profile and not isinstance(drafts, CompressedKv):
        return Served({}, [full])
    scorers = compression.make_scorers(loaded.fingerprint)
    profiles, bases = compression.find_served_profiles(loaded, scorers)
    if isinstance(drafts, CompressedKv):
        bases = []  # every entry is kept
        profile = compression.find_draft_profile(loaded, scorers)
        full = _with_draft(full, _retain(profile, scorers, full.layout))
    found = [_retain(profile, scorers, full.layout) for profile in profiles]
    found.sort(key=lambda entry: entry.scorer != config.scorer)
    wanted = config.kv_retention, config.scorer
    default = next((entry for entry in found if (entry.kv_retention, entry.scorer) == wanted), full)
    others = [entry for entry in (full, *found) if entry is not default]
    return Served(scorers, [default, *others], bases)


def _keep_everything(compression: Compression, loaded: LoadedModel, max_tokens: int) -> Retention:
    """ρ = 1.0. It depends on the model alone: its weights replace the profile's fingerprint."""
    config = compression.config
    layout = Layout.lay_out_uncompressed(
        loaded.geometry,
        chunk_tokens=config.chunk_tokens,
        page_tokens=config.page_tokens,
        heads_per_page=config.heads_per_page,
        max_tokens=max_tokens,
    )
    return Retention(1.0, layout, f"full:{loaded.weights_digest}:{config.chunk_tokens}")


def _retain(profile: Profile, scorers: Mapping[str, Scorer], like: Layout) -> Retention:
    """The retention of `profile`, in pages and for sequences as `like` has them."""
    scorer = scorers[profile.scorer.name]
    return Retention(
        profile.kv_retention,
        like.with_groups(profile.groups, profile.sealed_pages),
        profile.fingerprint(),
        scorer=scorer.name,
        sink_tokens=profile.sink_tokens,
        window_tokens=profile.window_tokens,
        scales=profile.scales,
        one_chunk_a_step="reconstruction" in scorer.needs,
    )


def _with_draft(full: Retention, draft: Retention) -> Retention:
    """ρ = 1.0 in chunks that begin with what `draft` keeps, which drafts read."""
    layout = draft.layout
    whole = [layout.chunk_pages] * layout.full_groups
    return replace(
        draft,
        kv_retention=1.0,
        layout=layout.with_groups(layout.groups[: layout.full_groups], whole),
        fingerprint=f"{full.fingerprint}:{draft.fingerprint}",
        draft=draft,
    )
