"""The logits of a model on a given text, when all tokens before are compressed in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import RowKind, Step
from tangram.config import EngineConfig
from tangram.engine.passes.passes import carry_nothing
from tangram.engine.schedule.token_sequence import sequence_of
from tangram.engine.setup.blueprint import for_one_device
from tangram.engine.setup.build import build_parts
from tangram.errors import ConfigError, IntegrityError
from tangram.model.load import LoadedModel


class ForcedText:
    """Runs texts one by one through the parts of an engine of `config`. Texts share no state."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        # Host memory, to which chunks may be rounded, is there for a prefix cache only.
        self._config = replace(config, enable_prefix_caching=config.kv_offload_gib > 0)
        parts = build_parts(for_one_device(self._config, loaded))
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._retention = parts.admission.retentions[0]
        self._limit = parts.admission.max_model_len

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [n, V]: the logits at each of the last n tokens, which fill no chunk.

        The chunks before them are sealed. Raises `ConfigError` if there are none, or if the text is
        too long.
        """
        if len(tokens) % self._config.chunk_tokens == 0:
            raise ConfigError(
                f"tokens are {len(tokens)}, whole chunks of {self._config.chunk_tokens}: nothing "
                "is left to compare"
            )
        if len(tokens) > self._limit:
            raise ConfigError(
                f"tokens are {len(tokens)}, at most {self._limit} fit here: give a shorter text"
            )
        sequence, found = (
            sequence_of("text", 0, self._retention, "", tuple(tokens), len(tokens)),
            list[Tensor](),
        )
        self._scheduler.add(sequence)
        try:
            while not found:
                step = self._scheduler.schedule()
                if step is None:
                    raise IntegrityError(
                        f"{len(tokens)} tokens were let in, and there are no pages for them"
                    )
                if step.rows[-1].kind is RowKind.TAIL:
                    found.append(self._tail_logits(step))
                else:
                    self._runner.run(self._runner.plan(step), [])
                self._scheduler.commit(step)
        finally:
            self._scheduler.remove(sequence)
        return torch.cat(found).float()

    @torch.inference_mode()
    def _tail_logits(self, step: Step) -> Tensor:
        """Compute `step`; logits [n, V] of all tokens of its TAIL rows, in their order."""
        self._runner.move(step)
        passes = self._runner.passes
        work = passes.batcher.build(step.rows, step.epoch)
        wanted = [
            np.arange(end - len(row.tokens), end) + 1
            for row, end in zip(step.rows, work.ends, strict=True)
            if row.kind is RowKind.TAIL
        ]
        every = replace(work, wanted=np.concatenate(wanted))
        return passes.begin(every, carry_nothing).logits()
