"""Retentions at ratios of which there is no profile, made when a request first asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tangram.cache.retention import Retention
from tangram.compress.between import derive_profile, is_derivable
from tangram.compress.profile import Profile
from tangram.errors import ConfigError, RequestError


class DerivedRetentions:
    """Makes retentions from `profiles`, with pages of `page_tokens` for `heads_per_page`.

    What is made depends on profiles and ratio alone, so any thread, and any replica, may make it.
    At most one is kept for each scorer and derivable ratio.
    """

    def __init__(
        self, profiles: Sequence[Profile], *, page_tokens: int, heads_per_page: int
    ) -> None:
        self._profiles = profiles
        self._pages = {"page_tokens": page_tokens, "heads_per_page": heads_per_page}
        self._made = dict[tuple[str | None, float], Retention]()

    @property
    def made(self) -> Sequence[Retention]:
        """Those that were asked for."""
        return tuple(self._made.values())

    def find(self, served: Retention, kv_retention: float) -> Retention | None:
        """The retention of another ρ with the scorer and the pages of `served`.

        None if there is no profile of the scorer, or if ρ is neither that of a profile nor
        derivable. Raises `RequestError` if ρ cannot be met.
        """
        key = served.scorer, kv_retention
        if (known := self._made.get(key)) is not None:
            return known
        measured = [entry for entry in self._profiles if entry.scorer.name == served.scorer]
        is_known = any(entry.kv_retention == kv_retention for entry in measured)
        if not is_known and not (measured and is_derivable(kv_retention)):
            return None
        try:
            profile = derive_profile(measured, kv_retention, **self._pages)
        except ConfigError as error:
            raise RequestError(str(error), "kv_retention") from error
        made = replace(
            served,
            kv_retention=profile.kv_retention,
            layout=served.layout.with_groups(profile.groups, profile.sealed_pages),
            fingerprint=profile.fingerprint(),
            sink_tokens=profile.sink_tokens,
            window_tokens=profile.window_tokens,
        )
        return self._made.setdefault(key, made)
