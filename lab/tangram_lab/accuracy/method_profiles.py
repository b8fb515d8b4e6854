"""The profiles of methods: equal budgets, or budgets that are calibrated once and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tangram.calibrate.measure import Magnitudes, ScoreSource, calibrate
from tangram.calibrate.texts import QUICK_SAMPLES, make_texts
from tangram.compress.library import find_profile, find_shipped_profiles
from tangram.compress.profile import ALPHA, Profile, ProfileOptions
from tangram.compress.provenance import Calibration, ModelFingerprint, Parameter, ScorerSpec
from tangram.config import Scope
from tangram.errors import ProfileError
from tangram.progress import show_progress
from tangram.types import Geometry, HeadScales
from tangram_lab.accuracy.methods import Method

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class Statistics:
    """The key of the μ and σ that a method needs: a scorer, C, and the entries that always stay."""

    scorer: str
    chunk_tokens: int
    scope: Scope
    sink_tokens: int
    window_tokens: int

    @classmethod
    def of(cls, method: Method) -> Statistics:
        """The key for a uniform or static method."""
        if method.scorer is None or method.chunk_tokens is None or method.sink_tokens is None:
            raise ValueError(f"method {method.title} has no profile")
        window = method.chunk_tokens // 64 if method.window_tokens is None else method.window_tokens
        return cls(
            method.scorer, method.chunk_tokens, method.scope or "model", method.sink_tokens, window
        )


@dataclass(frozen=True)
class Budgets:
    """The profiles of one model, in pages of P tokens and Hp heads.

    `scorers` are their specifications by name. `retentions` are all ρ that may be requested, so
    that one pass over the `samples` calibration texts measures them all. `samples` None means the
    profiles that a server takes: a shipped or kept one, or else the short calibration of a first
    start. `source_of` gives scores by scorer and C, and fills `Magnitudes` if given. `encode` gives
    the token ids of a text. Calibrations are kept in `folder`, that of the model's weights; any α
    and any shape of pages follow from one.
    """

    fingerprint: ModelFingerprint
    geometry: Geometry
    scorers: Mapping[str, ScorerSpec]
    retentions: Sequence[float]
    samples: int | None
    folder: Path
    source_of: Callable[..., ScoreSource]
    encode: Callable[[str], Sequence[int]]
    page_tokens: int
    heads_per_page: int

    def profile(self, method: Method) -> Profile:
        """The profile of a uniform or static method. Raises `ConfigError` if ρ cannot be met."""
        if method.name == "uniform":
            return self.equal(method)
        if self.samples is None:
            return self._find_served(method)
        measured = self._find_kept(Statistics.of(method), method.kv_retention) or self._calibrate(
            method, self.samples
        )
        return self._derive(
            method, measured.mean, measured.std, measured.calibration, measured.scales
        )

    def basis(self, method: Method) -> Mapping[str, object]:
        """The source of a static method's budgets, as JSON.

        Profiles of a server must exist before this is called.
        """
        if self.samples is not None:
            return {"calibration_samples": self.samples}
        profile = self._find_served(method)
        return {
            "calibration_samples": profile.calibration.samples,
            "profile": profile.fingerprint(),
        }

    def _find_served(self, method: Method) -> Profile:
        """The profile that a server would take. It is measured and kept if there is none yet."""
        wanted = Statistics.of(method)
        found = find_profile(
            [find_shipped_profiles(), self.folder / "profiles"],
            self.fingerprint,
            wanted.scorer,
            wanted.scope,
            method.kv_retention,
            wanted.chunk_tokens,
            self.scorers[wanted.scorer].parameters,
        )
        if found is not None:
            return found.with_pages(self.page_tokens, self.heads_per_page)
        kept, profiles = (
            self.folder / "profiles",
            self._measure(wanted, sorted(set(self.retentions)), QUICK_SAMPLES),
        )
        kept.mkdir(parents=True, exist_ok=True)
        for profile in profiles:
            profile.save(kept / profile.file_name)
        return next(profile for profile in profiles if profile.kv_retention == method.kv_retention)

    def equal(self, method: Method) -> Profile:
        """Every head keeps the same number of entries, up to a page."""
        shape = (len(self.geometry.full_layers), self.geometry.kv_heads)
        mean, std = np.full(shape, method.kv_retention), np.zeros(shape)
        return self._derive(
            method, mean, std, Calibration(1, "equal budgets, nothing was measured")
        )

    def _derive(
        self,
        method: Method,
        mean: object,
        std: object,
        calibration: Calibration,
        scales: HeadScales | None = None,
    ) -> Profile:
        wanted = Statistics.of(method)
        return Profile.from_statistics(
            np.asarray(mean),
            np.asarray(std),
            self._options(wanted, method.alpha or 0.0),
            method.kv_retention,
            calibration,
        ).with_scales(scales)

    def _options(self, wanted: Statistics, alpha: float) -> ProfileOptions:
        return ProfileOptions(
            self.fingerprint,
            self.geometry.full_layers,
            self.scorers[wanted.scorer],
            wanted.scope,
            wanted.chunk_tokens,
            self.page_tokens,
            self.heads_per_page,
            alpha=alpha,
            sink_tokens=wanted.sink_tokens,
            window_tokens=wanted.window_tokens,
        )

    @property
    def _calibrations(self) -> Path:
        return self.folder / "calibrations"

    def _find_kept(self, wanted: Statistics, retention: float) -> Profile | None:
        """A shipped or kept calibration on the same number of samples."""
        # Profile.file_name
        name = f"*.{wanted.scorer}.{wanted.scope}.c{wanted.chunk_tokens}.r{retention}.json"
        return next(
            (one for one in self._at_hand(name) if self._fits(one, wanted, retention)), None
        )

    def _at_hand(self, name: str) -> Iterator[Profile]:
        for path in (
            path
            for folder in (self._calibrations, find_shipped_profiles())
            for path in sorted(folder.glob(name))
        ):
            try:
                yield Profile.load(path)
            except ProfileError as error:
                _log.warning("passed over: %s", error)

    def _fits(self, profile: Profile, wanted: Statistics, retention: float) -> bool:
        parameters: Mapping[str, Parameter] = self.scorers[wanted.scorer].parameters
        try:
            profile.check_model(self.fingerprint)
            profile.check_options(
                scorer=wanted.scorer,
                scope=wanted.scope,
                kv_retention=retention,
                chunk_tokens=wanted.chunk_tokens,
                parameters=parameters,
            )
        except ProfileError:
            return False
        always = (profile.sink_tokens, profile.window_tokens) == (
            wanted.sink_tokens,
            wanted.window_tokens,
        )
        return (
            always
            and profile.model.weights_sha256 is not None
            and profile.calibration.samples == self.samples
        )

    def _calibrate(self, method: Method, samples: int) -> Profile:
        """Measure at every missing ρ, keep the profiles, and return that of the method."""
        wanted, kept = Statistics.of(method), self._calibrations
        missing = [
            value
            for value in sorted(set(self.retentions))
            if self._find_kept(wanted, value) is None
        ]
        profiles = self._measure(wanted, missing, samples)
        kept.mkdir(parents=True, exist_ok=True)
        ends = f"s{wanted.sink_tokens}.w{wanted.window_tokens}"
        stem = f"n{samples}.{ends}"
        for profile in profiles:
            profile.save(kept / f"{stem}.{profile.file_name}")
        return next(profile for profile in profiles if profile.kv_retention == method.kv_retention)

    def _measure(
        self, wanted: Statistics, retentions: Sequence[float], samples: int
    ) -> list[Profile]:
        texts = make_texts(samples, min_characters=max(8_000, 6 * wanted.chunk_tokens))
        magnitudes = Magnitudes()
        return calibrate(
            self.source_of(wanted.scorer, wanted.chunk_tokens, magnitudes),
            [self.encode(text) for text in texts],
            self._options(wanted, ALPHA),
            retentions,
            max_positions=self.geometry.max_positions,
            source=f"built-in calibration texts, {samples} samples, seed 0",
            track=show_progress,
            magnitudes=magnitudes,
        )
