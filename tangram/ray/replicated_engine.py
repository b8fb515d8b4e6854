"""Replicas as one engine: what the server sees of them (`ServedEngine`), in the ingress."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
from ray.exceptions import NodeDiedError, RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from tangram.cache.keys import list_keys
from tangram.engine.intake import Intake
from tangram.link.protocol import RequestMessage
from tangram.link.remote_engine import RunningRequest
from tangram.metrics import EngineStats
from tangram.ray.payloads import EngineFacts, SentRequest, StatsReport
from tangram.ray.totals import FleetTotals
from tangram.serve.activity import tell_activity
from tangram.types import Event, Request

REPORT_EVERY_S = 1.0
# A request that had no token yet is sent once more if its replica dies.
_MOST_ATTEMPTS = 2
_LOST = (
    "the replica that computed this answer has ended: send the request again, another replica "
    "answers it"
)
_FAULT = "the request could not be answered: the log of the ingress has the reason"
_REPLICA_ENDED = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
# Replicas may take as long to start. After it, the server is not healthy.
MOST_SILENT_S = 300.0
_log = logging.getLogger(__name__)


class ReplicatedEngine:
    """The replicas behind `handle`, as one engine. For one event loop, that of `start`.

    A request is checked here, and its chunk keys are computed here, by `facts`. The router sends it
    to a replica of the deployment that has these facts, as long as there is one. Each replica holds
    a queue of its own; all queues together take `max_queue` completions for each replica. `first`
    is the first report.
    """

    ended = False  # by itself never: replicas are started again

    def __init__(
        self, handle: DeploymentHandle[Any], facts: EngineFacts, first: StatsReport
    ) -> None:
        self._handle, self._config, self._origin = handle, facts.config, facts.origin
        self._answering = handle.options(stream=True).answer
        self._admission = facts.admission
        self.max_model_len, self.sampling = self._admission.max_model_len, self._admission.sampling
        self.codec, self.grammars = facts.codec, facts.grammars
        self._stopped, self._heard_s = False, time.monotonic()
        self._totals = FleetTotals()
        self._relays: dict[str, _Relay] = {}
        self._take_reports({first.replica_id: first.stats})
        self._beside: list[asyncio.Task[None]] = []

    @property
    def healthy(self) -> bool:
        """Whether a replica has answered in the last `MOST_SILENT_S`; False after `stop`."""
        return not self._stopped and time.monotonic() - self._heard_s < MOST_SILENT_S

    @property
    def waiting(self) -> int:
        """How many completions are more than the batches of all replicas hold."""
        return max(0, sum(len(relay.left) for relay in self._relays.values()) - self._places)

    @property
    def replicas(self) -> Mapping[str, EngineStats]:
        """The statistics of each replica that has answered last."""
        return self._totals.present

    def stats(self) -> EngineStats:
        """The sums over all replicas, at most `REPORT_EVERY_S` and a step old."""
        return self._totals.add()

    def check_queue(self, coming: int) -> None:
        """Raise `OverloadError` if the queues of all replicas are full."""
        self._intake.check_queue(self.waiting, coming)

    async def submit(self, *requests: Request) -> None:
        """Send `requests`, each to the replica that the router chooses.

        Raises `RequestError` if one can never be served, `OverloadError` if too many wait. Then
        none is sent.
        """
        ready = [self._prepare(request) for request in requests]
        self.check_queue(sum(request.sampling.n for request in requests))
        for request, sent in zip(requests, ready, strict=True):
            relay = _Relay(request)
            self._relays[request.request_id] = relay
            # In the context of the HTTP request all calls would have one id, by which Ray's router
            # knows them: of several prompts one would be sent.
            relay.task = asyncio.create_task(self._send(relay, sent), context=contextvars.Context())

    def abort(self, request_id: str) -> None:
        """End a request; an unknown or finished request is ignored."""
        relay = self._relays.pop(request_id, None)
        if relay is not None and relay.task is not None:
            relay.task.cancel()

    async def start(self) -> None:
        """Begin to ask replicas for their statistics."""
        self._beside = [
            asyncio.create_task(self._poll()),
            asyncio.create_task(tell_activity(self.stats)),
        ]

    async def stop(self) -> None:
        """End what runs."""
        self._stopped = True
        for relay in list(self._relays.values()):
            self.abort(relay.request.request_id)
            relay.end(None, may_retry=False)
        for task in self._beside:
            task.cancel()

    def _prepare(self, request: Request) -> SentRequest:
        """The request with the keys of its chunks. Raises `RequestError`."""
        retention, _ = self._admission.check(request)
        tokens = np.asarray(request.prompt_token_ids, np.int64)
        chunk_tokens = retention.layout.chunk_tokens
        keys = list_keys(retention.fingerprint, request.cache_salt, chunk_tokens, tokens)
        message = RequestMessage.of(request, self._admission.vocab_size, tokens)
        return SentRequest(self._origin, tuple(keys), message)

    async def _send(self, relay: _Relay, sent: SentRequest) -> None:
        try:
            for attempt in range(_MOST_ATTEMPTS):
                try:
                    await self._relay(relay, sent)
                    break
                except _REPLICA_ENDED as error:
                    _log.warning("%s: its replica has ended: %s", relay.request.request_id, error)
                    if relay.begun or attempt + 1 == _MOST_ATTEMPTS:
                        relay.end(_LOST, may_retry=True)
                        break
                except Exception:  # a fault of ours, of which the client must hear, too
                    _log.exception("%s cannot be answered", relay.request.request_id)
                    relay.end(_FAULT, may_retry=False)
                    break
        finally:
            if self._relays.get(relay.request.request_id) is relay:
                del self._relays[relay.request.request_id]

    async def _relay(self, relay: _Relay, sent: SentRequest) -> None:
        relay.sent_s = time.monotonic()
        answer = cast("DeploymentResponseGenerator[list[Event]]", self._answering.remote(sent))
        try:
            async for events in answer:
                if not relay.begun:
                    self._intake.count_start()
                for event in events:
                    relay.take(event)
        finally:
            answer.cancel()  # type: ignore[no-untyped-call]

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                answers = await self._handle.broadcast("report").results_async(
                    timeout_s=10 * REPORT_EVERY_S, return_exceptions=True
                )
            except (RayError, RayServeException, TimeoutError) as error:
                _log.warning("no replica has reported: %s", error)
                continue
            reports = [answer for answer in answers if isinstance(answer, StatsReport)]
            self._take_reports({report.replica_id: report.stats for report in reports})

    def _take_reports(self, reports: Mapping[str, EngineStats]) -> None:
        """Take in statistics; the bound of the queue follows the number of replicas."""
        before, most = len(self._totals.present), self._config.max_queue
        self._totals.take(reports)
        if reports:
            self._heard_s = time.monotonic()
        now = max(1, len(reports))
        if now != before:
            self._places = now * self._config.max_num_seqs
            self._intake = Intake(None if most is None else now * most, self._places)


class _Relay(RunningRequest):
    """A request of which a replica tells, with times of this machine's clock."""

    begun, sent_s = False, 0.0
    task: asyncio.Task[None] | None = None

    def take(self, event: Event) -> None:
        """Pass an event on."""
        self.begun = True
        if event.admitted_s is not None:
            event = msgspec.structs.replace(event, admitted_s=self.sent_s + event.admitted_s)
        super().take(event)
