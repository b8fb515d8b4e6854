"""Run text, chunk by chunk, through the engine's own prefill, for calibration and gate training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.cache.layout import Layout
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.step import Row
from tangram.calibrate.measure import Magnitudes
from tangram.compress.profile import SINK_TOKENS
from tangram.compress.scorers import ChunkView, Scorer
from tangram.engine.passes.runner import Runner, RunnerSettings
from tangram.engine.schedule.scheduler import Scheduler, StepLimits
from tangram.engine.schedule.token_sequence import sequence_of
from tangram.model.load import LoadedModel
from tangram.model.sealing import ScoreObserver

Scores = npt.NDArray[np.float32]


def score_source(
    loaded: LoadedModel, scorer: Scorer, *, chunk_tokens: int, magnitudes: Magnitudes | None = None
) -> Callable[[Sequence[int]], Iterator[Scores]]:
    """A function from one sample's token ids to the scores float32 [L, H, C] of its full chunks.

    Chunks come in order. L counts the full-attention layers. Every chunk sees its past
    uncompressed, as the methods were published. `magnitudes` gets the chunks' keys and values.
    """
    seen: dict[int, Scores] = {}

    def observe(chunk: ChunkView, scores: Tensor) -> None:
        seen[chunk.layer] = scores.float().cpu().numpy()

    chunks = chunk_source(loaded, scorer, observe, chunk_tokens=chunk_tokens, magnitudes=magnitudes)

    def scores_of(tokens: Sequence[int]) -> Iterator[Scores]:
        for _ in chunks(tokens):
            yield np.stack([seen.pop(layer) for layer in loaded.geometry.full_layers])

    return scores_of


def chunk_source(
    loaded: LoadedModel,
    scorer: Scorer,
    observer: ScoreObserver,
    *,
    chunk_tokens: int,
    magnitudes: Magnitudes | None = None,
) -> Callable[[Sequence[int]], Iterator[int]]:
    """A function from one sample's token ids to the positions of its full chunks.

    A position comes when the chunk has been scored. By then `observer` was called with the chunk
    and its scores in every full-attention layer, and `magnitudes` with what is stored of it. Every
    chunk sees its past uncompressed.
    """
    geometry = loaded.geometry
    layout = Layout.lay_out_uncompressed(
        geometry,
        chunk_tokens=chunk_tokens,
        page_tokens=chunk_tokens,
        heads_per_page=1,
        max_tokens=geometry.max_positions,
    )
    pages = layout.most_pages(geometry.max_positions)
    retention = Retention(
        1.0,
        layout,
        "",
        scorer=scorer.name,
        sink_tokens=SINK_TOKENS,
        one_chunk_a_step="reconstruction" in scorer.needs,
    )
    cache = CacheManager([retention], total_pages=pages, max_sequences=1, prefix_caching=False)
    settings = RunnerSettings(pages, observer=observer)
    runner = Runner(loaded, [retention], {scorer.name: scorer}, cache, settings)

    def chunks_of(tokens: Sequence[int]) -> Iterator[int]:
        scheduler = Scheduler(cache, StepLimits(1, chunk_tokens + 1))
        whole = len(tokens) // chunk_tokens * chunk_tokens
        sequence = sequence_of("sample", 0, retention, "", tuple(tokens[:whole]), whole)
        scheduler.add(sequence)
        for start in range(0, whole, chunk_tokens):
            step = scheduler.schedule()
            if step is None:
                raise RuntimeError("the calibration pool is too small for one sample")
            runner.run(runner.plan(step), [])
            if magnitudes is not None:
                _take_chunk(magnitudes, runner.pool, step.rows[0], cache)
            scheduler.commit(step)
            yield start
        scheduler.remove(sequence)

    return chunks_of


def _take_chunk(magnitudes: Magnitudes, pool: Tensor, row: Row, cache: CacheManager) -> None:
    """Give `magnitudes` what `row` stored of a chunk, where a page is one head's chunk."""
    if pool.shape[2] == 1:
        return  # an entry of latents has one part, with a scale of 1
    layout = row.retention.layout
    span = cache.tables[row.slot, layout.span_entries(row.start // layout.chunk_tokens)]
    magnitudes.take(pool[torch.from_numpy(span[layout.head_group])][:, :, 0])
