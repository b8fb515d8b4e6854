"""The scorers by name. A new one is one file with one method and one line here; see docs/scorers.md."""

from __future__ import annotations

from pathlib import Path

from tangram.compress.provenance import ModelFingerprint
from tangram.compress.scorers.base import ChunkView, Reconstruction, Scorer
from tangram.compress.scorers.expected_attention import ExpectedAttention
from tangram.compress.scorers.fastkvzip import FastKVzip
from tangram.compress.scorers.gate import find_gate, shipped_gates
from tangram.compress.scorers.keydiff import KeyDiff
from tangram.compress.scorers.kvzip import KVzip
from tangram.compress.scorers.snapkv import SnapKV
from tangram.compress.scorers.streaming_llm import StreamingLLM
from tangram.compress.scorers.tova import TOVA
from tangram.errors import ConfigError

__all__ = ["SCORERS", "ChunkView", "Reconstruction", "Scorer", "make_scorer"]

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer for scorer in (StreamingLLM, TOVA, SnapKV, KeyDiff, ExpectedAttention, KVzip, FastKVzip)
}


def make_scorer(name: str, *, gate: Path | None = None, model: ModelFingerprint | None = None) -> Scorer:
    """The scorer called `name` with its default parameters; `gate` is the gate file of fastkvzip and of no other.

    Without one fastkvzip takes the gate that ships for exactly the weights of `model`.
    `ConfigError` if the name is unknown, a gate is missing or damaged, or a gate is given to a scorer without one.
    """
    if name not in SCORERS:
        raise ConfigError(f"scorer is {name!r}, it must be one of {', '.join(sorted(SCORERS))}")
    scorer = SCORERS[name]
    if issubclass(scorer, FastKVzip):
        found = find_gate(shipped_gates(), model) if gate is None and model is not None else gate
        if found is None:
            raise ConfigError(
                f"gate is not set, scorer {name} needs a gate file and none ships for this model: give the path of "
                f"one, or train it with `tangram calibrate --train-gate`"
            )
        return scorer(found)
    if gate is not None:
        raise ConfigError(f"gate is {str(gate)!r}, scorer {name} takes none: leave it out or choose fastkvzip")
    return scorer()
