"""Compute a step and sample its tokens. This is the only module that calls the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind, Step
from tangram.compress.scorers import Scorer
from tangram.compress.scorers.kvzip import repeat_tokens
from tangram.engine.batcher import Batcher, DeviceTables
from tangram.engine.graphs import Carry, PassGraphs
from tangram.engine.meters import Meters
from tangram.engine.sampling import SampledTokens, SampleRow, choose
from tangram.kernels.dispatch import host_memory, pool_kernels
from tangram.kernels.interface import KernelChoice
from tangram.kernels.stopwatch import Stopwatch
from tangram.kernels.transfer import place
from tangram.model.attention import AttentionContext, StepAttention
from tangram.model.load import LoadedModel
from tangram.model.overflow import Overflow
from tangram.model.rotary import model_rotary
from tangram.model.sealing import ChunkSealer, ScoreObserver
from tangram.types import Int32, Int64


class Runner:
    """Runs steps of one model over one pool, [pages, Hp, 2, P, D] of `cache_dtype`.

    `cache` manages the pool's pages and its host memory. `scorer` scores the chunks of `scored`
    retentions. `graphs` runs passes that only decode, and those of few prefill rows, as CUDA
    graphs. `cache_dtype` None is the model's own. `meters` measure, including `overflow` if it is
    set.
    """

    batcher_type: type[Batcher] = Batcher

    def __init__(
        self,
        loaded: LoadedModel,
        retentions: Sequence[Retention],
        scorer: Scorer | None,
        *,
        pages: int,
        cache: CacheManager,
        observer: ScoreObserver | None = None,
        kernels: KernelChoice = pool_kernels,
        graphs: bool = False,
        cache_dtype: torch.dtype | None = None,
        overflow: Overflow | None = None,
        most_drafted: int = 0,
    ) -> None:
        self._loaded = loaded
        self.meters = Meters(Stopwatch(loaded.device), overflow)
        layout = retentions[0].layout
        shape = (pages, layout.heads_per_page, 2, layout.page_tokens, layout.geometry.head_dim)
        self.pool = torch.empty(shape, dtype=cache_dtype or loaded.dtype, device=loaded.device)
        needs_rotary = scorer is not None and "rotary" in scorer.needs
        rotary = model_rotary(loaded.model, layout.geometry.head_dim) if needs_rotary else None
        serving = kernels(self.pool, layout.geometry.group_size)
        block_tables = DeviceTables(cache, loaded.device)
        self._host = host_memory(self.pool, cache.host.total)
        self._batcher = self.batcher_type(
            retentions, scorer, serving, cache, block_tables, rotary, self.meters, observer
        )
        self._batcher.most_drafted = most_drafted
        self._graphs = PassGraphs(self._forward, loaded.device) if graphs else None
        nothing = torch.empty(0, dtype=torch.int64, device=loaded.device)
        self._chosen = dict[int, int](), nothing

    @torch.inference_mode()
    def run(
        self,
        step: Step,
        sample_rows: Sequence[SampleRow],
        before_choosing: Callable[[], object] = lambda: None,
    ) -> SampledTokens | None:
        """Compute `step` and choose a token for each of its rows with `sample`.

        `sample_rows` are theirs, in order. A GPU continues while the host does something else.
        Tokens that are `pending` in a row come from the last step. `before_choosing` is called when
        all but the choice is launched.
        """
        self._host.move(step.moves, awaited=step.awaited)
        passes = self._batcher.passes(step, graphs=self._graphs is not None)
        found = [self._pass(rows, step.epoch, replayed) for rows, replayed in passes]
        logits = found[0] if len(found) == 1 else torch.cat(found)
        before_choosing()
        choice = choose(logits, sample_rows) if sample_rows else None
        if choice is not None:
            slots = [row.slot for row in step.rows if row.sample]
            self._chosen = {slot: place for place, slot in enumerate(slots)}, choice.tokens
            for sample_row, token in zip(sample_rows, choice.tokens[:, None].unbind(), strict=True):
                sample_row.append(token)
        return choice

    def _pass(self, rows: Sequence[Row], epoch: int, replayed: bool) -> Tensor:
        """Logits [rows that sample, V] of one pass; if `replayed`, by a graph that fits it."""
        attention = self._batcher.attention(rows, epoch, padded=replayed)
        tokens, positions, ends = _flatten(rows, attention)
        sampled, carried = ends[[row.sample for row in rows]], self._carry(rows, ends)
        if replayed and self._graphs is not None and (attention.width or attention.padded_tokens):
            # A graph needs the same places in every pass, and its next pass overwrites its logits.
            wanted = np.arange(attention.width) if attention.width else ends
            logits = self._graphs.logits(tokens, positions, wanted, attention, carried)
            logits = logits[: len(sampled)] if attention.width else logits[: len(sampled)].clone()
        else:
            inputs, places = self._upload(tokens, positions)
            carried(inputs)
            logits = self._forward(attention, inputs, places, *self._upload(sampled))
        self._finish(attention)
        return logits

    @torch.inference_mode()
    def clear(self, pages: Int32) -> None:
        """Fill `pages` [n] of the pool with zeros, after the device's queued work."""
        if len(pages):
            self.pool.view(torch.uint8).index_fill_(
                0, place(pages.astype(np.int64), self.pool.device), 0
            )

    @torch.inference_mode()
    def tail_logits(self, step: Step) -> Tensor:
        """Compute `step`; logits [n, V] of all tokens of its TAIL rows, in their order.

        Nothing may be pending.
        """
        self._host.move(step.moves, awaited=step.awaited)
        attention = self._batcher.attention(step.rows, step.epoch)
        tokens, positions, ends = _flatten(step.rows, attention)
        wanted = [
            np.arange(end - len(row.tokens), end) + 1
            for row, end in zip(step.rows, ends, strict=True)
            if row.kind is RowKind.TAIL
        ]
        logits = self._forward(attention, *self._upload(tokens, positions, np.concatenate(wanted)))
        self._finish(attention)
        return logits

    def _finish(self, attention: StepAttention) -> None:
        """Complete the sealed chunks when the model has run."""
        self._reconstruct(attention)

    @torch.inference_mode()
    def rehearse(self, decode_rows: int, tokens: int) -> None:
        """Run all kernels of steps of up to `tokens` tokens and `decode_rows` rows, before serving.

        The longest first: Inductor sizes the blocks of a kernel by the first tensors that it sees.
        """
        self._rehearse_prefill(tokens)
        for attention in self._batcher.rehearsals(decode_rows):
            nothing = np.zeros(attention.width, np.int64)
            self._forward(attention, *self._upload(nothing, nothing, np.arange(attention.width)))

    def _rehearse_prefill(self, tokens: int) -> None:
        for retention in self._batcher.retentions:
            for rows in _runs_of_chunks(retention, tokens):
                self.run(Step(rows, epoch=0), [])
            self.run(Step((_make_row(RowKind.TAIL, retention, 0, 2),), epoch=0), [])

    @torch.inference_mode()
    def capture(self, rows: int, track: Callable[[Sequence[int]], Iterable[int]]) -> None:
        """Capture the graphs of decode steps of up to `rows` rows, before serving.

        `track` wraps the widths. Graphs of single prefill rows of the default ρ are captured, too.
        """
        if self._graphs is None:
            return
        for row in self._batcher.typical():
            self._pass((row,), epoch=0, replayed=True)
        widths = {self._batcher.kernels.width(count) for count in range(1, rows + 1)}
        # The largest first: the others fit into its memory.
        for width in track(sorted(widths, reverse=True)):
            attention = self._batcher.rehearse(min(width, rows))
            if self._batcher.kernels.captured is None:
                return
            nothing = np.zeros(attention.width, np.int64)
            self._graphs.logits(
                nothing, nothing, np.arange(attention.width), attention, lambda tokens: None
            )

    def _carry(self, rows: Sequence[Row], ends: Int64) -> Carry:
        """Returns a function that writes the last step's tokens into those of a pass of `rows`."""
        pending = [number for number, row in enumerate(rows) if row.pending]
        if not pending:
            return lambda tokens: None
        place_of, chosen = self._chosen
        places = np.stack([ends[pending], [place_of[rows[number].slot] for number in pending]])
        target, source = place(places, self._loaded.device)
        return lambda tokens: tokens.index_copy_(0, target, chosen.index_select(0, source))

    def _upload(self, *arrays: Int64) -> list[Tensor]:
        return [place(array, self._loaded.device) for array in arrays]

    def _forward(
        self, attention: AttentionContext, tokens: Tensor, positions: Tensor, wanted: Tensor
    ) -> Tensor:
        """Logits [len(wanted), V] of the tokens `wanted` of the flattened batch."""
        # A GPU only queues the work here; a CPU does it.
        with self.meters.waiting() if tokens.is_cpu else nullcontext():
            output = self._loaded.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=wanted,
                tangram=attention,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _reconstruct(self, attention: StepAttention) -> None:
        """The second pass of scorers that make the model repeat a chunk (KVzip, section 3)."""
        for sealer in attention.sealers:
            if isinstance(sealer, ChunkSealer) and sealer.pending:
                row, tokens = sealer.row, self._repetition(sealer.row)
                positions = row.start + len(row.tokens) + np.arange(len(tokens))
                repeat = self._batcher.repetition(attention, sealer, len(tokens))
                self._forward(repeat, *self._upload(tokens, positions, np.zeros(0, np.int64)))

    def _repetition(self, row: Row) -> Int64:
        encode = partial(self._loaded.tokenizer.encode, add_special_tokens=False)
        preceding = row.preceding.tolist() if row.start else None
        return np.asarray(
            repeat_tokens(encode, row.tokens.tolist(), preceding, encode("\n")), np.int64
        )


