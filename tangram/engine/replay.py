"""Replay a failed pass on the reference kernels: what is unsound, and in which layer first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.config import EngineConfig
from tangram.engine.passes.forward_pass import Pass
from tangram.engine.passes.passes import carry_nothing
from tangram.engine.passes.runner import Runner
from tangram.engine.passes.saved_pass import SavedPass
from tangram.engine.setup.blueprint import for_one_device
from tangram.engine.setup.build import build_parts
from tangram.errors import ConfigError
from tangram.kernels.interface import AttentionRule, Expansion, KvPool, PassAddresses
from tangram.kernels.reference_kernels import ReferenceKernels, ReferenceLaunch
from tangram.model.load import LoadedModel
from tangram.speculative_config import CompressedKv


@dataclass(frozen=True)
class ReplayedRow:
    """A row with its `kind`, and the token behind it; None if its logits are NaN."""

    request_id: str
    kind: str
    start: int
    tokens: int
    next_token: int | None


@dataclass(frozen=True)
class Replay:
    """What the reference computes of a saved pass: its `rows` that sample, and unsound layers.

    `unsound` says for the first layer with numbers that are not finite which these are.
    """

    rows: list[ReplayedRow]
    unsound: str | None


class WatchedKernels(ReferenceKernels):
    """`ReferenceKernels` that note in `found` the first numbers that are not finite."""

    def __init__(self, found: list[str], pool: KvPool) -> None:
        super().__init__(pool)
        self._found = found

    def launch(self, addresses: PassAddresses, tables: Tensor) -> WatchedLaunch:
        """See `PoolKernels`."""
        return WatchedLaunch(self.pool, addresses, tables, self._found)


@dataclass(frozen=True, eq=False)
class WatchedLaunch(ReferenceLaunch):
    """A launch of `WatchedKernels`."""

    found: list[str]

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule
    ) -> None:
        """See `Launch`."""
        self._note(layer, "queries, keys or values", q, k, v)
        super().decode(layer, q, k, v, out, rule)

    def prefill(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        rule: AttentionRule,
        expansion: Expansion | None,
    ) -> Tensor:
        """See `Launch`."""
        self._note(layer, "queries, keys or values", q, k, v)
        attended = super().prefill(layer, q, k, v, out, rule, expansion)
        self._note(layer, "attention, which reads entries of the past", attended)
        return attended

    def _note(self, layer: int, what: str, *tensors: Tensor) -> None:
        if not self.found and not all(bool(x.isfinite().all()) for x in tensors):
            self.found.append(f"layer {layer}: {what}")


def replay_config(saved: SavedPass, **changes: Any) -> EngineConfig:
    """The config of an engine that has room for `saved`, with `changes`.

    Drafts are verified as other tokens are, so nothing drafts in it, but for compressed_kv, whose
    retentions it has.
    """
    config = saved.config
    drafts = config.speculation
    return replace(
        config,
        kv_offload_gib=0.0,
        kv_offload_dtype="auto",
        kv_disk_path=None,
        kv_disk_gib=0.0,
        compile_decode=False,
        save_failed_passes=None,
        speculative_config=config.speculative_config if isinstance(drafts, CompressedKv) else None,
        **changes,
    )


@torch.inference_mode()
def replay(saved: SavedPass, config: EngineConfig, loaded: LoadedModel) -> Replay:
    """Compute `saved` by the reference kernels, in an engine of `config` and `loaded`.

    Raises `ConfigError` if the pass is that of another model or config.
    """
    unsound = list[str]()
    parts = build_parts(for_one_device(config, loaded), partial(WatchedKernels, unsound))
    runner, cache = parts.runner, parts.scheduler.cache
    retentions = runner.passes.batcher.retentions
    _check_numbers(saved, len(retentions), len(cache.tables), retentions[0].layout.max_tokens)
    _fit(saved, runner, cache.tables, cache.lengths)
    work = saved.for_engine(retentions)
    try:
        logits = runner.passes.begin(work, carry_nothing).logits()
    except IndexError as error:
        raise ConfigError(
            f"the pass names what is not there ({error}): give another file"
        ) from error
    return Replay(list(_name_rows(saved, work, logits)), unsound[0] if unsound else None)


def _check_numbers(saved: SavedPass, retentions: int, slots: int, most_tokens: int) -> None:
    """Raise `ConfigError` for a number that leads out of arrays which nothing else guards."""
    decode = saved.work.addresses.decode
    limits: dict[str, tuple[Any, int]] = {
        "slots": (saved.slots, slots),
        "tables": (saved.tables, len(saved.pages)),
        "lengths": (saved.work.addresses.lengths, most_tokens + 1),
        "retention": ([row.retention for row in saved.rows], retentions),
    }
    if decode is not None:
        places = decode.plan.tasks["length_index"]
        limits["length_index"] = places, saved.work.addresses.lengths.size
    for name, (numbers, limit) in limits.items():
        found = np.asarray(numbers)
        if len(strange := found[(found < 0) | (found >= limit)]):
            raise ConfigError(
                f"{name} of the pass has {strange[0]}, it must lie in [0, {limit - 1}]: give the "
                "model and the config that failed, or another file"
            )


def _fit(saved: SavedPass, runner: Runner, tables: Any, lengths: Any) -> None:
    """Write what the pass reads into the pool and the tables. Raises `ConfigError` for another."""
    pool, pages = runner.pool, saved.pages
    if pages.shape[1:] != pool.shape[1:] or pages.dtype != pool.dtype:
        raise ConfigError(
            f"the pages of the pass are {list(pages.shape[1:])} in {pages.dtype}, those of this "
            f"model and config {list(pool.shape[1:])} in {pool.dtype}: give the model that failed"
        )
    if len(pages) > len(pool):
        raise ConfigError(
            f"the pass reads {len(pages)} pages, the pool has {len(pool)}: raise kv_cache_gib"
        )
    known = tables[saved.slots].shape == saved.tables.shape
    if not known or saved.work.addresses.lengths.shape != lengths.shape:
        raise ConfigError(
            f"the block tables of the pass are {list(saved.tables.shape)}, those of this model and "
            f"config {list(tables[saved.slots].shape)}: give the model and the config that failed"
        )
    pool[: len(pages)] = pages.to(pool.device)
    runner.passes.tables.write(saved.slots, saved.tables)


def _name_rows(saved: SavedPass, work: Pass, logits: Tensor) -> Iterator[ReplayedRow]:
    for place, found in zip(work.wanted.tolist(), logits, strict=True):
        row = work.rows[int(np.searchsorted(work.ends, place))]
        if row.slot in saved.kept:
            token = None if bool(found.isnan().any()) else int(found.argmax())
            yield ReplayedRow(row.request_id, row.kind.value, row.start, len(row.tokens), token)
