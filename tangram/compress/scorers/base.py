"""The input and output of every scorer. A new scorer overrides one method.

Each file holds one method, named after its paper. Shape letters: `H` KV heads · `Q` query heads ·
`G = Q/H` · `C` tokens of the chunk · `D` head dim · `T` tokens of the repeat pass. Query heads `h·G
… h·G + G - 1` read KV head `h`, as everywhere in Transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from tangram.compress.provenance import ModelFingerprint
from tangram.config import Scope
from tangram.errors import ConfigError, IntegrityError
from tangram.types import Geometry, Int64

Value = TypeVar("Value")
Tokens = Sequence[int]
Encode = Callable[[str], Tokens]  # a text's tokens, without special ones


@dataclass(frozen=True)
class Reconstruction:
    """KVzip's second pass over one chunk in one layer: the repeat prompt, then the repeated chunk.

    `queries` [Q, T, D] and `keys` [H, T, D] are post-RoPE and belong to the same T tokens.
    """

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class ChunkView:
    """One full chunk in one layer, as a scorer sees it.

    All tensors lie on one device, in the model's dtype. `queries` [Q, C, D] and `keys` [H, C, D]
    are post-RoPE; `values` is [H, C, V]. V is D, and less where entries are latents: these are the
    keys, their first elements the values, and queries are those of latents. `start` is the position
    of the chunk's first token in the sequence, a multiple of C; `layer` counts all layers. The
    model multiplies q·k with `scaling`.

    `rotary`, present when the scorer needs "rotary", maps positions, int64 [n], to (cos, sin), each
    [n, D_rot], in the half-rotation convention: dimension i rotates with i + D_rot/2. D_rot may be
    smaller than D (partial RoPE), and cos, sin may carry a factor (YaRN). `hidden` [C, hidden] is
    the input of the attention module, present when the scorer needs "hidden". `reconstruction` is
    present when the scorer needs "reconstruction". `sink_keys` [H, s, D] are the post-RoPE keys of
    the sequence's first s tokens, which every head keeps; present when `start` > 0 for KVzip.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    start: int
    layer: int
    scaling: float
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    hidden: Tensor | None = None
    reconstruction: Reconstruction | None = None
    sink_keys: Tensor | None = None

    @property
    def tokens(self) -> int:
        """C, the tokens of the chunk."""
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        """H, the KV heads of the layer."""
        return self.keys.shape[0]


class Scorer(ABC):
    """A method that scores each KV entry of a chunk.

    `name` is what users write. `needs` names what the engine must gather beyond queries, keys and
    values: "hidden", "reconstruction", "rotary". Scores depend on the chunk alone, so that a cached
    chunk is valid in every sequence.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    # Which heads compete by the scores by default.
    scope: ClassVar[Scope] = "model"
    # Whether a token's score depends on its own activations alone, not on its position or on other
    # tokens: then the tokens of several chunks can be scored as if they were one.
    by_token: ClassVar[bool] = False
    # Whether the method takes the file of a trained gate.
    takes_gate: ClassVar[bool] = False
    # The kernel of a backend that computes the same of `kernel_inputs`, for several chunks.
    kernel: ClassVar[str | None] = None
    # What the method reads of each head that latents do not have; None if it serves them.
    reads_of_heads: ClassVar[str | None] = None

    @classmethod
    def create(cls, gate: Path | None, model: ModelFingerprint | None) -> Self:
        """This method for `model`, with its default parameters.

        `gate` is the file of its gate. Raises `ConfigError` for one that it does not take, or if
        it lacks one.
        """
        if gate is not None:
            raise ConfigError(
                f"gate is {str(gate)!r}, scorer {cls.name} takes none: leave it out or choose "
                "fastkvzip"
            )
        return cls()

    @property
    def fewest_tokens(self) -> int:
        """The shortest chunk this method can score."""
        return 1

    def count_queries(self, chunk_tokens: int) -> int:
        """How many of a chunk's queries this method reads at most: its last ones."""
        return chunk_tokens

    def check_tokens(self, chunk_tokens: int) -> None:
        """Raise `ConfigError` if a chunk of `chunk_tokens` is too short."""
        if chunk_tokens < self.fewest_tokens:
            raise ConfigError(
                f"chunk_tokens is {chunk_tokens}, scorer {self.name} needs at least "
                f"{self.fewest_tokens}: raise chunk_tokens or choose another scorer"
            )

    @classmethod
    def check_geometry(cls, geometry: Geometry) -> None:
        """Raise `ConfigError` if the model has latent attention and this method cannot serve it."""
        if geometry.value_dim is not None and cls.reads_of_heads is not None:
            raise ConfigError(
                f"scorer is {cls.name!r}, which reads {cls.reads_of_heads}; the model has latent "
                f"attention, where all heads of a layer share entries of {geometry.head_dim} "
                "elements: choose another scorer, such as keydiff"
            )

    @property
    def trained_for(self) -> ModelFingerprint | None:
        """The model that this method was trained for; None if untrained or unknown."""
        return None

    def check_model(self, fingerprint: ModelFingerprint) -> None:
        """Raise `ConfigError` if this method was trained for another model than `fingerprint`."""
        wrong = self.trained_for.mismatches(fingerprint, "the gate") if self.trained_for else []
        if wrong:
            raise ConfigError(
                f"the gate of scorer {self.name} was trained for another model: "
                f"{'; '.join(wrong)}. Train one for this model with `tangram calibrate "
                "--train-gate`, or choose another scorer"
            )

    def of_heads(self, heads: Int64) -> Scorer:
        """This method for the KV heads `heads` [L, h] of each layer, which is all that it will see.

        Raises `ConfigError` if scores depend on other heads.
        """
        return self

    @abstractmethod
    def score(self, chunk: ChunkView) -> Tensor:
        """Return [H, C] float32 scores, higher = keep. Must not change the chunk's tensors."""

    def kernel_inputs(self, chunks: ChunkView, count: int) -> tuple[Any, ...]:
        """What `kernel` is given of `count` chunks (N) at a time: the keys here.

        It returns float32 [N, H, C]. `chunks` are as if they were one.
        """
        return (torch.unflatten(chunks.keys, 1, (count, -1)).transpose(0, 1),)

    def repeat_tokens(
        self, encode: Encode, chunk: Tokens, previous: Tokens | None = None, suffix: Tokens = ()
    ) -> list[int]:
        """The T tokens of the second pass over `chunk`, for a method that needs "reconstruction".

        `previous` is the chunk before, None for the first. `suffix` closes the user's turn in the
        model's chat template (a newline if the model has none).
        """
        raise IntegrityError(f"scorer {self.name} has no second pass")

    def parameters(self) -> dict[str, float | int]:
        """Everything but the name that changes scores: it goes into the profile's fingerprint.

        The fields of a dataclass by default. A scorer that keeps its options elsewhere must
        override this.
        """
        return (
            {field.name: getattr(self, field.name) for field in fields(self)}
            if is_dataclass(self)
            else {}
        )


def require(value: Value | None, what: str, scorer: Scorer) -> Value:
    """`value`, or `IntegrityError` if the engine did not gather what `scorer` needs."""
    if value is None:
        raise IntegrityError(f"scorer {scorer.name} was given a chunk without {what}")
    return value
