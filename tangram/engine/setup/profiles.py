"""Find the profiles of an engine: configured, shipped, kept, or calibrated now."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tangram.calibrate.measure import Magnitudes, Observer, calibrate
from tangram.calibrate.texts import QUICK_SAMPLES, make_texts, quick_tokens
from tangram.compress.library import find_profiles, find_shipped_profiles
from tangram.compress.profile import Profile, ProfileOptions
from tangram.compress.provenance import ModelFingerprint, ScorerSpec
from tangram.compress.scorers import (
    Scorer,
    ScorerChoice,
    choose_scope,
    choose_scorer,
    explain_missing_retention,
    make_scorer,
    read_profiles,
    takes_gate,
)
from tangram.config import EngineConfig, Scope
from tangram.engine.setup.observe import score_source
from tangram.engine.setup.startup import foretell_calibration
from tangram.errors import ConfigError, ProfileError
from tangram.foreign_files import refuse_irregular
from tangram.kernels.cpu.threads import use_threads
from tangram.model.load import LoadedModel
from tangram.progress import show_progress
from tangram.speculative_config import CompressedKv

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class Compression:
    """The default scorer and scope of `config`, and its profiles, with each file read once.

    Its `config` names the default scorer and its scope. `scopes` are those of all scorers by name,
    the default first.
    """

    config: EngineConfig
    choice: ScorerChoice
    named: Sequence[Profile]
    scopes: Mapping[str, Scope]

    @classmethod
    def of(cls, config: EngineConfig, model: ModelFingerprint | None) -> Compression:
        """That of `model`; without a model, what is known of any.

        Raises `ProfileError` or `ConfigError` if profiles are unreadable or do not agree.
        """
        profiles = read_profiles(config)
        choice = choose_scorer(config, model, profiles)
        recorded = [profile.scorer.name for profile in profiles.values()]
        others = recorded if choice.scorer in recorded else []
        scopes = {
            name: choose_scope(config, name, profiles)
            for name in dict.fromkeys([choice.scorer, *others])
        }
        return cls(replace(config, **choice._asdict()), choice, list(profiles.values()), scopes)

    def make_scorer(self, model: ModelFingerprint) -> Scorer:
        """The default scorer. Raises `ConfigError` if it does not fit the model or the chunk."""
        return self._make_scorer(self.choice.scorer, model)

    def make_scorers(self, model: ModelFingerprint) -> dict[str, Scorer]:
        """The scorers of all profiles by name. Raises `ConfigError` as `make_scorer` does."""
        return {name: self._make_scorer(name, model) for name in self.scopes}

    def check_without_model(self) -> None:
        """Raise the errors of scorers, gates and profiles that are the same for every model."""
        config = self.config
        if not (config.scorer or config.profile or config.gate):
            return  # a gate that ships may fit the model, and then decides the scorer
        scorers = {
            name: self._make_scorer(name, None)
            for name in self.scopes
            if config.gate or not takes_gate(name)
        }
        for profile in self.named:
            if (name := self._name_scorer(profile)) in scorers:
                self._fit(profile, scorers[name])

    def _name_scorer(self, profile: Profile) -> str:
        """The scorer that `profile` must be for."""
        name = profile.scorer.name
        return name if name in self.scopes else self.choice.scorer

    def _make_scorer(self, name: str, model: ModelFingerprint | None) -> Scorer:
        # A gate that no scorer takes is refused by the default scorer.
        is_taken = takes_gate(name) or not any(map(takes_gate, self.scopes))
        gate = Path(self.config.gate) if self.config.gate and is_taken else None
        scorer = make_scorer(name, gate=gate, model=model)
        scorer.check_tokens(self.config.chunk_tokens)
        if model is not None:
            scorer.check_model(model)
        return scorer

    def find_served_profiles(
        self, loaded: LoadedModel, scorers: Mapping[str, Scorer]
    ) -> tuple[list[Profile], list[Profile]]:
        """The profiles that are served beside ρ = 1.0, cut to pages, and those to derive others of.

        If none is configured and ρ is less, one is found or made. Raises `ProfileError` if those of
        the default scorer have no such ρ.
        """
        config, default = self.config, self.choice.scorer
        profiles = [self._check(profile, loaded, scorers) for profile in self.named]
        ratios = [profile.kv_retention for profile in profiles if profile.scorer.name == default]
        if config.kv_retention in (1.0, *ratios):
            return profiles, profiles
        if profiles:
            raise explain_missing_retention(config, default, self.scopes[default], ratios)
        scorer, scope = scorers[default], self.choice.scope
        kept = find_kept_profiles(config, loaded, scorer, scope)
        profile = kept.get(config.kv_retention) or make_profile(config, loaded, scorer, scope)
        served = profile.with_pages(config.page_tokens, config.heads_per_page)
        return [served], list((kept | {config.kv_retention: profile}).values())

    def find_draft_profile(self, loaded: LoadedModel, scorers: Mapping[str, Scorer]) -> Profile:
        """The profile of what drafts read: configured, shipped, kept, or made.

        Raises `ConfigError` if drafts read none, and `ProfileError` as `make_profile`.
        """
        drafts, default = self.config.speculation, self.choice.scorer
        if not isinstance(drafts, CompressedKv):
            raise ConfigError("only the speculative method compressed_kv has a draft profile")
        for profile in self.named:
            if (profile.scorer.name, profile.kv_retention) == (default, drafts.kv_retention):
                return self._check(profile, loaded, scorers)
        config = replace(self.config, speculative_config=None, kv_retention=drafts.kv_retention)
        scorer, scope = scorers[default], self.choice.scope
        kept = find_kept_profiles(config, loaded, scorer, scope)
        profile = kept.get(drafts.kv_retention) or make_profile(config, loaded, scorer, scope)
        return profile.with_pages(config.page_tokens, config.heads_per_page)

    def _check(
        self, profile: Profile, loaded: LoadedModel, scorers: Mapping[str, Scorer]
    ) -> Profile:
        profile.check_model(loaded.fingerprint)
        return self._fit(profile, scorers[self._name_scorer(profile)])

    def _fit(self, profile: Profile, scorer: Scorer) -> Profile:
        """`profile` in the pages of the config, whose options it must be for."""
        config = self.config
        profile.check_options(
            scorer=scorer.name,
            scope=self.scopes[scorer.name],
            kv_retention=profile.kv_retention,
            chunk_tokens=config.chunk_tokens,
            parameters=scorer.parameters(),
        )
        return profile.with_pages(config.page_tokens, config.heads_per_page)


def _kept_folder(loaded: LoadedModel) -> Path:
    return loaded.kept_folder / "profiles"


def find_kept_profiles(
    config: EngineConfig, loaded: LoadedModel, scorer: Scorer, scope: Scope
) -> dict[float, Profile]:
    """The shipped and kept profiles that fit, by their ρ."""
    return find_profiles(
        [find_shipped_profiles(), _kept_folder(loaded)],
        loaded.fingerprint,
        scorer=scorer.name,
        scope=scope,
        chunk_tokens=config.chunk_tokens,
        parameters=scorer.parameters(),
    )


def make_profile(
    config: EngineConfig, loaded: LoadedModel, scorer: Scorer, scope: Scope
) -> Profile:
    """The profile of a short calibration, which is kept.

    Raises `ProfileError` for several ranks, which make none.
    """
    kept = _kept_folder(loaded)
    if config.tensor_parallel_size > 1:
        raise ProfileError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and there is no profile for "
            f"{config.model} with scorer {scorer.name}, scope {scope}, kv_retention "
            f"{config.kv_retention} and chunk_tokens {config.chunk_tokens}: make one with `tangram "
            "calibrate`, which takes one device, and give it with --profile"
        )
    _log.warning(
        "no profile for %s with scorer %s, scope %s, kv_retention %s, chunk_tokens %s: calibrating "
        "on %d samples now, once (`tangram calibrate` takes 50 and is more exact)",
        config.model,
        scorer.name,
        scope,
        config.kv_retention,
        config.chunk_tokens,
        QUICK_SAMPLES,
    )
    check_chunk(config, loaded.geometry.max_positions)
    most_tokens = quick_tokens(config.chunk_tokens)
    texts = make_texts(QUICK_SAMPLES, min_characters=6 * most_tokens)
    profile = calibrate_model(
        loaded,
        scorer,
        scope,
        config,
        retentions=[config.kv_retention],
        texts=texts,
        source="built-in calibration texts, quick",
        most_tokens=most_tokens,
    )[0]
    path = kept / profile.file_name
    try:
        kept.mkdir(parents=True, exist_ok=True)
        refuse_irregular(path)  # writing to a pipe that nobody reads would block for ever
        profile.save(path)
        _log.warning("the profile is kept as %s", path)
    except OSError as error:
        _log.warning("the profile could not be kept as %s: %s", path, error.strerror)
    return profile


def check_chunk(config: EngineConfig, positions: int) -> None:
    """Raise `ConfigError` for chunks that no sequence of a model of `positions` fills."""
    if config.chunk_tokens > positions:
        raise ConfigError(
            f"chunk_tokens is {config.chunk_tokens}, the model was made for at most "
            f"{positions} positions: lower chunk_tokens"
        )


def scorer_spec(scorer: Scorer) -> ScorerSpec:
    """The `ScorerSpec` of `scorer` in a profile."""
    return ScorerSpec(scorer.name, scorer.parameters())


def calibrate_model(
    loaded: LoadedModel,
    scorer: Scorer,
    scope: Scope,
    config: EngineConfig,
    *,
    retentions: Sequence[float],
    texts: Sequence[str],
    source: str,
    most_tokens: int | None = None,
    observe: Observer | None = None,
) -> list[Profile]:
    """One profile of `loaded` for each ρ, from the scores of `texts`, up to `most_tokens` of each.

    The log first estimates the duration, and a terminal shows a progress bar. `observe` is called
    with each text's shares, as in `tangram.calibrate.calibrate`.
    """
    use_threads(config.threads)
    scorer.check_model(loaded.fingerprint)
    most = min(most_tokens or loaded.geometry.max_positions, loaded.geometry.max_positions)
    samples = [loaded.encode(text)[:most] for text in texts]
    # A latent is key and value, with one scale for both: it stays 1.
    magnitudes = Magnitudes() if loaded.geometry.takes_scales else None
    scores = score_source(loaded, scorer, chunk_tokens=config.chunk_tokens, magnitudes=magnitudes)
    foretell_calibration(scores, samples, config.chunk_tokens)
    options = ProfileOptions(
        loaded.fingerprint,
        loaded.geometry.full_layers,
        scorer_spec(scorer),
        scope,
        config.chunk_tokens,
        config.page_tokens,
        config.heads_per_page,
    )
    return calibrate(
        scores,
        samples,
        options,
        retentions,
        max_positions=most,
        source=source,
        track=show_progress,
        observe=observe,
        magnitudes=magnitudes,
    )
