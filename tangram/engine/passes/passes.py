"""Runs forward passes of one model.

While serving, only this module calls the model; `memory.py` calls it once at the start, to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import Row, RowKind, Step
from tangram.compress.scorers import Scorer
from tangram.engine.passes.batcher import Batcher
from tangram.engine.passes.device_tables import DeviceTables
from tangram.engine.passes.forward_pass import Pass, PlannedStep, seals_of
from tangram.engine.passes.graphs import PassGraphs
from tangram.engine.passes.meters import Meters
from tangram.kernels.interface import Launch, PoolKernels
from tangram.kernels.offload.host_forms import HostForm
from tangram.kernels.transfer import upload
from tangram.model.attention import AttentionContext, RepeatAttention, StepAttention
from tangram.model.load import LoadedModel
from tangram.model.recurrent import StateMemory
from tangram.model.sealing import ChunkSealer, Sealing
from tangram.types import Int32, Int64

# Prefill rows that get a pass of their own, and their tokens. Graphs launch such passes faster than
# the host launches one for all. With more rows the device is busy so long that it does not matter
# (H200).
MOST_APART, MOST_TOKENS_APART = 4, 2048

# Writes tokens that only the device knows into tokens [T].
Carry = Callable[[Tensor], object]


class Passes:
    """Runs passes of `loaded` that `batcher` builds for `kernels`, over the block `tables`.

    `sealing` scores and seals chunks; these are rounded to `form`. With `graphs` passes that only
    decode, and single prefill rows, are replayed as CUDA graphs. `states` are those of recurrent
    layers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        batcher: Batcher,
        kernels: PoolKernels,
        tables: DeviceTables,
        sealing: Sealing,
        meters: Meters,
        *,
        form: HostForm | None = None,
        graphs: bool = False,
        states: StateMemory | None = None,
    ) -> None:
        self.batcher, self.kernels, self.tables = batcher, kernels, tables
        self.sealing, self.form, self.states = sealing, form, states
        self._loaded, self._meters = loaded, meters
        self.graphs = PassGraphs(self.forward, loaded.device) if graphs else None

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._loaded.device

    def plan(self, step: Step) -> PlannedStep:
        """The forward passes of `step`, whose pages the scheduler has taken.

        All rows go in one, unless there are graphs and few prefill rows. Then the decode rows go in
        one, and each prefill row in a pass of its own, which a graph may replay.
        """
        decode, rest = step.rows[: step.decode_rows], step.rows[step.decode_rows :]
        if not self.takes_apart(rest):
            return PlannedStep(step, (self.batcher.build(step.rows, step.epoch),))
        parts = [rows for rows in (decode, *((row,) for row in rest)) if rows]
        return PlannedStep(step, tuple(self._build_apart(rows, step.epoch) for rows in parts))

    def _build_apart(self, rows: Sequence[Row], epoch: int) -> Pass:
        """The pass of decode rows or of one other, which is padded.

        A tail with a state is not: what pads it would be a part of the state behind it.
        """
        padded = self.states is None or rows[0].kind is not RowKind.TAIL
        return self.batcher.build(rows, epoch, padded=padded)

    def takes_apart(self, rows: Sequence[Row]) -> bool:
        """Whether each of these prefill rows is a pass of its own, which a graph can replay."""
        if self.graphs is None:
            return False
        if not rows:
            return True
        if any(row.targets is not None for row in rows):  # graphs have few logits
            return False
        few = len(rows) <= MOST_APART and sum(len(row.tokens) for row in rows) <= MOST_TOKENS_APART
        if not few or self._meters.overflow is not None:
            return False
        return self.sealing.replayable(seals_of(rows))

    def begin(self, work: Pass, carry: Carry) -> BegunPass:
        """`work`, ready on the device, to be replayed by a graph if one fits it.

        `carry` writes tokens that only the device knows.
        """
        launch, width = self._launch(work), work.addresses.width
        shape, graphs, wanted = launch.shape, None, work.wanted
        if shape is not None or width == len(work.tokens):
            graphs = self.graphs
        if graphs is not None:  # it needs the same places in every pass
            wanted = np.arange(width) if width else work.ends
        beyond = np.zeros(0 if shape is None else shape.tokens - len(work.tokens), np.int64)
        parts = [work.tokens, beyond, work.positions, beyond, wanted]
        (inputs,) = self.upload(np.concatenate(parts))
        tokens = len(work.tokens) + len(beyond)
        carry(inputs[:tokens])
        return BegunPass(self, work, launch, graphs, inputs, [tokens, tokens, len(wanted)])

    def _launch(self, work: Pass) -> Launch:
        return self.kernels.launch(work.addresses, self.tables.flat())

    def attention(self, work: Pass, launch: Launch) -> StepAttention:
        """The attention of `work`."""
        return StepAttention(
            launch,
            self._loaded.geometry,
            work.addresses.width,
            work.addresses.prefill.spans,
            self.sealing.sealers(work.seals),
            self._meters.sealing,
            self.form,
            work.sealed_tokens,
            None if self.states is None else self.states.of_pass(work.rows, work.addresses.width),
        )

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
                past_key_values=attention.states,
                use_cache=False,
                logits_to_keep=wanted,
                tangram=attention,
            )
        logits: Tensor = output.logits[0]
        return logits

    def finish(self, work: Pass, attention: StepAttention) -> None:
        """Keep snapshots of states; then the second pass of scorers that make the model repeat a
        chunk (KVzip, section 3).
        """
        if attention.states is not None:
            attention.states.save()
        for sealer in attention.sealers:
            if isinstance(sealer, ChunkSealer) and sealer.pending:
                repeat = work.repeating(sealer.number, self._repetition(sealer.scorer, sealer.row))
                launch, sealing = self._launch(repeat), self._meters.sealing
                repetition = RepeatAttention(launch, self._loaded.geometry, sealer, sealing)
                if self.states is not None:
                    tokens = len(repeat.tokens)
                    repetition.states = self.states.of_repetition(sealer.row, tokens)
                parts = repeat.tokens, repeat.positions, repeat.wanted
                self.forward(repetition, *self.upload(*parts))

    def _repetition(self, scorer: Scorer, row: Row) -> Int64:
        encode = partial(self._loaded.tokenizer.encode, add_special_tokens=False)
        preceding = row.preceding.tolist() if row.start else None
        tokens = scorer.repeat_tokens(encode, row.tokens.tolist(), preceding, encode("\n"))
        return np.asarray(tokens, np.int64)

    def upload(self, *arrays: Int64) -> list[Tensor]:
        """The arrays on the model's device, in their shapes and dtype."""
        return [upload(array, self._loaded.device) for array in arrays]

    @torch.inference_mode()
    def rehearse_decode(self, rows: int) -> None:
        """Run all kernels of decode passes of `rows` rows, before serving."""
        for queries in self.batcher.queries:
            work = self.batcher.rehearsal(rows, queries)
            inputs = self.upload(work.tokens, work.positions, work.wanted)
            for launch in self.kernels.rehearse(work.addresses, self.tables.flat()):
                self.forward(self.attention(work, launch), *inputs)

    @torch.inference_mode()
    def capture_prefill(self) -> None:
        """Capture the graphs of single prefill rows of the default ρ, before serving."""
        for row in self.batcher.typical():
            if self.takes_apart((row,)):
                self.begin(self._build_apart((row,), 0), carry_nothing).logits()

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
        widths = {self.kernels.width(count, queries) for count in counts}
        # The largest first: the others fit into its memory.
        for width in track(sorted(widths, reverse=True)):
            for shares in (False, True) if queries == 1 and width > 1 else (False,):
                work = self.batcher.rehearsal(min(width, rows), queries, shares=shares)
                begun = self.begin(work, carry_nothing)
                if begun.launch.shape is None:
                    return
                begun.logits()


