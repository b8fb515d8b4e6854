"""The profiles that methods need: equal budgets, or those calibrated once for a model and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tangram.calibrate import ScoreSource, calibrate, in_terminal
from tangram.compress.library import shipped_profiles
from tangram.compress.profile import ALPHA, Profile, Scope
from tangram.compress.provenance import Calibration, ModelFingerprint, Parameter, ScorerSpec
from tangram.errors import ProfileError
from tangram.evaluate.methods import Method
from tangram.pilots import pilot_texts
from tangram.types import Geometry

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class Statistics:
    """Which μ and σ a method needs: those of a scorer over chunks of C tokens, of which some are always kept."""

    scorer: str
    chunk_tokens: int
    scope: Scope
    sink_tokens: int
    window_tokens: int

    @classmethod
    def of(cls, method: Method) -> Statistics:
        """Of a uniform or static method."""
        if method.scorer is None or method.chunk_tokens is None or method.sink_tokens is None:
            raise ValueError(f"method {method.title} has no profile")
        window = method.chunk_tokens // 64 if method.window_tokens is None else method.window_tokens
        return cls(method.scorer, method.chunk_tokens, method.scope or "model", method.sink_tokens, window)


@dataclass(frozen=True)
class Budgets:
    """The profiles of one model, in pages of P tokens and Hp heads.

    `scorers` are their specifications by name. `retentions` is every ρ that may be asked for: one pass over the
    `samples` pilot texts serves them all. `source_of` gives scores by scorer and C, `encode` token ids of a text.
    Calibrations are kept in `folder`; any α and any shape of pages follow from one.
    """

    fingerprint: ModelFingerprint
    geometry: Geometry
    scorers: Mapping[str, ScorerSpec]
    retentions: Sequence[float]
    samples: int
    folder: Path
    source_of: Callable[[str, int], ScoreSource]
    encode: Callable[[str], Sequence[int]]
    page_tokens: int
    heads_per_page: int

    def profile(self, method: Method) -> Profile:
        """That of a uniform or static method. Raises `ConfigError` if ρ cannot be met."""
        if method.name == "uniform":
            return self.equal(method)
        measured = self._kept(Statistics.of(method), method.kv_retention) or self._calibrated(method)
        return self._derived(method, measured.mean, measured.std, measured.calibration)

    def equal(self, method: Method) -> Profile:
        """Every head keeps as much as any other, up to a page."""
        shape = (len(self.geometry.full_layers), self.geometry.kv_heads)
        mean, std = np.full(shape, method.kv_retention), np.zeros(shape)
        return self._derived(method, mean, std, Calibration(1, "equal budgets, nothing was measured"))

    def _derived(self, method: Method, mean: object, std: object, calibration: Calibration) -> Profile:
        wanted = Statistics.of(method)
        return Profile.from_statistics(
            np.asarray(mean), np.asarray(std), model=self.fingerprint, layers=self.geometry.full_layers,
            scorer=self.scorers[wanted.scorer], scope=wanted.scope, kv_retention=method.kv_retention,
            chunk_tokens=wanted.chunk_tokens, calibration=calibration, page_tokens=self.page_tokens,
            heads_per_page=self.heads_per_page, alpha=method.alpha or 0.0, sink_tokens=wanted.sink_tokens,
            window_tokens=wanted.window_tokens,
        )  # fmt: skip

    def _kept(self, wanted: Statistics, retention: float) -> Profile | None:
        """A calibration on as many samples that ships or was kept."""
        name = f"*.{wanted.scorer}.{wanted.scope}.c{wanted.chunk_tokens}.r{retention:g}.json"  # Profile.file_name
        return next((one for one in self._at_hand(name) if self._fits(one, wanted, retention)), None)

    def _at_hand(self, name: str) -> Iterator[Profile]:
        for path in (path for folder in (self.folder, shipped_profiles()) for path in sorted(folder.glob(name))):
            try:
                yield Profile.load(path)
            except ProfileError as error:
                _log.warning("passed over: %s", error)

    def _fits(self, profile: Profile, wanted: Statistics, retention: float) -> bool:
        parameters: Mapping[str, Parameter] = self.scorers[wanted.scorer].parameters
        try:
            profile.check_model(self.fingerprint)
            profile.check_options(
                scorer=wanted.scorer, scope=wanted.scope, kv_retention=retention, chunk_tokens=wanted.chunk_tokens,
                parameters=parameters,
            )  # fmt: skip
        except ProfileError:
            return False
        always = (profile.sink_tokens, profile.window_tokens) == (wanted.sink_tokens, wanted.window_tokens)
        return always and profile.model.weights_sha256 is not None and profile.calibration.samples == self.samples

    def _calibrated(self, method: Method) -> Profile:
        """Measure at every ρ that is not there yet, keep the profiles, and return that of the method."""
        wanted = Statistics.of(method)
        missing = [value for value in sorted(set(self.retentions)) if self._kept(wanted, value) is None]
        texts = pilot_texts(self.samples, min_characters=max(8_000, 6 * wanted.chunk_tokens))
        profiles = calibrate(
            self.source_of(wanted.scorer, wanted.chunk_tokens), [self.encode(text) for text in texts],
            geometry=self.geometry, fingerprint=self.fingerprint, scorer=self.scorers[wanted.scorer],
            scope=wanted.scope, retentions=missing, chunk_tokens=wanted.chunk_tokens, alpha=ALPHA,
            source=f"built-in pilot texts, {self.samples} samples, seed 0", page_tokens=self.page_tokens,
            heads_per_page=self.heads_per_page, sink_tokens=wanted.sink_tokens, window_tokens=wanted.window_tokens,
            track=in_terminal,
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.fingerprint.weights_sha256}.n{self.samples}.s{wanted.sink_tokens}.w{wanted.window_tokens}"
        for profile in profiles:
            profile.save(self.folder / f"{stem}.{profile.file_name}")
        return next(profile for profile in profiles if profile.kv_retention == method.kv_retention)
