"""Fast KVzip: a trained gate that predicts KVzip's scores (Kim et al., arXiv 2601.17668)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from tangram.compress.provenance import ModelFingerprint
from tangram.compress.scorers.base import ChunkView, Scorer, require
from tangram.compress.scorers.gate import (
    NORM_EPSILON,
    Gate,
    find_gate,
    find_shipped_gates,
    gate_scores,
    load_gate,
)
from tangram.errors import ConfigError
from tangram.types import Int64


class FastKVzip(Scorer):
    """The gate of the chunk's layer over the input of its attention module.

    `gate` is a gate file. Raises `ConfigError` if it has another format (see
    `tangram.compress.scorers.gate`).
    """

    name: ClassVar[str] = "fastkvzip"
    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    by_token: ClassVar[bool] = True
    takes_gate: ClassVar[bool] = True
    kernel: ClassVar[str | None] = "gate"

    def __init__(self, gate: Path) -> None:
        self.path = gate
        self.gate: Gate = load_gate(gate)
        # 52 bits survive JSON, whose numbers are doubles.
        self._digest = int(hashlib.sha256(gate.read_bytes()).hexdigest()[:13], 16)

    @classmethod
    def create(cls, gate: Path | None, model: ModelFingerprint | None) -> Self:
        """See `Scorer`: without `gate`, the one that ships for exactly the weights of `model`."""
        if gate is None and model is not None:
            gate = find_gate(find_shipped_gates(), model)
        if gate is None:
            raise ConfigError(
                f"gate is not set, scorer {cls.name} needs a gate file and none ships for this "
                "model: give the path of one, or train it with `tangram calibrate --train-gate`"
            )
        return cls(gate)

    def parameters(self) -> dict[str, float | int]:
        """The first 52 bits of the gate file's SHA-256."""
        return {"gate_sha256": self._digest}

    @property
    def trained_for(self) -> ModelFingerprint | None:
        """The model that the gate file names; None for converted files, which name none."""
        return self.gate.training.model if self.gate.training else None

    def of_heads(self, heads: Int64) -> FastKVzip:
        """See `Scorer`: with a gate of these heads."""
        part = copy(self)
        part.gate = self.gate.of_heads(heads)
        return part

    def score(self, chunk: ChunkView) -> Tensor:
        """[H, C] float32 in (0, 1). Raises `ConfigError` if the gate does not fit the model."""
        weights, hidden = self.read(chunk)
        return gate_scores(weights, self.gate.shape, hidden)

    def kernel_inputs(self, chunks: ChunkView, count: int) -> tuple[Any, ...]:
        """See `Scorer`: the gate of the layer, its input [N · C, hidden], N, the norms' epsilon."""
        return *self.read(chunks), count, NORM_EPSILON

    def read(self, chunk: ChunkView) -> tuple[Mapping[str, Tensor], Tensor]:
        """The weights of the layer's gate, by name, and its input [C, hidden], on one device.

        Raises `ConfigError` if the gate does not fit the model.
        """
        hidden = require(chunk.hidden, "hidden", self)
        self._check_shape(chunk, hidden.shape[1])
        self.gate = self.gate.to(hidden.device)
        return self.gate.layers[chunk.layer], hidden

    def _check_shape(self, chunk: ChunkView, hidden: int) -> None:
        shape = self.gate.shape
        group_size = chunk.queries.shape[0] // chunk.kv_heads
        pairs = {
            "hidden size": (shape.hidden, hidden),
            "KV heads": (shape.kv_heads, chunk.kv_heads),
        }
        pairs["query heads per KV head"] = (shape.group_size, group_size)
        wrong = [
            f"{what} {ours}, the model has {theirs}"
            for what, (ours, theirs) in pairs.items()
            if ours != theirs
        ]
        if chunk.layer >= shape.layers:
            wrong.append(f"{shape.layers} layers, the model has at least {chunk.layer + 1}")
        if wrong:
            raise ConfigError(
                f"gate is {str(self.path)!r}, it was trained for another model: {'; '.join(wrong)}"
            )