def _runs_of_chunks(retention: Retention, tokens: int) -> Iterator[tuple[Row, ...]]:
    """All chunks of a step in sequence, and one alone, as prompts may begin uncompressed."""
    layout = retention.layout
    chunk, most = layout.chunk_tokens, layout.max_tokens // layout.chunk_tokens
    rows = tuple(_make_row(RowKind.SEAL, retention, at * chunk, chunk) for at in range(most))
    longest = min(max(1, tokens // chunk), most)
    any_length = layout.keeps_everything and not layout.window_chunks
    yield from (
        rows[:count] for count in range(longest, 0, -1) if any_length or count in (longest, 1)
    )
    if most > 1:
        yield rows[1:2]


def _make_row(kind: RowKind, retention: Retention, start: int, tokens: int) -> Row:
    nothing = np.zeros(0, np.int64)
    return Row("", 0, retention, kind, start, np.zeros(tokens, np.int64), nothing, sample=False)


def _flatten(rows: Sequence[Row], attention: StepAttention) -> tuple[Int64, Int64, Int64]:
    """Tokens and positions of `rows`, and where each of them ends.

    Decode rows are padded to the width of `attention`, a row with a `PaddedShape` to its tokens.
    """
    decode_rows = sum(row.kind is RowKind.DECODE for row in rows)
    fill = np.zeros(attention.width - decode_rows, np.int64)
    tokens = [row.tokens for row in rows]
    positions = [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
    ends = np.cumsum([len(own) for own in tokens]) - 1
    ends[decode_rows:] += len(fill)
    beyond = np.zeros(
        0 if attention.padded_tokens is None else attention.padded_tokens - ends[-1] - 1, np.int64
    )
    for parts in (tokens, positions):
        parts.insert(decode_rows, fill)
        parts.append(beyond)
    return np.concatenate(tokens), np.concatenate(positions), ends
