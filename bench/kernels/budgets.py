"""Ragged caches of profiles: heads of many lengths, in pages that mix heads of any layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tangram.calibrate.published_budgets import import_published
from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.compress.provenance import ScorerSpec
from tangram.config import Scope
from tangram.engine.passes.batcher import GROWTH_TOKENS
from tangram.errors import ConfigError
from tangram.plan.form import DecodeRows
from tangram.types import Int64
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, scatter_pages

SHIPPED = (
    "llama-3.1-8b-instruct.keydiff.model.c2048.r0.25",
    "llama-3.1-8b-instruct.expected_attention.layer.c2048.r0.25",
    "qwen3-4b-instruct-2507.keydiff.layer.c2048.r0.25",
    "qwen3-4b-instruct-2507.expected_attention.model.c2048.r0.25",
)
PLAN_AGE = 256  # tokens that every row has decoded since it was planned


def load(
    name: str, published: Path | None, *, page_tokens: int | None, heads_per_page: int | None
) -> Profile:
    """A profile by its stem, MODEL.SCORER.SCOPE.cC.rRHO: shipped, or of published budgets.

    Page shape None is the profile's own. Raises `ProfileError`, or `ConfigError` if ρ cannot be
    met.
    """
    profile = (
        _import_profile(name, published)
        if published
        else Profile.load(find_shipped_profiles() / f"{name}.json")
    )
    if page_tokens is None and heads_per_page is None:
        return profile
    return profile.with_pages(
        page_tokens or profile.page_tokens, heads_per_page or profile.heads_per_page
    )


def _import_profile(name: str, published: Path) -> Profile:
    stem, _, retention = name.rpartition(".r")
    model, scorer, scope_name, chunk = stem.rsplit(".", 3)
    scopes: dict[str, Scope] = {"layer": "layer", "model": "model"}
    if scope_name not in scopes:
        raise ConfigError(f"profile is {name!r}, it must read MODEL.SCORER.SCOPE.cC.rRHO")
    return import_published(
        published,
        model,
        ScorerSpec(scorer),
        scopes[scope_name],
        float(retention),
        chunk_tokens=int(chunk[1:]),
    )


def choose_layers(profile: Profile, count: int) -> list[int]:
    """`count` of the profile's layers, spread evenly: enough for a mean time, with less memory."""
    index = (
        np.linspace(0, len(profile.layers) - 1, min(count, len(profile.layers))).round().astype(int)
    )
    return [profile.layers[i] for i in index]


def _states(profile: Profile, context_tokens: int, batch: int) -> tuple[Int64, Int64]:
    """Sealed chunks and raw tokens of each row at about `context_tokens`.

    Raw tails are spread evenly over a chunk.
    """
    chunk = profile.chunk_tokens
    raw = (2 * np.arange(batch) + 1) * chunk // (2 * batch)
    return np.maximum(0, np.rint((context_tokens - raw) / chunk)).astype(np.int64), raw


def make_ragged_case(
    profile: Profile, context_tokens: int, batch: int, layers: Sequence[int], seed: int, name: str
) -> Case:
    """The given layers of a batch. Only groups with a head in them get pages.

    The columns of other heads in these pages are not read.
    """
    wanted = {layer: index for index, layer in enumerate(layers)}
    groups = [
        group
        for group, heads in enumerate(profile.groups)
        if any(layer in wanted for layer, _ in heads)
    ]
    sealed, raw = _states(profile, context_tokens, batch)
    kept = (
        np.array([profile.sealed_pages[group] for group in groups], np.int64) * profile.page_tokens
    )
    lengths = sealed[:, None] * kept + raw[:, None]
    ids, total, offset = _tables(lengths, profile.page_tokens, seed)
    geometry = _geometry(profile)
    member, column = (np.zeros((len(layers), geometry.kv_heads), np.int64) for _ in range(2))
    for index, group in enumerate(groups):
        for place, (layer, head) in enumerate(profile.groups[group]):
            if layer in wanted:
                member[wanted[layer], head], column[wanted[layer], head] = index, place
    planned = np.maximum(raw - PLAN_AGE, 1) + GROWTH_TOKENS
    expected = sealed[:, None] * kept + planned[:, None]
    index_of = np.arange(batch)[:, None, None] * len(groups) + member
    rows = DecodeRows.of(
        offset.ravel()[index_of],
        np.ascontiguousarray(np.broadcast_to(column, index_of.shape)),
        index_of,
        expected[:, member].astype(np.float64),
        (None,) * len(layers),
        profile.page_tokens,
    )
    return Case(name, geometry, rows, ids, lengths.ravel().astype(np.int32), total)


def even_case(ragged: Case, seed: int, name: str) -> Case:
    """As many entries, spread evenly over each row's heads and layers: a perfect balance."""
    geometry, (batch, layers, heads) = ragged.geometry, ragged.shape
    runs = heads // geometry.heads_per_page
    mean = np.rint(ragged.cell_lengths.mean(axis=(1, 2))).astype(np.int64)
    ids, total, offset = _tables(
        np.repeat(mean, layers * runs)[:, None], geometry.page_tokens, seed
    )
    table = np.repeat(offset.reshape(batch, layers, runs), geometry.heads_per_page, axis=2)
    shape = table.shape
    rows = DecodeRows.of(
        table,
        np.ascontiguousarray(np.broadcast_to(np.arange(heads) % geometry.heads_per_page, shape)),
        np.ascontiguousarray(np.broadcast_to(np.arange(batch)[:, None, None], shape)),
        mean[:, None, None] * np.ones(shape),
        (None,) * layers,
        geometry.page_tokens,
    )
    return Case(name, geometry, rows, ids, mean.astype(np.int32), total)


def _geometry(profile: Profile) -> BatchGeometry:
    model = profile.model
    return BatchGeometry(
        model.kv_heads,
        model.query_heads // model.kv_heads,
        model.head_dim,
        profile.page_tokens,
        profile.heads_per_page,
    )


def _tables(lengths: Int64, page_tokens: int, seed: int) -> tuple[np.ndarray, int, Int64]:
    """Page ids for tables of these lengths (any shape), the pool's size, each table's offset."""
    pages = -(-lengths.ravel() // page_tokens)
    ids, total = scatter_pages(int(pages.sum()), seed)
    return ids, total, (np.cumsum(pages) - pages).reshape(lengths.shape)
