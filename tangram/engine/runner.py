"""A step in, sampled tokens out: the only room that calls the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tangram.compress.scorers.kvzip import repeat_tokens
from tangram.engine.batch import Batcher
from tangram.engine.sampling import SampleRow, sample
from tangram.kernels.dispatch import prepare
from tangram.model.attention import AttentionContext, PrefillRow, RepeatAttention, StepAttention
from tangram.model.load import LoadedModel
from tangram.model.rotary import model_rotary
from tangram.model.sealing import Retention, ScoreObserver
from tangram.types import Int32, Int64, Row, RowKind, Step, TokenLogprob


class Runner:
    """Runs steps of one model over one pool.

    `tables` and `lengths` are the cache manager's arrays; the pool is [pages, Hp, 2, P, D] in the model's dtype.
    """

    def __init__(
        self, loaded: LoadedModel, retentions: Sequence[Retention], *, pages: int, tables: Int32, lengths: Int32,
        observer: ScoreObserver | None = None,
    ) -> None:  # fmt: skip
        self._loaded = loaded
        layout = retentions[0].layout
        shape = (pages, layout.heads_per_page, 2, layout.page_tokens, layout.geometry.head_dim)
        self.pool = torch.empty(shape, dtype=loaded.dtype, device=loaded.device)
        prepare(self.pool)
        needs = {need for entry in retentions if entry.scorer is not None for need in entry.scorer.needs}
        rotary = model_rotary(loaded.model, layout.geometry.head_dim) if "rotary" in needs else None
        self._batcher = Batcher(
            retentions, self.pool, tables, lengths, rotary, workers=torch.get_num_threads(), observer=observer
        )

    @torch.inference_mode()
    def run(self, step: Step, sample_rows: Sequence[SampleRow]) -> list[TokenLogprob]:
        """Compute `step` and draw a token for each of its rows with `sample`; `sample_rows` are theirs, in order."""
        attention = self._batcher.attention(step)
        tokens = np.concatenate([row.tokens for row in step.rows])
        positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in step.rows])
        ends = np.cumsum([len(row.tokens) for row in step.rows]) - 1
        logits = self._forward(tokens, positions, attention, ends[[row.sample for row in step.rows]])
        sampled = sample(logits, sample_rows) if sample_rows else []
        self._reconstruct(step, attention)
        return sampled

    def _forward(self, tokens: Int64, positions: Int64, attention: AttentionContext, wanted: Int64) -> Tensor:
        """Logits [len(wanted), V] of the flattened batch's tokens `wanted`."""
        device = self._loaded.device
        output = self._loaded.model(
            input_ids=torch.from_numpy(tokens).to(device)[None],
            position_ids=torch.from_numpy(positions).to(device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(wanted).to(device),
            tangram=attention,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _reconstruct(self, step: Step, attention: StepAttention) -> None:
        """The second pass of scorers that ask the model to repeat a chunk (KVzip, section 3)."""
        sealed = (row for row in step.rows[step.decode_rows :])
        for row, part in zip(sealed, attention.prefill, strict=True):
            if row.kind is RowKind.SEAL and part.sealer is not None and part.sealer.pending:
                self._repeat(row, part)

    def _repeat(self, row: Row, part: PrefillRow) -> None:
        sealer = part.sealer
        if sealer is None:
            return
        encode = partial(self._loaded.tokenizer.encode, add_special_tokens=False)
        preceding = row.preceding.tolist() if row.start else None
        tokens = np.asarray(repeat_tokens(encode, row.tokens.tolist(), preceding, encode("\n")), np.int64)
        positions = row.start + len(row.tokens) + np.arange(len(tokens))
        batcher = self._batcher
        attention = RepeatAttention(self.pool, batcher.flat_tables, batcher.windows, part, sealer)
        self._forward(tokens, positions, attention, np.zeros(0, np.int64))
