"""Scores of real text, chunk by chunk, from the engine's own prefill: what calibration listens to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.compress.profile import SINK_TOKENS
from tangram.compress.scorers import Scorer
from tangram.config import EngineConfig
from tangram.engine.runner import Runner
from tangram.engine.scheduler import Scheduler, sequence_of
from tangram.model.load import LoadedModel
from tangram.model.sealing import Retention

Scores = npt.NDArray[np.float32]


def score_source(
    loaded: LoadedModel, scorer: Scorer, *, chunk_tokens: int
) -> Callable[[Sequence[int]], Iterator[Scores]]:
    """A function from one sample's token ids to the scores float32 [L, H, C] of its full chunks, first chunk first.

    L counts the full-attention layers. Every chunk sees its past uncompressed, as the methods were published.
    """
    geometry = loaded.geometry
    layout = Layout.uncompressed(
        geometry,
        chunk_tokens=chunk_tokens,
        page_tokens=chunk_tokens,
        heads_per_page=1,
        max_tokens=geometry.max_positions,
    )
    pages = layout.most_pages(geometry.max_positions)
    cache = CacheManager([("", layout)], total_pages=pages, max_sequences=1, prefix_caching=False)
    config = EngineConfig(
        kv_retention=1.0, chunk_tokens=chunk_tokens, page_tokens=chunk_tokens, max_num_seqs=1,
        max_num_batched_tokens=chunk_tokens + 1,
    )  # fmt: skip
    seen: dict[int, Scores] = {}

    def observe(start: int, layer: int, scores: Tensor) -> None:
        seen[layer] = scores.float().cpu().numpy()

    retention = Retention(1.0, layout, "", scorer, sink_tokens=SINK_TOKENS)
    runner = Runner(loaded, [retention], pages=pages, cache=cache, observer=observe)

    def scores_of(tokens: Sequence[int]) -> Iterator[Scores]:
        scheduler = Scheduler(config, cache)
        whole = len(tokens) // chunk_tokens * chunk_tokens
        sequence = sequence_of("sample", 0, 0, "", tuple(tokens[:whole]), whole)
        scheduler.add(sequence)
        for _ in range(whole // chunk_tokens):
            step = scheduler.schedule()
            if step is None:
                raise RuntimeError("the calibration pool is too small for one sample")
            runner.run(step, [])
            scheduler.commit(step)
            yield np.stack([seen.pop(layer) for layer in geometry.full_layers])
        scheduler.remove(sequence)

    return scores_of
