"""From an `EngineConfig` to a running engine: model, profile, pool, scheduler, runner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tangram.cache.dynamic import ByInputCache, DynamicCache
from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.calibrate import Observer, calibrate, in_terminal
from tangram.compress.groups import adjacent
from tangram.compress.library import find_profile, shipped_profiles
from tangram.compress.profile import SINK_TOKENS, Profile, Scope
from tangram.compress.provenance import ScorerSpec
from tangram.compress.scorers import Choice, Scorer, choose, make_scorer
from tangram.config import EngineConfig, cache_folder
from tangram.engine.admission import Admission
from tangram.engine.loop import Engine
from tangram.engine.memory import cache_dtype, explained, kv_bytes, offload_bytes, table_bytes
from tangram.engine.observe import score_source
from tangram.engine.runner import Runner
from tangram.engine.scheduler import Scheduler
from tangram.engine.startup import announce, foretell_calibration
from tangram.errors import ConfigError, ProfileError
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.step import KernelChoice
from tangram.kernels.threads import use_threads
from tangram.model.compiled import compile_layers
from tangram.model.fused import join_projections
from tangram.model.load import LoadedModel, load_model
from tangram.model.overflow import Overflow
from tangram.model.sealing import Retention
from tangram.pilots import QUICK_SAMPLES, pilot_texts
from tangram.plan.policy import Policy, policy_name
from tangram.plan.schedule import Schedule

CACHES: dict[str, type[CacheManager]] = {
    "reserved": CacheManager, "dynamic": DynamicCache, "by-input": ByInputCache,
}  # fmt: skip

_log = logging.getLogger("tangram")


def build_engine(config: EngineConfig) -> Engine:
    """Everything `config` asks for, ready to `submit` to. Raises the errors of `tangram.errors` with what to change."""
    with explained(config):
        loaded = load_model(config.model, dtype=config.dtype, device=config.device, load_format=config.load_format)
        return engine_of(config, loaded)


def engine_of(config: EngineConfig, loaded: LoadedModel, kernels: KernelChoice | None = None) -> Engine:
    """`build_engine` for a model that is loaded already; `kernels`, if given, chooses what serves its pool."""
    config = replace(config, **choose(config, loaded.fingerprint)._asdict())
    return Engine(config, loaded, *parts_of(config, loaded, kernels))


def parts_of(
    config: EngineConfig, loaded: LoadedModel, kernels: KernelChoice | None = None
) -> tuple[Admission, Scheduler, Runner]:
    """What an engine is made of: who may come in, who runs next, and what computes it. As for `engine_of`."""
    use_threads(config.threads)
    limit = loaded.geometry.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, the model was made for at most {limit} positions")
    kernels = kernels or _kernels(config, loaded)  # before a calibration, which takes a minute
    chosen = choose(config, loaded.fingerprint)
    retentions = _retentions(config, chosen, loaded, config.max_model_len or limit)
    pages = _pool_pages(config, loaded, [entry.layout for entry in retentions])
    max_model_len = _fit_model_len(config, retentions[0], pages, config.max_model_len or limit)
    dtype = cache_dtype(config, loaded)
    page_bytes, span_pages = retentions[0].layout.page_bytes(dtype.itemsize), retentions[0].layout.span_pages
    cache = CACHES[config.reclamation](
        [(entry.fingerprint, entry.layout) for entry in retentions],
        total_pages=pages, max_sequences=config.max_num_seqs, prefix_caching=config.enable_prefix_caching,
        host_pages=offload_bytes(config, span_pages * page_bytes) // page_bytes,
    )  # fmt: skip
    fast = loaded.device.type == "cuda" and not config.enforce_eager
    if fast:
        join_projections(loaded.model)
        compile_layers(loaded.model)
    runner = Runner(
        loaded, retentions, pages=pages, cache=cache, kernels=kernels, graphs=fast,
        cache_dtype=dtype, competing=chosen.scope if config.reclamation == "by-input" else None,
        overflow=None if config.overflow_every is None else Overflow(retentions, chosen.scope, config.overflow_every),
    )  # fmt: skip
    if loaded.device.type == "cuda":
        runner.rehearse(config.max_num_seqs, config.max_num_batched_tokens)
    runner.capture(config.max_num_seqs, partial(in_terminal, description="Capturing decode steps"))
    runner.meters.clear()
    admission = Admission(retentions, pages, str(dtype).removeprefix("torch."), dtype.itemsize, max_model_len)
    announce(config, chosen.scope, loaded, admission, cache.host.total)
    one_at_a_time = [
        number for number, entry in enumerate(retentions)
        if entry.scorer is not None and ("reconstruction" in entry.scorer.needs or config.reclamation != "reserved")
    ]  # fmt: skip
    return admission, Scheduler(config, cache, one_at_a_time=frozenset(one_at_a_time)), runner


def _kernels(config: EngineConfig, loaded: LoadedModel) -> KernelChoice:
    """What the device has, told how to decode."""
    if config.decode_schedule is None:
        return partial(pool_kernels, policy=_decode_policy(config, loaded))
    try:
        schedule = Schedule.parse(config.decode_schedule)
    except ConfigError as error:
        raise ConfigError(f"decode_schedule: {error}") from error
    if "replan" in schedule.flags:
        raise ConfigError(
            f"decode_schedule is {schedule.text!r}: an engine plans when the batch changes, leave out +replan"
        )
    return partial(pool_kernels, schedule=schedule)


def _decode_policy(config: EngineConfig, loaded: LoadedModel) -> Policy | None:
    """The policy asked for, or the one that was kept for this GPU and geometry."""
    shape = loaded.geometry
    fits: dict[str, Any] = {
        "kv_heads": shape.kv_heads, "group": shape.group_size, "head_dim": shape.head_dim,
        "dtype": str(cache_dtype(config, loaded)).removeprefix("torch."),
    }  # fmt: skip
    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else str(loaded.device)
    if config.decode_policy is not None:
        policy = Policy.load(Path(config.decode_policy))
        policy.check(device, fits)
        return policy
    kept = cache_folder() / "policies" / policy_name(device, **fits)
    try:
        return Policy.load(kept) if kept.exists() else None
    except OSError as error:
        _log.warning("the decode policy kept for this GPU cannot be read: %s", error)
        return None


def scorer_spec(scorer: Scorer) -> ScorerSpec:
    """How a profile names `scorer`."""
    return ScorerSpec(scorer.name, scorer.parameters())


def calibrate_model(
    loaded: LoadedModel, scorer: Scorer, scope: Scope, config: EngineConfig, *, retentions: Sequence[float],
    texts: Sequence[str], source: str, observe: Observer | None = None, foretell: bool = False,
) -> list[Profile]:  # fmt: skip
    """One profile of `loaded` for each ρ, from the scores of `texts`; draws a progress bar in a terminal.

    `observe` is handed each text's shares, as in `tangram.calibrate.calibrate`. With `foretell` the log says first how
    long it takes.
    """
    use_threads(config.threads)
    scorer.check_model(loaded.fingerprint)
    samples = [loaded.tokenizer.encode(text)[: loaded.geometry.max_positions] for text in texts]
    scores = score_source(loaded, scorer, chunk_tokens=config.chunk_tokens)
    if foretell:
        foretell_calibration(scores, samples, config.chunk_tokens)
    return calibrate(
        scores, samples, geometry=loaded.geometry,
        fingerprint=loaded.fingerprint, scorer=scorer_spec(scorer), scope=scope, retentions=retentions,
        chunk_tokens=config.chunk_tokens, source=source, page_tokens=config.page_tokens,
        heads_per_page=config.heads_per_page, track=in_terminal, observe=observe,
    )  # fmt: skip


def _retentions(config: EngineConfig, chosen: Choice, loaded: LoadedModel, max_tokens: int) -> list[Retention]:
    """The default ρ first, then 1.0, then those of other profiles the user named; all in pages of one shape."""
    uncompressed = Layout.uncompressed(
        loaded.geometry, chunk_tokens=config.chunk_tokens, page_tokens=config.page_tokens,
        heads_per_page=_page_heads(config, loaded), max_tokens=max_tokens,
    )  # fmt: skip
    # ρ = 1.0 depends on the model alone; its weights' digest stands in for the profile's fingerprint.
    full = Retention(1.0, uncompressed, f"full:{loaded.fingerprint.weights_sha256}:{config.chunk_tokens}")
    if not loaded.geometry.full_layers:
        _log.warning("%s has sliding-window layers only: there is nothing to compress", config.model)
        return [full]
    if config.kv_retention == 1.0 and not config.profile:
        return [full]
    scorer = make_scorer(chosen.scorer, gate=Path(config.gate) if config.gate else None, model=loaded.fingerprint)
    scorer.check_tokens(config.chunk_tokens)
    scorer.check_model(loaded.fingerprint)
    if config.reclamation == "by-input":
        return [
            Retention(config.kv_retention, uncompressed, "by input", scorer, SINK_TOKENS, config.chunk_tokens // 64)
        ]
    named = [_load(path, config, loaded, scorer, chosen.scope) for path in config.profile]
    found = [_retention(config, profile, scorer, loaded, max_tokens) for profile in named]
    defaults = [entry for entry in (*found, full) if entry.kv_retention == config.kv_retention]
    if named and not defaults:
        raise ProfileError(
            f"kv_retention is {config.kv_retention}, the profiles given are for "
            f"{', '.join(str(profile.kv_retention) for profile in named)}: set kv_retention to one of them"
        )
    if not defaults:
        defaults = [_retention(config, _profile(config, loaded, scorer, chosen.scope), scorer, loaded, max_tokens)]
    default = defaults[0]
    return [default, *(entry for entry in (full, *found) if entry is not default)]


def _load(path: str, config: EngineConfig, loaded: LoadedModel, scorer: Scorer, scope: Scope) -> Profile:
    profile = Profile.load(path)
    profile.check_model(loaded.fingerprint)
    profile.check_options(
        scorer=scorer.name, scope=scope, kv_retention=profile.kv_retention, chunk_tokens=config.chunk_tokens,
        parameters=scorer.parameters(),
    )  # fmt: skip
    return profile.with_pages(config.page_tokens, config.heads_per_page)


def _profile(config: EngineConfig, loaded: LoadedModel, scorer: Scorer, scope: Scope) -> Profile:
    """A shipped or kept profile that fits, or a short calibration, which is kept."""
    kept = cache_folder() / "profiles"
    profile = find_profile(
        [shipped_profiles(), kept], loaded.fingerprint, scorer=scorer.name, scope=scope,
        kv_retention=config.kv_retention, chunk_tokens=config.chunk_tokens, parameters=scorer.parameters(),
    )  # fmt: skip
    if profile is not None:
        return profile.with_pages(config.page_tokens, config.heads_per_page)
    _log.warning(
        "no profile for %s with scorer %s, scope %s, kv_retention %s, chunk_tokens %s: calibrating on %d samples now, "
        "once (`tangram calibrate` takes 50 and is more exact)",
        config.model, scorer.name, scope, config.kv_retention, config.chunk_tokens, QUICK_SAMPLES,
    )  # fmt: skip
    check_chunk(config, loaded)
    texts = pilot_texts(QUICK_SAMPLES, min_characters=max(8_000, 6 * config.chunk_tokens))
    profile = calibrate_model(
        loaded, scorer, scope, config, retentions=[config.kv_retention], texts=texts,
        source="built-in pilot texts, quick", foretell=True,
    )[0]  # fmt: skip
    path = kept / f"{loaded.fingerprint.weights_sha256}-{profile.file_name}"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        profile.save(path)
        _log.warning("the profile is kept as %s", path)
    except OSError as error:
        _log.warning("the profile could not be kept: %s", error)
    return profile


def check_chunk(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raise `ConfigError` for chunks that no sequence of the model fills: texts of that length come next."""
    if config.chunk_tokens > loaded.geometry.max_positions:
        raise ConfigError(
            f"chunk_tokens is {config.chunk_tokens}, the model was made for at most "
            f"{loaded.geometry.max_positions} positions: lower chunk_tokens"
        )


