"""Forward passes of one model over the rows of one batcher.

While serving, only this module calls the model; `memory.py` calls it once at the start, to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import Row, RowKind
from tangram.engine.batcher import Batcher
from tangram.engine.graphs import PassGraphs
from tangram.engine.meters import Meters
from tangram.kernels.transfer import place
from tangram.model.attention import AttentionContext, StepAttention
from tangram.model.load import LoadedModel
from tangram.types import Int64

# Writes tokens that only the device knows into tokens [T].
Carry = Callable[[Tensor], object]


@dataclass(frozen=True)
class Flattened:
    """The flattened batch of a pass: int64 `tokens` and `positions` [T].

    `ends` [R] are the places of each row's last token. The model's token behind each of `sampled`
    [n] is chosen: behind all tokens of a DECODE row, behind the last one of another.
    """

    tokens: Int64
    positions: Int64
    ends: Int64
    sampled: Int64


class Passes:
    """Runs forward passes of `loaded` over rows whose attention `batcher` builds.

    With `graphs` passes that only decode, and single prefill rows, are replayed as CUDA graphs.
    """

    def __init__(
        self, loaded: LoadedModel, batcher: Batcher, meters: Meters, *, graphs: bool = False
    ) -> None:
        self.batcher = batcher
        self._loaded, self._meters = loaded, meters
        self.graphs = PassGraphs(self.forward, loaded.device) if graphs else None

    def logits(
        self,
        rows: Sequence[Row],
        epoch: int,
        carry: Callable[[Sequence[Row], Int64], Carry],
        *,
        replayed: bool,
    ) -> tuple[StepAttention, Tensor]:
        """The attention of one pass, and logits [n, V] of the tokens behind which one is sampled.

        If `replayed`, by a graph that fits it; the logits are valid until the next pass. `carry` of
        the rows and their ends returns what writes tokens that only the device knows.
        """
        begun = self.begin(rows, epoch, carry, replayed=replayed)
        return begun.attention, begun.logits()

    def begin(
        self,
        rows: Sequence[Row],
        epoch: int,
        carry: Callable[[Sequence[Row], Int64], Carry],
        *,
        replayed: bool,
    ) -> BegunPass:
        """What `logits` computes, ready on the device."""
        attention = self.batcher.attention(rows, epoch, padded=replayed)
        flat = flatten(rows, attention)
        replayed = replayed and bool(attention.width or attention.padded_tokens)
        graphs, wanted = self.graphs if replayed else None, flat.sampled
        if graphs is not None:  # it needs the same places in every pass
            wanted = np.arange(attention.width) if attention.width else flat.ends
        sizes = [len(part) for part in (flat.tokens, flat.positions, wanted)]
        (inputs,) = self.upload(np.concatenate([flat.tokens, flat.positions, wanted]))
        carry(rows, flat.ends)(inputs[: sizes[0]])
        return BegunPass(self, attention, graphs, inputs, sizes, len(flat.sampled))

    def forward(
        self, attention: AttentionContext, tokens: Tensor, positions: Tensor, wanted: Tensor
    ) -> Tensor:
        """Logits [n, V] of the tokens `wanted` [n] of the flattened batch.

        `tokens` and `positions` are [T]. All three are int64.
        """
        # A GPU only queues the work here; a CPU does it.
        with self._meters.waiting() if tokens.is_cpu else nullcontext():
            output = self._loaded.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=wanted,
                tangram=attention,
            )
        logits: Tensor = output.logits[0]
        return logits

    def upload(self, *arrays: Int64) -> list[Tensor]:
        """The arrays on the model's device, in their shapes and dtype."""
        return [place(array, self._loaded.device) for array in arrays]

    @torch.inference_mode()
    def rehearse_decode(self, rows: int) -> None:
        """Run all kernels of decode passes of `rows` rows, before serving."""
        for attention in self.batcher.rehearsals(rows):
            nothing = np.zeros(attention.width, np.int64)
            self.forward(attention, *self.upload(nothing, nothing, np.arange(attention.width)))

    @torch.inference_mode()
    def capture_prefill(self) -> None:
        """Capture the graphs of single prefill rows of the default ρ, before serving."""
        for row in self.batcher.typical() if self.graphs is not None else ():
            self.logits((row,), 0, carry_nothing, replayed=True)

    @torch.inference_mode()
    def capture(
        self, rows: int, track: Callable[[Sequence[int]], Iterable[int]], queries: int = 1
    ) -> None:
        """Capture the graphs of decode passes of up to `rows` tokens, before serving.

        A sequence has up to `queries` of them. `track` wraps the widths. Where `queries` is 1,
        steps whose sequences share prefixes have graphs of their own.
        """
        if self.graphs is None:
            return
        counts = range(queries, rows + 1)
        widths = {self.batcher.kernels.width(count, queries) for count in counts}
        # The largest first: the others fit into its memory.
        for width in track(sorted(widths, reverse=True)):
            for shares in (False, True) if queries == 1 and width > 1 else (False,):
                attention = self.batcher.rehearse(min(width, rows), queries, shares=shares)
                if self.batcher.kernels.captured is None:
                    return
                nothing = np.zeros(2 * attention.width, np.int64)
                (inputs,) = self.upload(np.concatenate([nothing, np.arange(attention.width)]))
                self.graphs.logits(inputs, [attention.width] * 3, attention)


