"""One engine as a deployment of Ray Serve: requests in, batches of events out."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from ray import serve

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import build_engine
from tangram.errors import EngineError, OverloadError, RequestError, TangramError
from tangram.kv_events.address import EventAddress
from tangram.link.collection import keep_uncollected
from tangram.ray.held_keys import HeldKeys
from tangram.ray.logs import log_in_worker
from tangram.ray.payloads import EngineFacts, FactsQuestion, Origin, SentRequest, StatsReport
from tangram.ray.reports import MOST_KEYS, make_routing_stats, repeat_or_renew
from tangram.serve.observability.logs import LogForm
from tangram.types import Event, FinishReason, Usage
from tangram.watch import ChunkPlace

_HEALTH_CHECK_S = 1.0
_REPLACED = (
    "the model was replaced by another one after the request was tokenized: send the request again"
)
_log = logging.getLogger(__name__)


class EngineReplica:
    """Serves requests with an engine of its own, and publishes its KV events beside `events`.

    `version` names the deployment. Ray Serve calls `record_replica_metadata` once,
    `record_routing_stats`, `check_health` and, when the replica has no requests
    left or their time is over, `__del__`.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_format: LogForm,
        version: str,
        events: EventAddress | None = None,
    ) -> None:
        log_in_worker(log_format)
        with keep_uncollected():
            self._engine = build_engine(config)
        self._origin = Origin.of(version, config.model, self._engine.codec.tokenizer)
        if events is not None:
            _publish(self._engine, events)
        self._held = HeldKeys(MOST_KEYS)
        self._watched = self._engine.watch(self._held)
        self._unanswered: dict[str, SentRequest] = {}
        self._taken = self._told_taken = 0
        self._told: Mapping[str, Any] = {}
        self._engine.grammars.warm()
        self._engine.start()

    def describe(self, question: FactsQuestion) -> EngineFacts:
        """What the ingress must know of this engine, to which the router has led `question`."""
        engine = self._engine
        return EngineFacts(
            self._origin, engine.config, engine.admission, engine.codec, engine.grammars
        )

    def report(self) -> StatsReport:
        """The engine's statistics now."""
        replica_id = serve.get_replica_context().replica_id.unique_id
        return StatsReport(replica_id, self._engine.stats())

    def record_replica_metadata(self) -> Mapping[str, Any]:
        """What the router knows of this replica from the beginning."""
        return {"version": self._origin.version}

    def record_routing_stats(self) -> Mapping[str, Any]:
        """What the router reads of this replica."""
        taken, held = self._taken, self._held.list_held(self._watched)
        pending = sum(map(self._count_missing, list(self._unanswered.values())))
        made = make_routing_stats(held, pending, self._engine.stats())
        # What the router has sent counts there until a new report.
        told = self._told if taken == self._told_taken else {}
        self._told, self._told_taken = repeat_or_renew(told, made), taken
        return self._told

    def _count_missing(self, sent: SentRequest) -> int:
        """The chunks of a prompt that are not computed, and its rest as one more."""
        uses = self._watched.uses(sent.chain)
        return 1 + sum(use.place is ChunkPlace.GONE for use in uses)

    def check_health(self) -> None:
        """Raise `EngineError` if the engine's thread has ended: Ray then starts another replica."""
        if not self._engine.healthy:
            raise EngineError("the engine of this replica has stopped: its log has the reason")

    async def answer(self, sent: SentRequest) -> AsyncIterator[list[Event]]:
        """The events of `sent`, several at a time if they came together.

        A refusal is an event, too. `admitted_s` of the events counts from the arrival here, since
        clocks of machines differ. If the caller goes away, the request is aborted.
        """
        arrived_s = time.monotonic()
        left = set(range(sent.message.sampling.n))
        self._taken += 1
        try:
            if sent.origin.vocabulary != self._origin.vocabulary:
                raise EngineError(_REPLACED)
            async for events in self._run(sent):
                left -= {event.index for event in events if event.finish_reason is not None}
                yield [_count_from(arrived_s, event) for event in events]
                if not left:
                    return
        except TangramError as error:
            yield [_refuse(sent, index, error) for index in sorted(left)]

    async def _run(self, sent: SentRequest) -> AsyncIterator[list[Event]]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Event]()
        wanted, grammars = sent.message.grammar, self._engine.grammars
        grammar = None if wanted is None else await asyncio.to_thread(grammars.compile, *wanted)

        def post(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.put_nowait, event)

        request = sent.message.request(post, grammar)
        self._engine.submit(request)
        self._unanswered[request.request_id] = sent
        try:
            while True:
                try:
                    async with asyncio.timeout(_HEALTH_CHECK_S):
                        events = [await news.get()]
                except TimeoutError:
                    self.check_health()
                    continue
                while not news.empty():
                    events.append(news.get_nowait())
                self._unanswered.pop(request.request_id, None)
                yield events
        finally:
            self._unanswered.pop(request.request_id, None)
            self._engine.abort(request.request_id)

    def __del__(self) -> None:
        gc.unfreeze()  # or nothing of the engine is freed
        with suppress(AttributeError):  # its constructor has failed
            self._engine.stop()


def _publish(engine: Engine, events: EventAddress) -> None:
    """Publish the KV events of `engine` as long as the process lives."""
    from tangram.kv_events.publisher import publish_beside_others
    from tangram.kv_events.stream import KvEventStream

    publisher = publish_beside_others(events)
    _log.info("KV events at %s", publisher.endpoint)
    KvEventStream(engine.watch, publisher.send)


def _count_from(start_s: float, event: Event) -> Event:
    if event.admitted_s is None:
        return event
    return msgspec.structs.replace(event, admitted_s=event.admitted_s - start_s)


def _refuse(sent: SentRequest, index: int, error: TangramError) -> Event:
    """The event that completion `index` ends with `error`."""
    return Event(
        sent.message.request_id,
        index,
        (),
        (),
        Usage(len(sent.message.prompt), 0, 0, 0, 0),
        FinishReason.ABORT,
        str(error),
        error_field=error.field if isinstance(error, RequestError) else None,
        may_retry=isinstance(error, OverloadError | EngineError),
    )
