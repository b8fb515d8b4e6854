"""The contribution of each part: engines that differ in one part, under the same load.

The rungs are those of the Tangram paper, in its order; each adds one part to the one before. All
heads keep their budgets of the clustered profile. On the coarser rungs a head gets the pages of the
largest head in its page table. Finer groups remove this fragmentation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tangram.cache.layout import Layout
from tangram.compress.groups import compute_realised_retention
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.memory import GIB, kv_bytes
from tangram.engine.setup.option_checks import load_checked
from tangram.engine.setup.profiles import Compression
from tangram.errors import ConfigError
from tangram_lab.baselines.compared_engines import Baseline
from tangram_lab.load.asks import Ask, alike, arriving
from tangram_lab.load.clock import LatencyLimits, Summary, answer_all
from tangram_lab.load.parts import FORWARD, HOW, UPKEEP, PartClock, Split


@dataclass(frozen=True)
class Rung:
    """One engine of the comparison.

    `name` stands in options and files. `changes` are the fields of the config that differ,
    `baseline` is what else does.
    """

    name: str
    title: str
    baseline: Baseline = field(default_factory=Baseline)
    changes: dict[str, Any] = field(default_factory=dict)


RUNGS = (
    Rung(
        "full-kv",
        "full KV",
        Baseline("monolithic", "uniform"),
        {"kv_retention": 1.0, "profile": ()},
    ),
    Rung("reservation", "+ reservation", Baseline("monolithic", "uniform")),
    Rung("ragged-paging", "+ ragged paging", Baseline("adjacent", "uniform")),
    Rung("clustering", "+ clustering", Baseline("clustered", "uniform")),
    Rung("aot", "+ AOT", Baseline("clustered", "aot")),
    Rung("served", "as served"),
)


def choose_rungs(names: str) -> list[Rung]:
    """The rungs of the comma-separated `names`, in the order of `RUNGS`.

    Raises `ConfigError` naming an unknown one.
    """
    wanted, known = [name.strip() for name in names.split(",")], {rung.name for rung in RUNGS}
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"rungs has {unknown[0]!r}, known are {', '.join(rung.name for rung in RUNGS)}"
        )
    return [rung for rung in RUNGS if rung.name in wanted]


def check_comparable(config: EngineConfig) -> None:
    """Raise `ConfigError` for a config without compression."""
    if config.kv_retention == 1.0:
        raise ConfigError(
            "kv_retention is 1.0, an ablation needs less: it compares with 1.0 by itself"
        )


def for_each(
    config: EngineConfig, rungs: Sequence[Rung], measure: Callable[[Rung, Engine], None]
) -> None:
    """`measure` the engine of each rung in turn, with one model and equal bytes of KV pages.

    `config` has passed `check_comparable`. Engines are warmed up. Each is freed before the next is
    built, so `measure` must not keep it.
    """
    loaded = load_checked(config)
    # Set here, since a rung may leave out the profiles that define them.
    config = Compression.of(config, loaded.fingerprint).config
    config = replace(config, kv_cache_gib=kv_bytes(config, loaded) / GIB)
    for rung in rungs:
        measure(rung, _warm(rung.baseline.engine(replace(config, **rung.changes), loaded)))
        gc.collect()
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()


def _warm(engine: Engine) -> Engine:
    """The engine after several chunks and a decode in every batch width.

    Kernels are compiled then, and graphs captured.
    """
    config, vocabulary = engine.config, engine.geometry.vocab_size
    longest = min(engine.max_model_len - 8, 2 * config.chunk_tokens + 8)
    answer_all(engine, alike(2, longest, 4, shared_tokens=0, vocab_size=vocabulary))
    # Answers end one after the other.
    short = alike(
        min(config.max_num_seqs, engine.max_model_len - 10),
        8,
        2,
        shared_tokens=0,
        vocab_size=vocabulary,
    )
    answer_all(engine, [replace(ask, output_tokens=2 + number) for number, ask in enumerate(short)])
    engine.clear_cache()
    return engine


def footprint(layout: Layout) -> float:
    """The share of a chunk's KV entries that its sealed pages hold, over compressed layers."""
    geometry = layout.geometry
    return compute_realised_retention(
        layout.sealed_pages[: layout.full_groups].tolist(),
        len(geometry.full_layers) * geometry.kv_heads,
        chunk_tokens=layout.chunk_tokens,
        page_tokens=layout.page_tokens,
        heads_per_page=layout.heads_per_page,
    )


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of each part: of prefill for 1,000 prompt tokens, of decode for one step.

    `host_ms` is the host's time for the same, waiting included. `upkeep` is the share of scoring,
    sealing, scheduling, reservation and tables. `outside` is the share of all but the forward
    pass; on a GPU it includes waiting for the host.
    """

    ms: dict[str, float]
    host_ms: dict[str, float]
    upkeep: float
    outside: float
    steps: int
    sealed_chunks: int
    how: str

    @classmethod
    def of(cls, split: Split, per: float, sealed_chunks: int, device: torch.device) -> Breakdown:
        """`split` divided by `per`."""
        ms, host_ms = (
            {part: value * 1e3 / per for part, value in times.items()}
            for times in (split.seconds, split.host_s)
        )
        upkeep, outside = split.share(*UPKEEP), 1.0 - split.share(*FORWARD)
        return cls(ms, host_ms, upkeep, outside, split.steps, sealed_chunks, HOW[device.type])


def breakdowns(engine: Engine, asks: Sequence[Ask]) -> dict[str, Breakdown]:
    """The time of each part in prefill and decode of `asks`, all at once.

    Prefill is a run for one token each. Decode is the rest of another run, once every request has
    its first token. Raises `ConfigError` if they cannot all decode side by side, since engines
    would be compared at other batch sizes.
    """
    lengths = [len(ask.tokens) + ask.output_tokens for ask in asks]
    # With sliding windows the shortest take the most pages for a token.
    needed, fit = (sum(lengths), engine.layout.tokens_in(engine.stats().pages_total, min(lengths)))
    if needed > fit or len(asks) > engine.config.max_num_seqs:
        raise ConfigError(
            f"batch is {len(asks)}, which needs {needed:,} tokens in the cache and max_num_seqs of "
            f"as many, but at kv_retention {engine.config.kv_retention:g} only {fit:,} fit, and "
            f"max_num_seqs is {engine.config.max_num_seqs}: make the batch smaller, or "
            "kv_cache_gib or max_num_seqs larger"
        )
    if engine.device.type == "cuda":
        # Larger plans need new graphs. This run captures them, with answers of full length that end
        # one by one.
        few = [max(2, ask.output_tokens - number) for number, ask in enumerate(asks)]
        answer_all(
            engine,
            [replace(ask, output_tokens=tokens) for ask, tokens in zip(asks, few, strict=True)],
        )
    clock = PartClock(engine.device)
    with clock.watching():
        prefill = _measure(
            engine, [replace(ask, output_tokens=1) for ask in asks], clock, decode=False
        )
        decode = _measure(engine, asks, clock, decode=True)
    return {"prefill": prefill, "decode": decode}


def _measure(engine: Engine, asks: Sequence[Ask], clock: PartClock, *, decode: bool) -> Breakdown:
    engine.clear_cache()
    sealed = engine.stats().sealed_chunks

    def start_decode() -> None:
        nonlocal sealed
        if decode:
            sealed = engine.stats().sealed_chunks
            clock.reset()

    clock.reset()
    answer_all(engine, asks, started=start_decode)
    split = clock.split()
    per = max(split.steps, 1) if decode else sum(len(ask.tokens) for ask in asks) / 1000
    return Breakdown.of(split, per, engine.stats().sealed_chunks - sealed, engine.device)


def at_rate(
    engine: Engine, asks: Sequence[Ask], rate: float, limits: LatencyLimits
) -> dict[str, Any]:
    """Figures of `asks` at `rate` requests a second, starting with an empty cache."""
    engine.clear_cache()
    before = engine.stats().preemptions
    summary = Summary.of(answer_all(engine, arriving(asks, rate)), limits)
    return asdict(summary) | {"preemptions": engine.stats().preemptions - before}


def describe(rung: Rung, engine: Engine) -> dict[str, Any]:
    """The settings of the rung, and its capacity."""
    layout, stats = engine.layout, engine.stats()
    return {
        "title": rung.title,
        "changes": asdict(rung.baseline) | rung.changes,
        "footprint": footprint(layout),
        "heads_per_page": layout.heads_per_page,
        "groups": len(layout.groups),
        "pages_of_a_chunk": layout.span_pages,
        "pages": stats.pages_total,
        "capacity_tokens": stats.capacity_tokens,
        "max_model_len": engine.max_model_len,
        "kv_cache_gib": engine.config.kv_cache_gib,
    }