@dataclass(frozen=True, eq=False)
class BegunPass:
    """A pass whose `inputs` are on the device: tokens, positions and wanted places, of `sizes`.

    `sampled` of the wanted places are those behind which a token is chosen.
    """

    passes: Passes
    attention: StepAttention
    graphs: PassGraphs | None
    inputs: Tensor
    sizes: list[int]
    sampled: int

    def logits(self) -> Tensor:
        """Logits [sampled, V]. They are valid until the next pass: graphs share their memory."""
        if self.graphs is None:
            return self.passes.forward(self.attention, *torch.split(self.inputs, self.sizes))
        return self.graphs.logits(self.inputs, self.sizes, self.attention)[: self.sampled]

    def advance(self, slots: Tensor, tokens: Tensor, growth: Tensor) -> None:
        """Its rows, one token in each of `slots` [n], continue with `tokens` int64 [n].

        Where `growth` int32 [n] is 0 instead of 1, the next pass repeats the last one.
        """
        own, positions, _ = torch.split(self.inputs, self.sizes)
        rows = len(slots)
        own[:rows].copy_(torch.where(growth > 0, tokens, own[:rows]))
        positions[:rows].add_(growth)
        self.passes.batcher.advance(slots, growth)


def carry_nothing(rows: Sequence[Row], ends: Int64) -> Carry:
    """For passes whose tokens are all known on the host."""
    return lambda tokens: None


def flatten(rows: Sequence[Row], attention: StepAttention) -> Flattened:
    """The flattened batch of `rows`.

    Decode rows are padded to the width of `attention`, a row with a `PaddedShape` to its tokens.
    """
    decode = RowKind.DECODE
    decode_rows = sum([row.kind is decode for row in rows])
    tokens = [row.tokens for row in rows]
    counts = np.array([len(own) for own in tokens])
    ends = np.cumsum(counts) - 1
    decoded = int(counts[:decode_rows].sum())
    fill = np.zeros(attention.width - decoded, np.int64)
    # A token's place in the batch, moved to where its row starts.
    places = np.arange(counts.sum())
    places += np.repeat([row.start for row in rows] - (ends + 1 - counts), counts)
    positions = [places[:decoded], places[decoded:]]
    ends[decode_rows:] += len(fill)
    beyond = np.zeros(
        0 if attention.padded_tokens is None else attention.padded_tokens - ends[-1] - 1, np.int64
    )
    tokens.insert(decode_rows, fill)
    positions.insert(1, fill)
    for parts in (tokens, positions):
        parts.append(beyond)
    sampled = [
        end for row, end in zip(rows[decode_rows:], ends[decode_rows:], strict=True) if row.sample
    ]
    wanted = np.concatenate([np.arange(decoded), np.asarray(sampled, np.int64)])
    return Flattened(np.concatenate(tokens), np.concatenate(positions), ends, wanted)