@dataclass(frozen=True, eq=False)
class BegunPass:
    """`work` on the device: its `inputs` are tokens, positions and wanted places, of `sizes`.

    `graphs` replay it, unless they are None.
    """

    passes: Passes
    work: Pass
    launch: Launch
    graphs: PassGraphs | None
    inputs: Tensor
    sizes: list[int]

    def logits(self) -> Tensor:
        """Logits [n, V] of the places `wanted` of the pass, whose chunks are sealed then.

        They are valid until the next pass: graphs share their memory.
        """
        attention = self.passes.attention(self.work, self.launch)
        if self.graphs is None:
            logits = self.passes.forward(attention, *torch.split(self.inputs, self.sizes))
        else:
            logits = self.graphs.logits(self.inputs, self.sizes, attention)
        self.passes.finish(self.work, attention)
        return logits[: len(self.work.wanted)]

    def follow(self, tokens: Tensor, growth: Int32) -> BegunPass:
        """The pass behind this one, in which its rows go on with `tokens` int64 [n], one each.

        Where `growth` [n] is 0 instead of 1, it repeats this one.
        """
        last = self.inputs[: len(growth)]
        if not growth.all():
            (grows,) = self.passes.upload(growth.astype(np.int64))
            tokens = torch.where(grows > 0, tokens, last)
        following = self.work.followed_by(growth)
        return self.passes.begin(following, lambda inputs: inputs[: len(growth)].copy_(tokens))


def carry_nothing(tokens: Tensor) -> None:
    """For passes whose tokens are all known on the host."""
