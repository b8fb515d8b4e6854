"""Build a running engine from an `EngineConfig`: model, layouts, pool, scheduler, runner."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as dist

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.part_tables import PartTables
from tangram.cache.retention import Retention
from tangram.compress.dealing import check_ranks
from tangram.compress.profile import Profile
from tangram.compress.scorers import Scorer
from tangram.config import EngineConfig, cache_folder
from tangram.engine.admission import Admission
from tangram.engine.derived import DerivedRetentions
from tangram.engine.draft_model import (
    PoolShape,
    check_vocabulary,
    draft_bytes,
    draft_config,
    draft_pages,
    readable_tokens,
)
from tangram.engine.loop import Engine
from tangram.engine.memory import (
    GRAPH_BYTES,
    cache_dtype,
    check_cache_device,
    check_scales,
    explain_exhaustion,
    host_form,
    host_page_bytes,
    kv_bytes,
    offload_bytes,
    table_bytes,
)
from tangram.engine.meters import Meters
from tangram.engine.model_drafts import ModelDrafter
from tangram.engine.option_checks import (
    check_compile_decode,
    check_model_len,
    check_options,
    load_checked,
    name_device,
)
from tangram.engine.passes import Passes
from tangram.engine.profiles import Compression
from tangram.engine.rank_drafts import RankDrafter
from tangram.engine.rank_runner import RankRunner
from tangram.engine.rank_shares import RankShares, share_retentions
from tangram.engine.ranks import Ranks, agree_on_least
from tangram.engine.runner import Runner
from tangram.engine.scheduler import Scheduler
from tangram.engine.self_drafts import SelfDrafter
from tangram.engine.speculation import Speculation, speculate_by_lookup
from tangram.engine.startup import announce, announce_speculation
from tangram.errors import ConfigError, IntegrityError
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import MOST_QUERIES, KernelChoice
from tangram.kernels.threads import use_threads
from tangram.model.compiled import compile_layers
from tangram.model.experts import fix_launches
from tangram.model.few_rows import multiply_few_rows_fast
from tangram.model.fused import join_projections
from tangram.model.load import LoadedModel, load_configured, load_model, resolve_source
from tangram.model.onednn import pack_weights
from tangram.model.overflow import Overflow
from tangram.model.shares import take_share
from tangram.plan.policy import Policy, policy_name
from tangram.progress import show_progress
from tangram.speculative_config import NAME, CompressedKv, DraftModel, Ngram, Suffix

Parts = tuple[Admission, Scheduler, Runner]

_log = logging.getLogger("tangram")


def build_engine(config: EngineConfig, *, records: bool = False) -> Engine:
    """An engine of `config`, ready for `submit`.

    With `records` it notes the kept positions of chunks, for those who `watch` it. Raises the
    errors of `tangram.errors`, which say what to change.
    """
    with explain_exhaustion(config):
        if config.tensor_parallel_size > 1:
            return _build_on_ranks(config)
        return engine_of(config, load_checked(config), records=records)


def _build_on_ranks(config: EngineConfig) -> Engine:
    """Rank 0 of an engine on several devices. Kept positions are not noted: they are on all ranks.

    Which of the ranks has failed is told by the error.
    """
    check_options(config)
    resolve_source(config.model)  # once: ranks would convert a GGUF file side by side
    ranks = Ranks(config)
    try:
        return rank_builder(config).engine(ranks)
    except BaseException as error:
        if (found := ranks.explain(error)) is error:
            raise
        raise found from error


def rank_builder(config: EngineConfig) -> EngineBuilder:
    """The builder of this process's rank; all ranks call it, and build the same parts."""
    return EngineBuilder(config, load_configured(config), rank=dist.get_rank())


def engine_of(
    config: EngineConfig,
    loaded: LoadedModel,
    kernels: KernelChoice | None = None,
    *,
    records: bool = False,
) -> Engine:
    """`build_engine` for a loaded model. `kernels`, if given, chooses the kernels of its pool."""
    return EngineBuilder(config, loaded, kernels, records=records).engine()