def _page_heads(config: EngineConfig, loaded: LoadedModel) -> int:
    """Hp: a monolithic page holds a whole layer's heads; heads that go their own ways have pages of their own."""
    if config.reclamation == "by-input":
        return 1
    return loaded.geometry.kv_heads if config.head_groups == "monolithic" else config.heads_per_page


def _retention(
    config: EngineConfig, profile: Profile, scorer: Scorer, loaded: LoadedModel, max_tokens: int
) -> Retention:  # fmt: skip
    heads, fingerprint = _page_heads(config, loaded), profile.fingerprint()
    groups: Sequence[Sequence[tuple[int, int]]] = profile.groups
    sealed_pages: Sequence[int] = profile.sealed_pages
    if config.head_groups != "clustered":
        groups, sealed_pages = adjacent(groups, sealed_pages, heads)
        fingerprint = f"{config.head_groups}:{fingerprint}"
    layout = Layout.build(
        loaded.geometry, chunk_tokens=profile.chunk_tokens, page_tokens=profile.page_tokens, heads_per_page=heads,
        max_tokens=max_tokens, groups=groups, sealed_pages=sealed_pages,
    )  # fmt: skip
    return Retention(profile.kv_retention, layout, fingerprint, scorer, profile.sink_tokens, profile.window_tokens)


def _pool_pages(config: EngineConfig, loaded: LoadedModel, layouts: Sequence[Layout]) -> int:
    room = kv_bytes(config, loaded, table_bytes(config, layouts))
    return room // layouts[0].page_bytes(cache_dtype(config, loaded).itemsize)


def _fit_model_len(config: EngineConfig, default: Retention, pages: int, wanted: int) -> int:
    """`wanted`, or as many tokens as the pool can hold in one sequence if nobody insists on more."""
    layout = default.layout
    if layout.most_pages(wanted) <= pages:
        return wanted
    fits = max((n for n in range(0, wanted, layout.page_tokens) if layout.most_pages(n) <= pages), default=0)
    if config.max_model_len is not None or fits == 0:
        raise ConfigError(
            f"max_model_len {wanted} needs {layout.most_pages(wanted)} KV pages in one sequence, kv_cache_gib gives "
            f"{pages}, which hold {fits} tokens: raise kv_cache_gib or lower max_model_len"
        )
    _log.warning("max_model_len is lowered from %d to %d: the KV cache holds no more in one sequence", wanted, fits)
    return fits
