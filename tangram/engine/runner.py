"""A step in, sampled tokens out: the only room that calls the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tangram.cache.dynamic import DynamicCache
from tangram.cache.manager import CacheManager
from tangram.compress.scorers.kvzip import repeat_tokens
from tangram.engine.batch import Batcher, DeviceTables
from tangram.engine.graphs import DecodeGraphs
from tangram.engine.reclaim import Reclaimer
from tangram.engine.sampling import Choice, SampleRow, choose
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.step import KernelChoice
from tangram.kernels.transfer import staged
from tangram.model.attention import AttentionContext, StepAttention
from tangram.model.load import LoadedModel
from tangram.model.rotary import model_rotary
from tangram.model.sealing import Retention, ScoreObserver
from tangram.types import Int64, Row, Step


class Runner:
    """Runs steps of one model over one pool, [pages, Hp, 2, P, D] of `cache_dtype`, whose pages `cache` manages.

    `graphs` runs steps that only decode as CUDA graphs. `cache_dtype` None is the model's own.
    """

    def __init__(
        self, loaded: LoadedModel, retentions: Sequence[Retention], *, pages: int, cache: CacheManager,
        observer: ScoreObserver | None = None, kernels: KernelChoice = pool_kernels,
        graphs: bool = False, cache_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._loaded = loaded
        layout = retentions[0].layout
        shape = (pages, layout.heads_per_page, 2, layout.page_tokens, layout.geometry.head_dim)
        self.pool = torch.empty(shape, dtype=cache_dtype or loaded.dtype, device=loaded.device)
        needs = {need for entry in retentions if entry.scorer is not None for need in entry.scorer.needs}
        rotary = model_rotary(loaded.model, layout.geometry.head_dim) if "rotary" in needs else None
        serving = kernels(self.pool, layout.geometry.group_size)
        block_tables = DeviceTables(cache, loaded.device)
        self._batcher = Batcher(retentions, serving, cache, block_tables, rotary, observer)
        self._reclaimer = Reclaimer(cache, self.pool, block_tables) if isinstance(cache, DynamicCache) else None
        self._graphs = DecodeGraphs(self._forward, loaded.device) if graphs else None

    @torch.inference_mode()
    def run(self, step: Step, sample_rows: Sequence[SampleRow]) -> Choice | None:
        """Compute `step` and choose a token for each of its rows with `sample`; `sample_rows` are theirs, in order.

        A GPU goes on with it while the host does something else.
        """
        attention = self._batcher.attention(step)
        tokens, positions, ends = _flattened(step, attention.width)
        if self._graphs is not None and step.decode_rows == len(step.rows):
            logits = self._graphs.logits(tokens, positions, attention)[: step.decode_rows]
        else:
            wanted = ends[[row.sample for row in step.rows]]
            logits = self._forward(attention, *self._uploaded(tokens, positions, wanted))
        choice = choose(logits, sample_rows) if sample_rows else None
        self._reconstruct(attention)
        if self._reclaimer is not None:
            self._reclaimer.reclaim(attention.sealers, attention.prefill)
        return choice

    def _uploaded(self, *arrays: Int64) -> list[Tensor]:
        return [staged(array, self._loaded.device).to(self._loaded.device, non_blocking=True) for array in arrays]

    def _forward(self, attention: AttentionContext, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Logits [len(wanted), V] of the flattened batch's tokens `wanted`."""
        output = self._loaded.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted,
            tangram=attention,
        )  # fmt: skip
        logits: Tensor = output.logits[0]
        return logits

    def _reconstruct(self, attention: StepAttention) -> None:
        """The second pass of scorers that ask the model to repeat a chunk (KVzip, section 3)."""
        for sealer in attention.sealers:
            if sealer.pending:
                row, tokens = sealer.row, self._repetition(sealer.row)
                positions = row.start + len(row.tokens) + np.arange(len(tokens))
                repeat = self._batcher.repetition(attention, sealer, len(tokens))
                self._forward(repeat, *self._uploaded(tokens, positions, np.zeros(0, np.int64)))

    def _repetition(self, row: Row) -> Int64:
        encode = partial(self._loaded.tokenizer.encode, add_special_tokens=False)
        preceding = row.preceding.tolist() if row.start else None
        return np.asarray(repeat_tokens(encode, row.tokens.tolist(), preceding, encode("\n")), np.int64)


def _flattened(step: Step, width: int) -> tuple[Int64, Int64, Int64]:
    """Tokens and positions of a step whose decode rows are filled up to `width`, and where each of its rows ends."""
    fill = np.zeros(width - step.decode_rows, np.int64)
    tokens = [row.tokens for row in step.rows]
    positions = [np.arange(row.start, row.start + len(row.tokens)) for row in step.rows]
    ends = np.cumsum([len(own) for own in tokens]) - 1
    ends[step.decode_rows :] += len(fill)
    for parts in (tokens, positions):
        parts.insert(step.decode_rows, fill)
    return np.concatenate(tokens), np.concatenate(positions), ends
