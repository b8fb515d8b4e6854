"""Measure how many entries each head needs, and make profiles of it (Tangram, calibration).

Each full chunk of each sample goes through the scoring method's own dynamic selection. The scores
of all heads of a layer (scope "layer") or of the model (scope "model") compete, and the best ρ
stay. A sample's kept fractions are the means over its chunks of what each head got; μ and σ are
taken over samples. One pass over the scores serves every ρ. The caller's `score_source` runs the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.calibrate.agreement import rank_stability
from tangram.compress.entry_scales import choose_scales
from tangram.compress.profile import Profile, ProfileOptions
from tangram.compress.provenance import Calibration
from tangram.compress.select import dynamic_fractions
from tangram.config import Scope
from tangram.errors import ConfigError, ProfileError
from tangram.types import Float64, HeadScales

Scores = npt.NDArray[np.float32]
# One sample's token ids in; the scores [L, H, C] of each of its full chunks out, in order, higher =
# keep.
ScoreSource = Callable[[Sequence[int]], Iterator[Scores]]
# Each sample's kept fractions in turn, float64 [ρ, chunks, L, H].
Observer = Callable[[Float64], None]
Tracker = Callable[[Sequence[Sequence[int]]], Iterable[Sequence[int]]]


class Magnitudes:
    """The largest magnitudes of keys and values so far: `largest` float32 [L, H, 2]."""

    def __init__(self) -> None:
        self.largest: Tensor | None = None

    def take(self, entries: Tensor) -> None:
        """Take keys and values [L, H, 2, n, D] of all layers."""
        found = entries.abs().amax((3, 4)).float().cpu()
        self.largest = found if self.largest is None else torch.maximum(self.largest, found)

    def scales(self) -> HeadScales | None:
        """The scales that suit them; None if there were none."""
        return None if self.largest is None else choose_scales(self.largest.numpy())


def calibrate(
    score_source: ScoreSource,
    samples: Sequence[Sequence[int]],
    options: ProfileOptions,
    retentions: Sequence[float],
    *,
    max_positions: int,
    source: str,
    track: Tracker = iter,
    observe: Observer | None = None,
    magnitudes: Magnitudes | None = None,
) -> list[Profile]:
    """One profile for each ρ of `retentions`, from the scores of `samples` (token ids).

    Only full chunks within the model's `max_positions` are used. L counts the `layers` of
    `options`. `source` says in words where the samples are from. `track` wraps the samples,
    `observe` gets each sample's kept fractions. `score_source` fills `magnitudes`. Raises
    `ConfigError`, before any scoring, if a sample is shorter than a chunk or a ρ cannot be met, and
    `ProfileError` if scores have the wrong shape or hold NaN.
    """
    nothing = np.zeros((len(options.layers), options.model.kv_heads))
    for retention in retentions:  # scoring takes minutes: check first that each ρ can be met
        Profile.from_statistics(nothing, nothing, options, retention, Calibration(1, source))
    samples, chunk_tokens = [sample[:max_positions] for sample in samples], options.chunk_tokens
    check_lengths(samples, chunk_tokens)
    measure = partial(_chunk_fractions, options=options, retentions=retentions)
    kept = _measure_samples(score_source, track(samples), chunk_tokens, measure, observe)
    tokens = sum(len(sample) // chunk_tokens * chunk_tokens for sample in samples)
    scales = None if magnitudes is None else magnitudes.scales()
    return [
        Profile.from_statistics(
            of_samples.mean(axis=0),
            of_samples.std(axis=0),
            options,
            retention,
            Calibration(len(of_samples), source, tokens, rank_stability(of_samples)),
        ).with_scales(scales)
        for retention, of_samples in zip(retentions, kept, strict=True)
    ]


def measure_kept_fractions(
    scores: Scores,
    retentions: Sequence[float],
    scope: Scope,
    *,
    sink_tokens: int,
    window_tokens: int,
) -> Float64:
    """The fractions that dynamic selection keeps of each head: float64 [len(retentions), L, H].

    `scores` is [L, H, C]. See `compress/select.py`; with `sink_tokens` the chunk is the first of
    its sequence.
    """
    every = torch.from_numpy(np.ascontiguousarray(scores))
    found = [
        dynamic_fractions(every, retention, scope, sink_tokens, window_tokens, start=0).numpy()
        for retention in retentions
    ]
    return np.stack(found)


def check_lengths(samples: Sequence[Sequence[int]], chunk_tokens: int) -> None:
    """Raise `ConfigError` if there are no `samples` (token ids), or one does not fill a chunk."""
    if not samples:
        raise ConfigError("there are no samples, calibration needs at least one")
    for number, sample in enumerate(samples):
        if len(sample) < chunk_tokens:
            raise ConfigError(
                f"sample {number} has {len(sample)} tokens, it must fill a chunk of {chunk_tokens} "
                "(chunk_tokens): join short texts or lower chunk_tokens"
            )


def _measure_samples(
    score_source: ScoreSource,
    samples: Iterable[Sequence[int]],
    chunk_tokens: int,
    measure: Callable[..., Float64],
    observe: Observer | None,
) -> Float64:
    """The kept fractions [ρ, samples, L, H], each the mean over the sample's full chunks."""
    kept = []
    for number, sample in enumerate(samples):
        scores, full = score_source(sample), len(sample) // chunk_tokens
        chunks = _sample_fractions(number, scores, full, measure)
        if observe is not None:
            observe(np.stack(chunks, axis=1))
        kept.append(np.mean(chunks, axis=0))
    return np.stack(kept, axis=1)


def _sample_fractions(
    number: int, scores: Iterator[Scores], chunks: int, measure: Callable[..., Float64]
) -> list[Float64]:
    """The kept fractions [ρ, L, H] of each of a sample's full `chunks`."""
    found = [
        measure(each, f"sample {number}, chunk {chunk}", chunk) for chunk, each in enumerate(scores)
    ]
    if len(found) != chunks:
        raise ProfileError(
            f"sample {number} has {chunks} full chunks, the scores of {len(found)} came: the score "
            "source must yield one array for each full chunk"
        )
    return found


def _chunk_fractions(
    scores: Scores, place: str, chunk: int, *, options: ProfileOptions, retentions: Sequence[float]
) -> Float64:
    shape = len(options.layers), options.model.kv_heads, options.chunk_tokens
    if scores.shape != shape:
        raise ProfileError(
            f"the scores of {place} have shape {scores.shape}, they must be {shape} [L, H, C]"
        )
    if np.isnan(scores).any():
        layer, head, token = (int(index[0]) for index in np.nonzero(np.isnan(scores)))
        raise ProfileError(
            f"the scores of {place} hold NaN, first at layer row {layer}, head {head}, token "
            f"{token}"
        )
    sinks = options.sink_tokens if chunk == 0 else 0
    return measure_kept_fractions(
        scores, retentions, options.scope, sink_tokens=sinks, window_tokens=options.window
    )
