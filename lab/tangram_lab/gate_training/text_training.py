"""A gate for one model: trained on KVzip's scores in the engine's own prefill, then compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tangram.calibrate.measure import check_lengths
from tangram.compress.provenance import GateTraining, ScorerSpec
from tangram.compress.scorers import ChunkView
from tangram.compress.scorers.base import require
from tangram.compress.scorers.gate import Gate
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.compress.scorers.kvzip import KVzip
from tangram.config import Scope
from tangram.engine.setup.observe import chunk_source
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram.progress import show_progress
from tangram_lab.gate_training.fit import LOSS, Examples, Recipe, overlap, train_gate

RETENTIONS = (0.3, 0.5)
HELD_OUT = 8  # one text in so many, and at least one


@dataclass(frozen=True)
class Agreement:
    """The share of the entries that KVzip would keep at ρ = `retention` that the gate keeps too.

    KeyDiff's share stands beside it. Entries of the whole model compete, or those of each head
    alone (`scope` None). Means over chunks.
    """

    retention: float
    scope: Scope | None
    gate: float
    keydiff: float


def train_gate_on_texts(
    loaded: LoadedModel, texts: Sequence[str], *, chunk_tokens: int, source: str, recipe: Recipe
) -> tuple[Gate, list[list[int]]]:
    """A gate trained on KVzip's scores of `texts`, and the samples (token ids) that are held out.

    One text in eight is held out. `source` says in words where the texts are from. Draws progress
    bars in a terminal. Raises `ConfigError` before the model runs if nothing in `loaded` is
    compressed, or if there are fewer than two texts. It also does so if a text does not fill a
    chunk, or all of them do not fill a batch.
    """
    if not loaded.geometry.full_layers:
        raise ConfigError(
            f"model is {loaded.name!r}, it has sliding-window layers only: there is nothing to "
            "compress"
        )
    if len(texts) < 2:
        raise ConfigError(
            f"there are {len(texts)} texts, a gate needs at least 2: one is held out to test it"
        )
    limit = loaded.geometry.max_positions
    samples = [loaded.encode(text)[:limit] for text in texts]
    check_lengths(samples, chunk_tokens)
    random.Random(recipe.seed).shuffle(samples)
    held_out = max(len(samples) // HELD_OUT, 1)
    examples = _gather(loaded, samples[held_out:], chunk_tokens, recipe)
    teacher = KVzip()
    training = GateTraining(
        model=loaded.fingerprint,
        teacher=ScorerSpec(teacher.name, teacher.parameters()),
        chunk_tokens=chunk_tokens,
        samples=len(samples) - held_out,
        tokens=examples.tokens,
        source=source,
        seed=recipe.seed,
        loss=LOSS,
    )
    gate = train_gate(examples, loaded.geometry, loaded.device, show_progress)
    return replace(gate, training=training), samples[:held_out]


def _gather(
    loaded: LoadedModel, samples: Sequence[Sequence[int]], chunk_tokens: int, recipe: Recipe
) -> Examples:
    """Hidden states and KVzip's scores of `samples`, prefilled chunk by chunk as in serving."""
    teacher = KVzip()
    examples = Examples(
        sum(len(sample) // chunk_tokens for sample in samples), chunk_tokens, recipe
    )
    done = 0

    def observe(chunk: ChunkView, scores: Tensor) -> None:
        examples.take(done, chunk, scores, teacher)

    chunks = chunk_source(loaded, teacher, observe, chunk_tokens=chunk_tokens)
    for sample in show_progress(samples, "Scoring by KVzip"):
        for _ in chunks(sample):
            done += 1
    return examples


def agreements(
    loaded: LoadedModel, gate: Gate, samples: Sequence[Sequence[int]], *, chunk_tokens: int
) -> list[Agreement]:
    """How far `gate` and KeyDiff keep what KVzip would keep of `samples`, for ρ 0.3 and 0.5."""
    teacher, baseline, gate = KVzip(), KeyDiff(), gate.to(loaded.device)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def observe(chunk: ChunkView, scores: Tensor) -> None:
        hidden = require(chunk.hidden, "hidden", teacher)
        seen.append((scores, gate.score(chunk.layer, hidden), baseline.score(chunk)))

    chunks = chunk_source(loaded, teacher, observe, chunk_tokens=chunk_tokens)
    cases: list[tuple[float, Scope | None]] = [
        (retention, scope) for scope in ("model", None) for retention in RETENTIONS
    ]
    shares = []
    for sample in show_progress(samples, "Comparing with KVzip"):
        for _ in chunks(sample):
            theirs, gates, keydiffs = (torch.stack(scores) for scores in zip(*seen, strict=True))
            seen.clear()
            shares.append(
                [[overlap(ours, theirs, *case) for ours in (gates, keydiffs)] for case in cases]
            )
    means = torch.tensor(shares, dtype=torch.float64).mean(dim=0).tolist()
    return [Agreement(*case, *mean) for case, mean in zip(cases, means, strict=True)]
