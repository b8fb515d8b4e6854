"""Compute a step and sample its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tangram.cache.part_tables import PartTables
from tangram.cache.retention import Retention
from tangram.cache.step import Row, RowKind, Step
from tangram.compress.entry_scales import join_scales
from tangram.compress.scorers import Scorer
from tangram.engine.passes.batcher import Batcher
from tangram.engine.passes.device_tables import BlockTables, DeviceTables
from tangram.engine.passes.forward_pass import Pass, PlannedStep
from tangram.engine.passes.meters import Meters
from tangram.engine.passes.passes import Carry, Passes
from tangram.engine.passes.recorder import POOL_SHARE, KeptRecorder
from tangram.engine.passes.saved_pass import PassSaver
from tangram.engine.sampling.sampler import PromptScores, SampledTokens, SampleRow, choose
from tangram.kernels.dispatch import host_memory, pool_kernels
from tangram.kernels.interface import KernelChoice, KvPool, PoolKernels
from tangram.kernels.layered import LayeredKernels
from tangram.kernels.narrow import NARROW, stored_scales
from tangram.kernels.offload.host_forms import HostForm
from tangram.kernels.offload.host_memory import LinkWriter
from tangram.kernels.pool_memory import allocate_pool
from tangram.kernels.stopwatch import Stopwatch
from tangram.kernels.transfer import upload
from tangram.model.load import LoadedModel
from tangram.model.recurrent import JOINED_TOKENS, MIXER_TOKENS, StateMemory
from tangram.model.rotary import layer_rotaries
from tangram.model.sealing import ScoreObserver, Sealing
from tangram.types import Int32


@dataclass(frozen=True)
class RunnerSettings:
    """The pool of a `Runner`, and how it computes.

    The pool has so many `pages`, in `cache_dtype` or the model's own; `host_pages` lie behind it,
    in `form`, and `disk` writes links. `graphs` runs passes that only decode, and those of few
    prefill rows, as CUDA graphs.
    `queries` are the numbers of tokens that a decode row may have. `meters` measure: those given,
    or new ones. `observer` is told the scores of chunks. With `records`, kept positions of up to so
    many chunks of a pass are noted (`recorder`). `saver` of the pool saves passes that fail.
    """

    pages: int
    host_pages: int = 0
    cache_dtype: torch.dtype | None = None
    form: HostForm | None = None
    disk: LinkWriter | None = None
    kernels: KernelChoice = pool_kernels
    graphs: bool = False
    queries: Sequence[int] = (1,)
    meters: Meters | None = None
    observer: ScoreObserver | None = None
    records: int = 0
    saver: Callable[[Tensor], PassSaver] | None = None


class Runner:
    """Runs steps of one model over one pool, [pages, Hp, S, P, D].

    `cache` has the pool's block tables. `scorers` have those that the retentions name. A pool of 8
    bits has the largest scales of all `retentions`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        retentions: Sequence[Retention],
        scorers: Mapping[str, Scorer],
        cache: BlockTables,
        settings: RunnerSettings,
    ) -> None:
        self._loaded, self._choose_kernels = loaded, settings.kernels
        given, form, records = settings.meters, settings.form, settings.records
        self.meters = Meters(Stopwatch(loaded.device)) if given is None else given
        layout = retentions[0].layout
        geometry = layout.geometry
        entries = geometry.entry_vectors, layout.page_tokens, geometry.head_dim
        shape = (settings.pages, layout.heads_per_page, *entries)
        dtype = settings.cache_dtype or loaded.dtype
        self.pool = allocate_pool(shape, dtype, loaded.device)
        for scorer in scorers.values():
            scorer.check_geometry(geometry)
        needs_rotary = any("rotary" in scorer.needs for scorer in scorers.values())
        rotaries = layer_rotaries(loaded.model, geometry, loaded.states) if needs_rotary else {}
        scales = join_scales(retention.scales for retention in retentions)
        self._scales = (
            stored_scales(torch.tensor(scales, device=loaded.device), self.pool.dtype)
            if scales is not None and self.pool.dtype in NARROW.values()
            else None
        )
        joins = self.pool.is_cuda and layout.chunk_tokens % MIXER_TOKENS == 0
        joined = JOINED_TOKENS if joins else 0
        self._states = (
            StateMemory(loaded.states, len(cache.tables), self.pool, joined)
            if loaded.states
            else None
        )
        self._host = host_memory(self.pool, settings.host_pages, form, settings.disk)
        limit = int(POOL_SHARE * self.pool.numel() * self.pool.itemsize)
        self.recorder = (
            KeptRecorder(retentions[0], records, loaded.device, limit) if records else None
        )
        serving = self._make_kernels(
            retentions[0], None if self.recorder is None else self.recorder.chosen
        )
        self.passes = Passes(
            loaded,
            Batcher(retentions, serving, cache, self.meters, settings.queries),
            serving,
            DeviceTables(cache, loaded.device),
            Sealing(scorers, serving, rotaries, settings.observer, self.meters.overflow),
            self.meters,
            form=form,
            graphs=settings.graphs,
            states=self._states,
        )
        self._saver = None if settings.saver is None else settings.saver(self.pool)
        nothing = torch.empty(0, dtype=torch.int64, device=loaded.device)
        self._chosen = dict[int, int](), nothing

    def plan(self, step: Step) -> PlannedStep:
        """`step` for `run`, by what the host knows; see `Passes.plan`."""
        return self.passes.plan(step)

    @torch.inference_mode()
    def run(
        self,
        planned: PlannedStep,
        sample_rows: Sequence[SampleRow],
        before_choosing: Callable[[], object] = lambda: None,
        asked: Sequence[int] = (),
    ) -> SampledTokens | None:
        """Compute `planned` and choose a token for each of its rows with `sample`.

        `sample_rows` are theirs, in order, one for each token of a decode row. Each gets its token.
        A GPU continues while the host does something else. Tokens that are `pending` in a row come
        from the last step, or are drafts. With drafts `sample_rows` get no tokens, since some are
        refused. `before_choosing` is called when all but the choice is launched. `asked` are the
        alternatives beside the `targets` of each row that has some; such a step is one pass.
        """
        step, passes, drafted = planned.step, planned.passes, planned.drafted
        self._host.move(step.moves, awaited=step.awaited)
        if self._states is not None:
            self._states.load(step.loads)
        found = list[Tensor]()
        for work in passes:
            begun = self.passes.begin(work, self._carry(work, drafted))
            logits = begun.logits() if self._saver is None else self._saver.logits(begun)
            if self.recorder is not None:
                self.recorder.note(work.prefill_rows)
            found.append(logits if len(passes) == 1 else logits.clone())
        logits = found[0] if len(found) == 1 else torch.cat(found)
        prompts = None
        if asked:
            targets = [row.targets for row in step.scored_rows if row.targets is not None]
            sampled = len(logits) - sum(map(len, targets))
            prompts = PromptScores(logits[sampled:], targets, asked)
            logits = logits[:sampled]
        before_choosing()
        choice = choose(logits, sample_rows) if sample_rows or asked else None
        if choice is not None and sample_rows:
            slots = [row.slot for row in step.rows if row.sample]
            self._chosen = {slot: place for place, slot in enumerate(slots)}, choice.tokens
            if drafted is None:
                self._append(sample_rows, choice.tokens)
        return choice if choice is None or prompts is None else replace(choice, prompts=prompts)

    def _make_kernels(self, retention: Retention, chosen: Tensor | None = None) -> PoolKernels:
        """Kernels of the pool for what `retention` keeps."""
        geometry = retention.layout.geometry
        sizes = geometry.group_size, geometry.layers, geometry.kv_heads
        pool = KvPool(self.pool, *sizes, self._scales, chosen)
        if geometry.window_heads is not None:
            return LayeredKernels(pool, geometry, self._choose_kernels)
        return self._choose_kernels(pool)

    @staticmethod
    def _append(sample_rows: Sequence[SampleRow], tokens: Tensor) -> None:
        for number, sample_row in enumerate(sample_rows):
            sample_row.append(tokens[number : number + 1] if sample_row.remembers else None)

    def draft_passes(self, retention: Retention, tables: PartTables) -> Passes:
        """Passes of the same model and pool that decode what `retention` keeps, over `tables`."""
        serving = self._make_kernels(retention)
        return Passes(
            self._loaded,
            Batcher([retention], serving, tables, self.meters),
            serving,
            DeviceTables(tables, self._loaded.device),
            Sealing({}, serving),
            self.meters,
            graphs=self._replays,
        )

    def move(self, step: Step) -> None:
        """Make the page moves of `step`, unless `run` is to make them."""
        self._host.move(step.moves, awaited=step.awaited)

    def collect(self, *, awaited: bool = False) -> None:
        """Take what the device has measured and noted by now; if `awaited`, all that it noted."""
        self.meters.collect()
        if self.recorder is not None:
            self.recorder.collect(awaited=awaited)

    @torch.inference_mode()
    def clear(self, pages: Int32) -> None:
        """Fill `pages` [n] of the pool with zeros, after the device's queued work.

        What was noted of kept positions may be unsound, too, and is forgotten.
        """
        if self.recorder is not None:
            self.recorder.clear()
        if len(pages):
            self._host.move((), awaited=True)  # what is still arriving would replace the zeros
            self.pool.view(torch.uint8).index_fill_(
                0, upload(pages.astype(np.int64), self.pool.device), 0
            )

    @torch.inference_mode()
    def rehearse(self, tokens: int) -> None:
        """Run all kernels of prefill steps of up to `tokens` tokens, before serving.

        The longest first: Inductor sizes the blocks of a kernel by the first tensors that it sees.
        """
        for retention in self.passes.batcher.retentions:
            for rows in _runs_of_chunks(retention, tokens):
                self._rehearse(rows)
            self._rehearse((_make_row(RowKind.TAIL, retention, 0, 2),))

    def _rehearse(self, rows: tuple[Row, ...]) -> None:
        self.run(self.passes.plan(Step(rows, epoch=0)), [])

    @property
    def _replays(self) -> bool:
        return self.passes.graphs is not None

    def _carry(self, work: Pass, drafted: Tensor | None) -> Carry:
        """What writes the last step's tokens and drafts into those of a pass."""
        rows, ends = work.rows, work.ends
        unknown = [number for number, row in enumerate(rows) if row.pending]
        drafts = [number for number in unknown if rows[number].drafts]
        pending = [number for number in unknown if not rows[number].drafts] if drafts else unknown
        sources: list[tuple[Tensor, Tensor]] = []
        if pending:
            place_of, chosen = self._chosen
            found = [place_of[rows[number].slot] for number in pending]
            target, source = upload(np.array([ends[pending], found]), self._loaded.device)
            sources.append((target, chosen.index_select(0, source)))
        if drafts and drafted is not None:
            targets = [
                np.arange(end - rows[at].drafts, end) + 1
                for at, end in zip(drafts, ends[drafts], strict=True)
            ]
            sources.append((upload(np.concatenate(targets), self._loaded.device), drafted))

        def carry(tokens: Tensor) -> None:
            for target, values in sources:
                tokens.index_copy_(0, target, values)

        return carry


def _runs_of_chunks(retention: Retention, tokens: int) -> Iterator[tuple[Row, ...]]:
    """All chunks of a step in sequence, and one alone, as prompts may begin uncompressed."""
    layout = retention.layout
    chunk, most = layout.chunk_tokens, layout.max_tokens // layout.chunk_tokens
    rows = tuple(_make_row(RowKind.SEAL, retention, at * chunk, chunk) for at in range(most))
    longest = min(max(1, tokens // chunk), most)
    any_length = not retention.orders
    yield from (
        rows[:count] for count in range(longest, 0, -1) if any_length or count in (longest, 1)
    )
    if most > 1:
        yield rows[1:2]


def _make_row(kind: RowKind, retention: Retention, start: int, tokens: int) -> Row:
    nothing = np.zeros(0, np.int64)
    return Row("", 0, retention, kind, start, np.zeros(tokens, np.int64), nothing, sample=False)
