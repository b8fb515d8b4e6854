"""Calibrate the embedded model and write the profiles that ship with the project.

python -m bench.ship_profiles [--samples 50] [--folder tangram/profiles] [--output FILE]

Every chunk sees its past uncompressed, so its keys and hidden states do not depend on where chunks
begin. One pass of the model over the texts serves all scorers and chunk sizes. It also tells how
little text is enough: the table compares profiles of the beginnings of the first eight texts, one
of each kind, with the profile of all texts. `lost` is the share of the entries that dynamic
selection keeps beyond the budgets, on the texts that the budgets were not made of.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tangram.calibrate.measure import Magnitudes, calibrate
from tangram.calibrate.observations import Observations, reserved_fractions
from tangram.calibrate.texts import QUICK_SAMPLES, list_kinds, make_texts
from tangram.compress.profile import Profile, ProfileOptions
from tangram.compress.scorers import ChunkView, Scorer, make_scorer
from tangram.config import EngineConfig
from tangram.engine.setup.observe import chunk_source
from tangram.engine.setup.profiles import scorer_spec
from tangram.model.load import LoadedModel, load_model
from tangram.progress import show_progress
from tangram_lab.calibration.lost_entries import overflow
from tangram_lab.environment import environment

SCORERS = ("fastkvzip", "keydiff")  # the first one needs all that the others need
RETENTIONS = (0.1, 0.25, 0.5, 0.75)
CHUNKS = (2048, 1024, 512, 256)
Scores = list[npt.NDArray[np.float32]]  # of a sample's chunks in turn, [L, H, C]


class ScoreTable:
    """The scores of `samples` (token ids) by every scorer, in chunks of every size."""

    def __init__(self, loaded: LoadedModel, scorers: Sequence[Scorer]) -> None:
        self._loaded, self._scorers, self.magnitudes = loaded, scorers, Magnitudes()
        self._scores: dict[tuple[str, int, tuple[int, ...]], Scores] = {}
        self._layers: dict[tuple[str, int, int], list[Tensor]] = {}

    def measure(self, sample: tuple[int, ...]) -> None:
        """Read one sample in the largest chunks."""
        self._layers.clear()
        chunks = chunk_source(
            self._loaded,
            self._scorers[0],
            self._observe,
            chunk_tokens=max(CHUNKS),
            magnitudes=self.magnitudes,
        )
        for _ in chunks(sample):
            pass
        for scorer in self._scorers:
            for tokens in CHUNKS:
                starts = range(0, len(sample) // max(CHUNKS) * max(CHUNKS), tokens)
                self._scores[scorer.name, tokens, sample] = [
                    np.stack([row.numpy() for row in self._layers[scorer.name, tokens, start]])
                    for start in starts
                ]

    def _observe(self, chunk: ChunkView, scores: Tensor) -> None:
        for tokens in CHUNKS:
            for begin in range(0, chunk.tokens, tokens):
                part = _cut(chunk, begin, begin + tokens)
                for scorer in self._scorers:
                    rows = self._layers.setdefault((scorer.name, tokens, part.start), [])
                    rows.append(scorer.score(part).float().cpu())

    def source(self, scorer: str, tokens: int, sample: Sequence[int]) -> Iterator[Any]:
        """What `calibrate` takes as its source of scores."""
        return iter(self._scores[scorer, tokens, tuple(sample)])


def _cut(chunk: ChunkView, begin: int, end: int) -> ChunkView:
    """Tokens `begin` to `end` of `chunk` as a chunk."""
    return replace(
        chunk,
        queries=chunk.queries[:, begin:end],
        keys=chunk.keys[:, begin:end],
        values=chunk.values[:, begin:end],
        hidden=None if chunk.hidden is None else chunk.hidden[begin:end],
        start=chunk.start + begin,
    )


def main() -> None:
    """Measure, write the profiles, print how much text is enough."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("tangram/profiles"))
    parser.add_argument("--output", type=Path, help="raw figures of how much text is enough")
    options = parser.parse_args()
    loaded = load_model(EngineConfig().model)
    scorers = [make_scorer(name, model=loaded.fingerprint) for name in SCORERS]
    whole = max(CHUNKS)
    texts = make_texts(options.samples, min_characters=6 * whole)
    # Whole chunks of the largest size: every size reads the same tokens.
    samples = [
        tuple(tokens[: len(tokens) // whole * whole])
        for tokens in map(loaded.tokenizer.encode, texts)
    ]
    table = ScoreTable(loaded, scorers)
    for sample in show_progress(samples, "Reading"):
        table.measure(sample)
    rows = list[dict[str, Any]]()
    for scorer in scorers:
        for tokens in CHUNKS:
            rows += _derive(loaded, scorer, tokens, samples, table, options.folder)
    for row in rows:
        print(json.dumps(row))
    if options.output is not None:
        command = shlex.join(["python", "-m", "bench.ship_profiles", *sys.argv[1:]])
        content = {"command": command, "environment": environment(), "rows": rows}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


def _derive(
    loaded: LoadedModel,
    scorer: Scorer,
    tokens: int,
    samples: Sequence[Sequence[int]],
    table: ScoreTable,
    folder: Path,
) -> list[dict[str, Any]]:
    """Write profiles of chunks of `tokens` that are not there yet; how much text is enough."""
    shares = list[Any]()
    profiles = calibrate(
        partial(table.source, scorer.name, tokens),
        samples,
        ProfileOptions(
            loaded.fingerprint, loaded.geometry.full_layers, scorer_spec(scorer), "model", tokens
        ),
        RETENTIONS,
        max_positions=loaded.geometry.max_positions,
        source=f"built-in calibration texts, {len(samples)} samples, seed 0",
        observe=shares.append,
        magnitudes=table.magnitudes,
    )
    for profile in profiles:
        path = folder / profile.file_name
        if not path.exists():
            profile.save(path)
    return [
        _compare(observed, tokens)
        for observed in Observations.gather(profiles, shares, list_kinds(len(samples)))
    ]


def _compare(observed: Observations, tokens: int) -> dict[str, Any]:
    """How much profiles lose whose texts are cut after some chunks."""
    held_out = observed.wishes[QUICK_SAMPLES:]
    lost = {"all": _mean_loss(observed.profile, held_out)}
    for length in (512, 1024, 2048, 4096):
        chunks = length // tokens
        first = [wishes[:chunks] for wishes in observed.wishes[:QUICK_SAMPLES]]
        if chunks and all(len(wishes) == chunks for wishes in first):
            fractions = np.stack([wishes.mean(axis=0) for wishes in first])
            profile = observed.profile.with_statistics(
                fractions.mean(axis=0), fractions.std(axis=0), alpha=observed.profile.alpha
            )
            lost[f"{QUICK_SAMPLES} x {length}"] = _mean_loss(profile, held_out)
    profile = observed.profile
    return {
        "scorer": profile.scorer.name,
        "chunk_tokens": tokens,
        "kv_retention": profile.kv_retention,
        "lost": lost,
    }


def _mean_loss(profile: Profile, wishes: Sequence[npt.NDArray[np.float64]]) -> float:
    budget = reserved_fractions(profile)
    return float(np.mean([overflow(one, budget)[1] for one in wishes]))


if __name__ == "__main__":
    main()