@dataclass(frozen=True)
class Served:
    """The `retentions` of an engine, the `scorers` they need by name, and `bases`.

    From these profiles, retentions of other ratios are derived.
    """

    scorers: Mapping[str, Scorer]
    retentions: list[Retention]
    bases: Sequence[Profile] = ()


class EngineBuilder:
    """Builds the parts of an engine of `config`, each in a method of its own.

    Its own config names scorer and scope. Raises the errors of `build_engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        kernels: KernelChoice | None = None,
        *,
        records: bool = False,
        rank: int | None = None,
    ) -> None:
        if rank is None and config.tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.tensor_parallel_size}, but this engine is built "
                "of a loaded model, which lies on one device: set it to 1"
            )
        use_threads(config.threads)
        check_cache_device(config, loaded.device)
        limit = loaded.geometry.max_positions
        check_model_len(config, limit)
        self.loaded = loaded
        self.compression = Compression.of(config, loaded.fingerprint)
        self.config = self.compression.config
        if loaded.device.type == "cuda":
            self.config = limit_drafts(self.config, loaded.geometry.group_size)
        self.most_tokens = config.max_model_len or limit
        self._given_kernels, self._records = kernels, records
        self.drafting = self._load_drafting()
        self._shares: RankShares | None = None
        if rank is not None:
            self._take_share(rank)

    def _take_share(self, rank: int) -> None:
        """Leave the heads of `rank`, which the default retention deals."""
        size, geometry = self.config.tensor_parallel_size, self.loaded.geometry
        if geometry.value_dim is not None:
            raise ConfigError(
                f"tensor_parallel_size is {size}, but {self.config.model} has latent attention, "
                "where all heads of a layer read the same entries: set it to 1"
            )
        check_ranks(geometry.kv_heads, size)
        served = self.find_served()
        shares = share_retentions(served.retentions, geometry, rank, size)
        self._rank_scorers = {
            name: one.of_heads(shares.heads) for name, one in served.scorers.items()
        }
        local = take_share(self.loaded.model, geometry, shares.order, rank, size)
        self.loaded = replace(self.loaded, geometry=local)
        self._shares = shares

    def engine(self, ranks: Ranks | None = None) -> Engine:
        """The engine; on several devices that of rank 0, which leads the other `ranks`."""
        admission, scheduler, runner = self.parts()
        speculation = self.speculation(admission, scheduler.cache, runner)
        announce_speculation(self.config)
        if ranks is not None and isinstance(runner, RankRunner):
            runner.lead(ranks, scheduler.cache)
        return Engine(self.config, self.loaded, admission, scheduler, runner, speculation, ranks)

    def follower(self) -> RankRunner:
        """The runner of a rank that follows rank 0, made of the same parts.

        Raises what the making of an engine does.
        """
        admission, scheduler, runner = self.parts()
        self.speculation(admission, scheduler.cache, runner)
        if not isinstance(runner, RankRunner):
            raise IntegrityError(f"a rank has a {type(runner).__name__}")
        return runner

    def parts(self) -> Parts:
        """Admission, scheduler and runner."""
        config, loaded = self.config, self.loaded
        # Before a calibration, which takes a minute.
        kernels = self._kernels()
        served = self.find_served()
        scorers, retentions = served.scorers, served.retentions
        check_scales(config, retentions)
        default, layouts = retentions[0], [retention.layout for retention in retentions]
        dtype = cache_dtype(config, loaded)
        page_bytes = default.layout.page_bytes(dtype.itemsize)
        pages = self._served_bytes(layouts, page_bytes) // page_bytes
        max_model_len = _fit_model_len(config, default, pages, self.most_tokens)
        host_bytes = host_page_bytes(config, loaded, default.layout)
        span_bytes = default.layout.span_pages * host_bytes
        cache = self.cache(retentions, pages, offload_bytes(config, span_bytes) // host_bytes)
        runner = self._ready_runner(
            retentions,
            scorers,
            cache=cache,
            pages=pages,
            kernels=kernels,
            cache_dtype=dtype,
            form=host_form(config),
        )
        admission = Admission(
            retentions,
            pages,
            str(dtype).removeprefix("torch."),
            dtype.itemsize,
            max_model_len,
            host_bytes,
            speculates=config.speculation is not None,
            sampling=loaded.defaults.sampling,
            derived=DerivedRetentions(
                served.bases, page_tokens=config.page_tokens, heads_per_page=config.heads_per_page
            )
            if served.bases
            else None,
        )
        announce(config, loaded, admission, cache.host.total)
        return admission, Scheduler(config, cache, passes_apart=runner.passes_apart), runner

    def speculation(
        self, admission: Admission, cache: CacheManager, runner: Runner
    ) -> Speculation | None:
        """What drafts, if the config says how."""
        match self.config.speculation:
            case Ngram() | Suffix() as lookup:
                return speculate_by_lookup(lookup)
            case CompressedKv() as own:
                drafter = self._self_drafter(admission.retentions, cache, runner)
                return Speculation(own, drafter=drafter)
            case DraftModel() as other:
                model = self._model_drafter(other, admission, runner)
                return None if model is None else Speculation(other, drafter=model)
            case _:
                return None

    def _load_drafting(self) -> EngineBuilder | None:
        """The builder of a second model that drafts, if the config names one.

        Raises `ConfigError` if its tokens are others.
        """
        config, drafts = self.config, self.config.speculation
        if not isinstance(drafts, DraftModel):
            return None
        other = load_model(
            drafts.model,
            dtype=config.dtype,
            device=self.loaded.device.type,
            load_format=config.load_format,
            quantization=config.quantization,
        )
        check_vocabulary(
            self.loaded.name,
            self.loaded.tokenizer.get_vocab(),
            other.name,
            other.tokenizer.get_vocab(),
        )
        tokens = readable_tokens(other, self.loaded.name, self.most_tokens)
        return EngineBuilder(draft_config(config, drafts, tokens), other, self._given_kernels)

    def _served_bytes(self, layouts: Sequence[Layout], page_bytes: int) -> int:
        """Bytes of the served model's KV pages."""
        config, drafts, tables = (
            self.config,
            self.config.speculation,
            table_bytes(self.config, layouts),
        )
        if self._shares is not None:  # the fullest device decides
            return agree_on_least(kv_bytes(config, self.loaded, tables), self.loaded.device)
        if self.drafting is None or not isinstance(drafts, DraftModel):
            return kv_bytes(config, self.loaded, tables)
        shape = self.drafting.uncompressed_pool(self.most_tokens)
        beside = table_bytes(self.drafting.config, [shape.layout]) + GRAPH_BYTES
        total = kv_bytes(config, self.loaded, tables + beside)
        served = PoolShape(layouts[0], page_bytes, self.most_tokens)
        return total - draft_bytes(total, drafts, served, shape)

    def uncompressed_pool(self, length_tokens: int) -> PoolShape:
        """The pages of a model that keeps everything, for sequences of `length_tokens`."""
        layout = self.lay_out_uncompressed()
        page_bytes = layout.page_bytes(cache_dtype(self.config, self.loaded).itemsize)
        return PoolShape(layout, page_bytes, length_tokens)

    def _model_drafter(
        self, drafts: DraftModel, admission: Admission, runner: Runner
    ) -> ModelDrafter | None:
        """The drafter of draft_model, which shares the meters of `runner`."""
        if self.drafting is None:
            return None
        retentions = self.drafting.find_served().retentions
        layout, length = admission.retentions[0].layout, self.most_tokens
        served = PoolShape(layout, layout.page_bytes(admission.element_bytes), length)
        shape = self.drafting.uncompressed_pool(length)
        pages = draft_pages(drafts, admission.total_pages, served, shape)
        cache = self.drafting.cache(retentions, pages, 0)
        _log.info(
            "%s drafts for %s: %s tokens of it fit in %d pages",
            drafts.model,
            self.config.model,
            f"{retentions[0].layout.tokens_in(pages, admission.max_model_len):,}",
            pages,
        )
        return ModelDrafter(
            self.drafting.draft_runner(retentions, cache, pages, runner.meters),
            cache,
            retentions[0],
            most_tokens=self.config.max_num_batched_tokens,
            vocabulary=self.loaded.geometry.vocab_size,
        )

    def draft_runner(
        self, retentions: Sequence[Retention], cache: CacheManager, pages: int, meters: Meters
    ) -> Runner:
        """The runner of a model that drafts for another one, whose `meters` count its work too."""
        return self._ready_runner(
            retentions,
            {},
            cache=cache,
            pages=pages,
            kernels=self._kernels(),
            cache_dtype=cache_dtype(self.config, self.loaded),
            meters=meters,
        )

    def _self_drafter(
        self, retentions: Sequence[Retention], cache: CacheManager, runner: Runner
    ) -> SelfDrafter:
        """The drafter of compressed_kv."""
        drafts = [entry.draft for entry in retentions if entry.draft is not None]
        if not drafts or cache.drafts is None:
            raise IntegrityError("compressed_kv has no retention with a draft")
        passes = runner.draft_passes(drafts[0], cache.drafts, self._kernels())
        self._prepare_decode(passes, self.config.max_num_seqs, "Capturing draft steps")
        runner.meters.clear()
        if not isinstance(runner, RankRunner):
            return SelfDrafter(passes, cache.drafts)
        if passes.graphs is not None:
            passes.graphs.run_first()
        return RankDrafter(passes, cache.drafts, runner)

    def find_served(self) -> Served:
        """The ways to keep entries that are served: the default, ρ = 1.0, then others.

        Of these, those of the default scorer come first. All have pages of one shape. Raises
        `ConfigError` if the model has no entries to choose among and an option asks for it, and
        `ProfileError` if a profile does not fit or cannot be made.
        """
        if self._shares is not None:
            return Served(self._rank_scorers, list(self._shares.common))
        config, drafts = self.config, self.config.speculation
        full = Retention(1.0, self.lay_out_uncompressed(), self._full_fingerprint())
        if not self.loaded.geometry.full_layers:
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
        if (
            config.kv_retention == 1.0
            and not config.profile
            and not isinstance(drafts, CompressedKv)
        ):
            return Served({}, [full])
        compression, own = self.compression, (config.kv_retention, config.scorer)
        scorers = compression.make_scorers(self.loaded.fingerprint)
        profiles, bases = compression.find_served_profiles(self.loaded, scorers)
        if isinstance(drafts, CompressedKv):
            bases = []  # every entry is kept
            profile = compression.find_draft_profile(self.loaded, scorers)
            full = self.lossless(profile, scorers[profile.scorer.name])
        found = [self.retention(profile, scorers[profile.scorer.name]) for profile in profiles]
        found.sort(key=lambda entry: entry.scorer != config.scorer)
        defaults = [entry for entry in found if (entry.kv_retention, entry.scorer) == own]
        default = defaults[0] if defaults else full
        others = [entry for entry in (full, *found) if entry is not default]
        return Served(scorers, [default, *others], bases)

    def lossless(self, profile: Profile, scorer: Scorer) -> Retention:
        """ρ = 1.0 in chunks that begin with what `profile` keeps, which drafts read."""
        draft = self.retention(profile, scorer)
        layout = draft.layout
        pages = [layout.chunk_pages] * layout.full_groups
        whole = self.make_retention(
            profile,
            scorer,
            layout.groups[: layout.full_groups],
            pages,
            f"{self._full_fingerprint()}:{draft.fingerprint}",
        )
        return replace(whole, kv_retention=1.0, draft=draft)

    def _full_fingerprint(self) -> str:
        """ρ = 1.0 depends on the model alone: its weights replace the profile's fingerprint."""
        return f"full:{self.loaded.weights_digest}:{self.config.chunk_tokens}"

    def lay_out_uncompressed(self) -> Layout:
        """The layout if no entry is dropped."""
        return Layout.lay_out_uncompressed(
            self.loaded.geometry,
            chunk_tokens=self.config.chunk_tokens,
            page_tokens=self.config.page_tokens,
            heads_per_page=self.page_heads,
            max_tokens=self.most_tokens,
        )

    def retention(self, profile: Profile, scorer: Scorer) -> Retention:
        """The retention of `profile`."""
        return self.make_retention(
            profile, scorer, profile.groups, profile.sealed_pages, profile.fingerprint()
        )

    def make_retention(
        self,
        profile: Profile,
        scorer: Scorer,
        groups: Sequence[Sequence[tuple[int, int]]],
        sealed_pages: Sequence[int],
        fingerprint: str,
    ) -> Retention:
        """The retention of `profile`, with the heads of each of `groups` in one page table."""
        layout = Layout.build(
            self.loaded.geometry,
            chunk_tokens=profile.chunk_tokens,
            page_tokens=profile.page_tokens,
            heads_per_page=self.page_heads,
            max_tokens=self.most_tokens,
            groups=groups,
            sealed_pages=sealed_pages,
        )
        return Retention(
            profile.kv_retention,
            layout,
            fingerprint,
            scorer=scorer.name,
            sink_tokens=profile.sink_tokens,
            window_tokens=profile.window_tokens,
            scales=profile.scales,
            one_chunk_a_step="reconstruction" in scorer.needs,
        )

    @property
    def page_heads(self) -> int:
        """Hp, the KV heads that share a page."""
        return self.config.heads_per_page

    @property
    def cache_type(self) -> type[CacheManager]:
        """The class of the cache manager."""
        return CacheManager

    def cache(self, retentions: Sequence[Retention], pages: int, host_pages: int) -> CacheManager:
        """The cache manager of `pages` pages and of `host_pages` behind them."""
        return self.cache_type(
            retentions,
            total_pages=pages,
            max_sequences=self.config.max_num_seqs,
            prefix_caching=self.config.enable_prefix_caching,
            host_pages=host_pages,
            rounds_chunks=host_form(self.config) is not None,
        )

    def runner(
        self,
        retentions: Sequence[Retention],
        scorers: Mapping[str, Scorer],
        *,
        cache: CacheManager,
        **options: Any,
    ) -> Runner:
        """The runner, which computes steps; `options` are those of `Runner`."""
        if self._shares is not None:
            own = self._shares.own
            parts = {common: mine.layout for common, mine in own.items()}
            tables = PartTables(parts, self.config.max_num_seqs)
            return RankRunner(self.loaded, scorers, shares=own, cache=tables, **options)
        return Runner(self.loaded, retentions, scorers, cache=cache, **options)

    def _kernels(self) -> KernelChoice:
        return self._given_kernels or self.kernels()

    def kernels(self) -> KernelChoice:
        """The kernels of the device, with the decode policy."""
        return partial(pool_kernels, policy=self._decode_policy())

    def _ready_runner(
        self,
        retentions: Sequence[Retention],
        scorers: Mapping[str, Scorer],
        *,
        cache: CacheManager,
        **options: Any,
    ) -> Runner:
        """A runner with compiled kernels and captured graphs."""
        config, loaded = self.config, self.loaded
        fast = loaded.device.type == "cuda" and not config.enforce_eager
        if fast or loaded.device.type == "cpu":
            join_projections(loaded.model)
        if fast:
            fix_launches(loaded.model)
            compile_layers(loaded.model)
        if loaded.device.type == "cpu":
            multiply_few_rows_fast(loaded.model, config.chunk_tokens)
            pack_weights(loaded.model)
        if config.compile_decode:
            self._compile_decode()
        drafts = config.speculation
        most_drafted = 0 if drafts is None else drafts.num_speculative_tokens
        every, scopes = config.overflow_every, self.compression.scopes
        overflow = None if every is None else Overflow(retentions, scopes, every)
        runner = self.runner(
            retentions,
            scorers,
            cache=cache,
            host_pages=cache.host.total,
            graphs=fast,
            overflow=overflow,
            queries=query_counts(most_drafted),
            records=config.max_num_batched_tokens // config.chunk_tokens if self._records else 0,
            **options,
        )
        if loaded.device.type == "cuda":
            runner.rehearse(config.max_num_batched_tokens)
        runner.passes.capture_prefill()
        if self._shares is not None and runner.passes.graphs is not None:
            # From here on: a rank may pack the rows of a pass, and need another graph, alone.
            runner.passes.graphs.run_first()
        self._prepare_decode(runner.passes, config.max_num_seqs, "Capturing decode steps")
        if most_drafted:
            rows = min(config.max_num_seqs * (most_drafted + 1), config.max_num_batched_tokens)
            track = partial(show_progress, description="Capturing steps with drafts")
            for queries in runner.passes.batcher.queries[1:]:
                runner.passes.capture(min(rows, config.max_num_seqs * queries), track, queries)
        runner.meters.clear()
        if runner.recorder is not None:
            runner.recorder.clear()
        return runner

    def _compile_decode(self) -> None:
        """Compile the layers for decode passes of one token, of a few and of the most."""
        check_compile_decode(self.loaded.device)
        from tangram.model.compiled_decode import check_compilable, compile_decode, rehearse_decode

        model, drafts = self.loaded.model, self.config.speculation
        check_compilable(model)
        compile_decode(model)
        most = self.config.max_num_seqs * (
            1 if drafts is None else drafts.num_speculative_tokens + 1
        )
        sizes = sorted({1, 2, max(2, min(most, self.config.max_num_batched_tokens))})
        track = partial(show_progress, description="Compiling decode steps")
        rehearse_decode(model, track(sizes))

    def _prepare_decode(self, passes: Passes, rows: int, description: str) -> None:
        """Compile the kernels of decode passes of up to `rows` rows, and capture their graphs."""
        if self.loaded.device.type == "cuda":
            passes.rehearse_decode(rows)
        passes.capture(rows, partial(show_progress, description=description))

    def _decode_policy(self) -> Policy | None:
        """The configured policy, or the one that was kept for this GPU and geometry."""
        config, loaded, shape = self.config, self.loaded, self.loaded.geometry
        fits: dict[str, Any] = {
            "kv_heads": shape.kv_heads,
            "group": shape.group_size,
            "head_dim": shape.head_dim,
            "dtype": str(cache_dtype(config, loaded)).removeprefix("torch."),
        }
        device = name_device(loaded.device)
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


