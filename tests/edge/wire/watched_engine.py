"""The engine without a model, watched: of chunks of eight tokens heads keep the even ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tangram.types import FinishReason, Request, Usage
from tangram.watch import (
    CacheShape,
    ChunkPlace,
    ChunkUse,
    KeptPositions,
    News,
    Observer,
    PageState,
    PoolReading,
    RetentionShape,
    SequenceChange,
    SequenceReading,
    SequenceState,
    StepDone,
    Watched,
)
from tests.edge.wire.fake_engine import POOL_PAGES, FakeEngine

LAYERS, HEADS, CHUNK = 2, 2, 8
CHOSEN = np.tile(np.arange(CHUNK) % 2 == 0, (LAYERS, HEADS, 1))
Place = tuple[str, int]


@dataclass
class ObservedFakeEngine(FakeEngine):
    """Tells an observer of each token as a step of its own. Requests hold pages in order."""

    observer: Observer | None = None
    answers: dict[Place, list[int]] = field(default_factory=dict)
    prompts: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    usages: dict[Place, Usage] = field(default_factory=dict)
    retentions: dict[str, float] = field(default_factory=dict)

    def watch(self, observer: Observer) -> Watched:
        self.observer = observer
        return self

    @property
    def shape(self) -> CacheShape:
        budgets = np.full((LAYERS, HEADS), CHUNK, np.int32)
        shapes = [
            RetentionShape(0.5, "keydiff", budgets // 2, drafted=False),
            RetentionShape(1.0, None, budgets, drafted=False),
        ]
        return CacheShape(
            LAYERS, HEADS, CHUNK, 4, 64, 8, (None, None), shapes, None, 0, POOL_PAGES, 50, True
        )

    def uses(self, keys: Sequence[bytes]) -> Sequence[ChunkUse]:
        return [ChunkUse(ChunkPlace.DEVICE, 1) for _ in keys]

    def find_kept(self, key: bytes) -> KeptPositions | None:
        bits = np.packbits(CHOSEN, bitorder="little")
        return KeptPositions(bits, LAYERS, HEADS, CHUNK)

    def pool(self) -> PoolReading:
        readings = [self._read(place) for place in self.prompts]
        states, holders = np.zeros(POOL_PAGES, np.uint8), np.full(POOL_PAGES, -1, np.int32)
        for number in range(len(readings)):
            states[10 * number : 10 * number + 10] = PageState.SEALED
            holders[10 * number : 10 * number + 10] = number
        return PoolReading(states, holders, readings, 12, 20, 50)

    def _take(self, request: Request) -> None:
        super()._take(request)
        self.retentions[request.request_id] = request.kv_retention or 0.5
        for index in range(request.sampling.n):
            place = request.request_id, index
            self.prompts[place], self.answers[place] = request.prompt_token_ids, []
            self.usages[place] = Usage(len(request.prompt_token_ids), 0, 0, 0, 0)
            self._tell(None, place, SequenceState.WAITING, SequenceState.RUNNING)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        with self._lock:
            for place in [one for one in self.prompts if one[0] == request_id]:
                self._tell(None, place, SequenceState.ENDED)
                del self.prompts[place]

    def _emit(
        self, job: Any, text: str, reason: FinishReason | None, error: str | None = None
    ) -> None:
        place, ids = (job.request.request_id, job.index), self.codec.encode(text)
        first = not self.answers[place]
        self.answers[place] += ids
        tokens = len(self.prompts[place]) + len(self.answers[place])
        self.usages[place] = Usage(
            len(self.prompts[place]),
            len(self.answers[place]),
            job.cached_tokens,
            4 * tokens,
            8 * tokens,
        )
        self.steps += 1
        done = StepDone(self.steps, time.monotonic(), 0.001, 1, 1, 0, 0, 0, 0, 0)
        states = [SequenceState.FIRST_TOKEN] if first else []
        states += [] if reason is None else [SequenceState.ENDED]
        self._tell(done, place, *states)
        if reason is not None:
            del self.prompts[place]
        super()._emit(job, text, reason, error)

    def _tell(self, done: StepDone | None, place: Place, *states: SequenceState) -> None:
        if self.observer is not None:
            changes = [SequenceChange(one, time.monotonic(), self._read(place)) for one in states]
            self.observer.observe(News(done, changes, idle=False), self)

    def _read(self, place: Place) -> SequenceReading:
        tokens = np.asarray([*self.prompts[place], *self.answers[place]], np.int64)
        sealed = len(tokens) // CHUNK
        keys = tuple(f"{place}{chunk}".encode() for chunk in range(sealed))
        usage, now_s = self.usages[place], time.monotonic()
        ratio = self.retentions[place[0]]
        scorer = "keydiff" if ratio < 1 else None
        return SequenceReading(
            *place, ratio, scorer, CHUNK, tokens, keys, sealed, len(tokens), usage, now_s
        )
