"""Measure how many entries each head needs, and write it down as profiles (Tangram, calibration).

For each sample and each full chunk of it, the scoring method's own dynamic selection is run: the
scores of all heads of a layer (scope "layer") or of the model (scope "model") compete and the best
ρ stay. What each head got, averaged over a sample's chunks, is that sample's kept fraction; μ and σ
are taken over samples. One pass over the scores serves every ρ. The caller's `score_source` runs
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tangram.calibrate.agreement import rank_stability
from tangram.compress.groups import Grouping
from tangram.compress.profile import ALPHA, SINK_TOKENS, Profile, Scope
from tangram.compress.provenance import Calibration, ModelFingerprint, ScorerSpec
from tangram.compress.select import dynamic_fractions
from tangram.errors import ConfigError, ProfileError
from tangram.types import Float64, Geometry

Scores = npt.NDArray[np.float32]
# One sample's token ids in; the scores [L, H, C] of each of its full chunks out, chunk 0 first,
# higher = keep.
ScoreSource = Callable[[Sequence[int]], Iterator[Scores]]
# Each sample's shares in turn, float64 [ρ, chunks, L, H], fractions of C.
Observer = Callable[[Float64], None]
Tracker = Callable[[Sequence[Sequence[int]]], Iterable[Sequence[int]]]


def calibrate(
    score_source: ScoreSource,
    samples: Sequence[Sequence[int]],
    *,
    geometry: Geometry,
    fingerprint: ModelFingerprint,
    scorer: ScorerSpec,
    scope: Scope,
    retentions: Sequence[float],
    chunk_tokens: int,
    source: str,
    page_tokens: int = 16,
    heads_per_page: int = 4,
    grouping: Grouping = "model",
    alpha: float = ALPHA,
    sink_tokens: int = SINK_TOKENS,
    window_tokens: int | None = None,
    track: Tracker = iter,
    observe: Observer | None = None,
) -> list[Profile]:
    """One profile for each ρ of `retentions`, from the scores of `samples` (token ids).

    Of each sample the full chunks within the model's context are used. L counts the model's
    full-attention layers, the only ones that are compressed. `source` says in words where the
    samples are from. `track` wraps the samples to report progress (`tangram.progress`). `observe`
    is handed what each sample gave the heads, as soon as it is known.

    Raises `ConfigError`, before any scoring, if a sample is shorter than a chunk or a ρ cannot be
    met; `ProfileError` if the scores have the wrong shape or hold NaN.
    """
    window = chunk_tokens // 64 if window_tokens is None else window_tokens
    layers, heads = geometry.full_layers, geometry.kv_heads
    derive = partial(
        Profile.from_statistics,
        model=fingerprint,
        layers=layers,
        scorer=scorer,
        scope=scope,
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens,
        heads_per_page=heads_per_page,
        grouping=grouping,
        alpha=alpha,
        sink_tokens=sink_tokens,
        window_tokens=window,
    )
    nothing = np.zeros((len(layers), heads))
    for retention in retentions:  # scoring takes minutes: refuse now what could not be derived then
        derive(nothing, nothing, kv_retention=retention, calibration=Calibration(1, source))
    samples = [sample[: geometry.max_positions] for sample in samples]
    check_lengths(samples, chunk_tokens)

    def fractions(number: int, sample: Sequence[int]) -> Float64:
        chunks = [
            _chunk_fractions(
                scores,
                f"sample {number}, chunk {chunk}",
                chunk,
                (len(layers), heads, chunk_tokens),
                retentions,
                scope,
                sink_tokens,
                window,
            )
            for chunk, scores in enumerate(score_source(sample))
        ]
        if len(chunks) != len(sample) // chunk_tokens:
            raise ProfileError(
                f"sample {number} has {len(sample) // chunk_tokens} full chunks, the scores of "
                f"{len(chunks)} came: the score source must yield one array for each full chunk"
            )
        if observe is not None:
            observe(np.stack(chunks, axis=1))
        return np.asarray(np.mean(chunks, axis=0), np.float64)

    # [ρ, n, L, H]
    by_retention = np.stack(
        [fractions(n, sample) for n, sample in enumerate(track(samples))], axis=1
    )
    tokens = sum(len(sample) // chunk_tokens * chunk_tokens for sample in samples)
    return [
        derive(
            kept.mean(axis=0),
            kept.std(axis=0),
            kv_retention=retention,
            calibration=Calibration(len(samples), source, tokens, rank_stability(kept)),
        )
        for retention, kept in zip(retentions, by_retention, strict=True)
    ]


def measure_kept_fractions(
    scores: Scores,
    retentions: Sequence[float],
    scope: Scope,
    *,
    sink_tokens: int,
    window_tokens: int,
) -> Float64:
    """What dynamic selection gives each head: float64 [len(retentions), L, H], fractions of C, for
    scores [L, H, C].

    `compress/select.py` says how, for the first chunk of a sequence if there are `sink_tokens`.
    """
    every = torch.from_numpy(np.ascontiguousarray(scores))
    found = [
        dynamic_fractions(every, retention, scope, sink_tokens, window_tokens, start=0).numpy()
        for retention in retentions
    ]
    return np.stack(found)


def check_lengths(samples: Sequence[Sequence[int]], chunk_tokens: int) -> None:
    """Raise `ConfigError` if there are no `samples` (token ids), or one of them does not fill a
    chunk.
    """
    if not samples:
        raise ConfigError("there are no samples, calibration needs at least one")
    for number, sample in enumerate(samples):
        if len(sample) < chunk_tokens:
            raise ConfigError(
                f"sample {number} has {len(sample)} tokens, it must fill a chunk of {chunk_tokens} "
                "(chunk_tokens): join short texts or lower chunk_tokens"
            )


def _chunk_fractions(
    scores: Scores,
    place: str,
    chunk: int,
    shape: tuple[int, int, int],
    retentions: Sequence[float],
    scope: Scope,
    sink_tokens: int,
    window_tokens: int,
) -> Float64:
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
    sinks = sink_tokens if chunk == 0 else 0
    return measure_kept_fractions(
        scores, retentions, scope, sink_tokens=sinks, window_tokens=window_tokens
    )