def limit_drafts(config: EngineConfig, group: int) -> EngineConfig:
    """`config` with no more drafts than a GPU verifies in one task, at `group` heads a KV head.

    Raises `ConfigError` if it verifies none.
    """
    drafts, most = config.speculation, MOST_QUERIES // group - 1
    if drafts is None or drafts.num_speculative_tokens <= most:
        return config
    if most < 1:
        raise ConfigError(
            f"{NAME}.num_speculative_tokens is {drafts.num_speculative_tokens}: a GPU verifies at "
            f"most {MOST_QUERIES} queries of a KV head at a time, and here one token has {group}: "
            f"leave {NAME} out"
        )
    _log.warning(
        "%s.num_speculative_tokens is lowered from %d to %d: with %d query heads of a KV head a "
        "GPU verifies no more at a time",
        NAME,
        drafts.num_speculative_tokens,
        most,
        group,
    )
    values = {field.name: getattr(drafts, field.name) for field in fields(drafts)}
    given = {name: value for name, value in values.items() if value is not None}
    lowered = {"method": drafts.method, **given, "num_speculative_tokens": most}
    return replace(config, speculative_config=lowered)


def query_counts(most_drafted: int) -> tuple[int, ...]:
    """The numbers of tokens of a decode row that kernels are prepared for.

    They are 1, the largest power of two up to `most_drafted + 1`, half of it, and that many.
    """
    most = most_drafted + 1
    largest = 1 << (most.bit_length() - 1)  # a power of two fills the tiles of the kernels
    return tuple(sorted({1, max(1, largest // 2), largest, most}))


def _fit_model_len(config: EngineConfig, default: Retention, pages: int, wanted: int) -> int:
    """`wanted`, or if no limit is configured, the most tokens of one sequence in the pool."""
    layout = default.layout
    if layout.most_pages(wanted) <= pages:
        return wanted
    fits = max(
        (n for n in range(0, wanted, layout.page_tokens) if layout.most_pages(n) <= pages),
        default=0,
    )
    if config.max_model_len is not None or fits == 0:
        raise ConfigError(
            f"max_model_len {wanted} needs {layout.most_pages(wanted)} KV pages in one sequence, "
            f"kv_cache_gib gives {pages}, which hold {fits} tokens: raise kv_cache_gib or lower "
            "max_model_len"
        )
    _log.warning(
        "max_model_len is lowered from %d to %d: the KV cache holds no more in one sequence",
        wanted,
        fits,
    )
    return fits
