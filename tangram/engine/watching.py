"""Tells observers what an engine does: after each step, on the engine's thread.

This is the only place that emits the events of `tangram/watch.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tangram.cache.accounting import PageStates
from tangram.cache.kept import KeptStore
from tangram.cache.manager import CacheManager
from tangram.cache.page_map import PageMap
from tangram.cache.retention import Retention
from tangram.cache.step import RowKind, Step
from tangram.engine.admission import Admission
from tangram.engine.schedule.token_sequence import TokenSequence
from tangram.engine.statistics import StatsReader
from tangram.speculative_config import CompressedKv, SpeculativeConfig
from tangram.types import PageMove
from tangram.watch import (
    CacheShape,
    ChunkPlace,
    ChunkUse,
    KeptPositions,
    LinkChange,
    News,
    Observer,
    PoolReading,
    RetentionShape,
    SequenceChange,
    SequenceReading,
    SequenceState,
    StepDone,
)

_log = logging.getLogger("tangram")


class Watching:
    """The `observers` of one engine, and what they may ask: see `Watched` and `Readings`."""

    def __init__(
        self, method: SpeculativeConfig | None, statistics: StatsReader, records: KeptStore | None
    ) -> None:
        self.observers: list[Observer] = []
        self._method, self._records = method, records
        self._statistics, self._scheduler = statistics, statistics.scheduler
        self._tokenless: dict[TokenSequence, None] = {}
        self._ended: list[SequenceChange] = []
        self._drafts = 0, 0
        self._scheduler.note_changes()
        self._scheduler.cache.note_changes()

    @property
    def shape(self) -> CacheShape:
        """See `Watched`."""
        cache, recorded = self._scheduler.cache, self._records is not None
        return _describe_cache(self._method, self._statistics.admission, cache, recorded)

    def tell_admissions(self) -> None:
        """A step is scheduled and will run."""
        if self._scheduler.changes:
            self._emit(News(None, self._take_changes(), False, self._take_links()))

    def tell(self, step: Step | None, begin_s: float) -> None:
        """`step`, begun at `begin_s` of the monotonic clock, is done; None if nothing ran."""
        done = None if step is None else self._describe(step, begin_s, time.monotonic())
        self._emit(News(done, self._take_changes(), step is None, self._take_links()))

    def _emit(self, news: News) -> None:
        for observer in list(self.observers):
            try:
                observer.observe(news, self)
            except Exception:  # answers go on without it
                _log.exception("an observer of the engine has failed, and is told nothing more")
                self.observers.remove(observer)

    def pool(self) -> PoolReading:
        """See `Readings`."""
        cache, running = self._scheduler.cache, self._scheduler.running
        held = {sequence: sequence.cache for sequence in running if sequence.cache is not None}
        pages = PageMap.of(cache, list(held.values()))
        return PoolReading(
            pages.states,
            pages.holders,
            [self.read(sequence) for sequence in held],
            PageStates.of(cache).promised,
            cache.host.used,
            cache.host.total,
        )

    def read(self, sequence: TokenSequence) -> SequenceReading:
        """One sequence now. If it is preempted or has ended, as it was when last computed."""
        layout, (sealed, raw) = sequence.retention.layout, sequence.count_state()
        return SequenceReading(
            sequence.request_id,
            sequence.sample_index,
            sequence.retention.kv_retention,
            sequence.retention.scorer,
            layout.chunk_tokens,
            sequence.settled_tokens,
            sequence.keys.list_known(sealed),
            sealed,
            sealed * layout.chunk_tokens + raw,
            self._statistics.usage(sequence),
            sequence.admitted_s,
            sequence.lost,
        )

    def end(self, sequence: TokenSequence) -> None:
        """`sequence` is about to give its pages back for good."""
        if sequence in self._tokenless:
            del self._tokenless[sequence]
            if sequence.read_tokens:
                self._ended.append(self._change(sequence, SequenceState.FIRST_TOKEN))
        sealed, _ = sequence.count_state()
        # Chunks that it left open are sealed later, under these keys.
        sequence.keys.after(sealed, sequence.settled_tokens)
        self._ended.append(self._change(sequence, SequenceState.ENDED))

    def uses(self, keys: Sequence[bytes]) -> Sequence[ChunkUse]:
        """See `Watched`."""
        return [self._use_of(key) for key in keys]

    def find_kept(self, key: bytes) -> KeptPositions | None:
        """See `Watched`."""
        return None if self._records is None else self._records.get(key)

    def _use_of(self, key: bytes) -> ChunkUse:
        cache = self._scheduler.cache
        node = cache.prefix.find(key)
        if node is not None:
            return ChunkUse(ChunkPlace.DEVICE, node.users)
        return ChunkUse(ChunkPlace.HOST if key in cache.host.links else ChunkPlace.GONE, 0)

    def _take_changes(self) -> Sequence[SequenceChange]:
        """In the order of a life: queued and admitted, a first token, the end."""
        noted = self._scheduler.take_changes()
        changes = [self._change(sequence, state) for sequence, state in noted]
        if self._records is not None:
            for change in changes:
                self._records.touch(change.reading.chunk_keys)
        for sequence, state in noted:
            if state is SequenceState.RUNNING and not sequence.read_tokens:
                self._tokenless[sequence] = None
        for sequence in [waits for waits in self._tokenless if waits.read_tokens]:
            changes.append(self._change(sequence, SequenceState.FIRST_TOKEN))
            del self._tokenless[sequence]
        ended, self._ended = self._ended, []
        return changes + ended

    def _take_links(self) -> Sequence[LinkChange]:
        return self._scheduler.cache.take_changes()

    def _change(self, sequence: TokenSequence, state: SequenceState) -> SequenceChange:
        return SequenceChange(state, time.monotonic(), self.read(sequence))

    def _describe(self, step: Step, begin_s: float, now_s: float) -> StepDone:
        prefill = step.rows[step.decode_rows :]
        drafted, accepted = self._count_drafts()
        return StepDone(
            number=self._scheduler.counters.steps,
            at_s=now_s,
            seconds=now_s - begin_s,
            decode_rows=step.decode_rows,
            decode_tokens=step.decode_tokens,
            chunks=sum(row.kind is RowKind.SEAL for row in prefill),
            tail_tokens=sum(len(row.tokens) for row in prefill if row.kind is RowKind.TAIL),
            moves=sum(len(move.pages) for move in step.moves if isinstance(move, PageMove)),
            drafted=drafted,
            accepted=accepted,
        )

    def _count_drafts(self) -> tuple[int, int]:
        speculation = self._statistics.speculation
        if speculation is None:
            return 0, 0
        counters, before = speculation.counters, self._drafts
        self._drafts = counters.drafted, counters.accepted
        return counters.drafted - before[0], counters.accepted - before[1]


def _is_drafted(retention: Retention, drafts: SpeculativeConfig | None) -> bool:
    """Whether an engine with `drafts` may draft for sequences of `retention`."""
    return drafts is not None and (
        retention.draft is not None or not isinstance(drafts, CompressedKv)
    )


def _describe_cache(
    drafts: SpeculativeConfig | None, admission: Admission, cache: CacheManager, recorded: bool
) -> CacheShape:
    layout = admission.retentions[0].layout
    return CacheShape(
        layers=layout.geometry.layers,
        kv_heads=layout.geometry.kv_heads,
        chunk_tokens=layout.chunk_tokens,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes(admission.element_bytes),
        kv_token_bytes=admission.kv_token_bytes,
        windows=layout.geometry.windows,
        retentions=[
            RetentionShape(
                entry.kv_retention,
                entry.scorer,
                entry.layout.head_kept_tokens[:, : layout.geometry.kv_heads],
                drafted=_is_drafted(entry, drafts),
            )
            for entry in admission.known_retentions
        ],
        drafts_by=None if drafts is None else drafts.method,
        most_drafted=0 if drafts is None else drafts.num_speculative_tokens,
        pages_total=admission.total_pages,
        host_pages_total=cache.host.total,
        recorded=recorded,
    )
