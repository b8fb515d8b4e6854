"""The server over replicas, without a cluster: one replica of the embedded model in this process,
behind a handle that calls it directly.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.link.protocol import RequestMessage
from tangram.ray.application import build_application
from tangram.ray.held_keys import HeldKeys
from tangram.ray.ingress import Ingress
from tangram.ray.options import read_arguments
from tangram.ray.payloads import FactsQuestion, Origin, SentRequest, StatsReport
from tangram.ray.replica import EngineReplica
from tangram.ray.replicated_engine import ReplicatedEngine
from tangram.ray.reports import REPEATED_S, make_routing_stats, read_routing_stats, repeat_or_renew
from tangram.ray.router import ChunkRouter
from tangram.ray.totals import FleetTotals
from tangram.serve.http import build_app
from tangram.serve.observability.logs import LogForm
from tangram.serve.options import FleetOptions
from tangram.types import Event, Request, SamplingParams
from tangram.watch import ChunkPlace, ChunkStored, News
from tests.mentions import mentioning, mentions
from tests.running import run_app

CHUNK_TOKENS = 256
VERSION = "new"
TEXT = "The river carries sand from the mountains to the sea. " * 40
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Answer = Callable[[SentRequest], AsyncIterator[list[Event]]]


@dataclass
class LocalHandle:
    """A handle of one replica in this process. `answer` may be replaced by what a test wants."""

    replica: EngineReplica
    answers: list[Answer] = field(default_factory=list)
    sent: list[SentRequest] = field(default_factory=list)

    def options(self, *, stream: bool) -> Any:
        assert stream
        return SimpleNamespace(answer=SimpleNamespace(remote=self.answer))

    def answer(self, sent: SentRequest) -> Any:
        self.sent.append(sent)
        events = (self.answers.pop(0) if self.answers else self.replica.answer)(sent)
        return _Cancellable(events)

    def broadcast(self, method: str) -> Any:
        async def results_async(**options: Any) -> list[StatsReport]:
            return [self.report()]

        return SimpleNamespace(results_async=results_async)

    def report(self) -> StatsReport:
        return StatsReport("one", self.replica._engine.stats())


class _Cancellable:
    """What a handle returns: events to iterate once, and `cancel`."""

    def __init__(self, events: AsyncIterator[list[Event]]) -> None:
        self._events, self._task = events, asyncio.current_task()

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        try:
            async for events in self._events:
                yield events
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]

    def cancel(self) -> None:
        pass  # the task that iterates is cancelled, and closes the iterator


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    config = EngineConfig(
        dtype="float32",
        kv_cache_gib=0.25,
        chunk_tokens=CHUNK_TOKENS,
        max_num_batched_tokens=512,
        max_num_seqs=2,
        max_queue=4,
        threads=1,
    )
    replica = EngineReplica(config, LogForm.text, VERSION)
    yield replica
    replica._engine.stop()


@contextmanager
def serving(handle: LocalHandle, *, max_queue: int = 4) -> Iterator[httpx.Client]:
    facts = handle.replica.describe(FactsQuestion(VERSION))
    fleet = ReplicatedEngine(handle, facts, handle.report())  # type: ignore[arg-type]
    app = build_app(fleet, served_model_name="smollm2", max_queue=max_queue)
    with run_app(app, lifespan="on") as server, httpx.Client(base_url=server.url) as client:
        client.timeout = 120
        yield client


def body(prompt: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": prompt, "max_tokens": 6, "temperature": 0} | fields


def frames(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_streams_and_whole_answers_are_those_of_the_engine(replica: EngineReplica) -> None:
    handle = LocalHandle(replica)
    with serving(handle) as client:
        whole = client.post(COMPLETIONS, json=body(n=2)).json()
        streamed = frames(client.post(COMPLETIONS, json=body(stream=True)))
        usage = client.post(COMPLETIONS, json=body()).json()["usage"]
        chat = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 0,
        }
        form = {"type": "json_object"}
        structured = client.post(CHAT, json=chat | {"response_format": form, "max_tokens": 200})
    text = whole["choices"][0]["text"]
    assert text
    assert whole["choices"][1]["text"] == text
    assert "".join(frame["choices"][0]["text"] for frame in streamed) == text
    assert usage["prompt_tokens_details"]["cached_tokens"] >= CHUNK_TOKENS
    assert isinstance(json.loads(structured.json()["choices"][0]["message"]["content"]), dict)


def test_chains_are_the_keys_that_the_engine_holds(replica: EngineReplica) -> None:
    handle = LocalHandle(replica)
    with serving(handle) as client:
        client.post(COMPLETIONS, json=body())
        client.post(COMPLETIONS, json=body(cache_salt="other"))
    plain, salted = (sent.chain for sent in handle.sent)
    assert len(plain) == (len(handle.sent[0].message.prompt) - 1) // CHUNK_TOKENS > 0
    assert set(plain).isdisjoint(salted)
    _, report = read_routing_stats(replica.record_routing_stats()) or (0, None)
    assert report is not None
    assert report.digest.longest_prefix(plain) == len(plain)
    assert report.digest.longest_prefix(salted) == len(salted)
    assert report.pending_chunks == 0


@pytest.mark.parametrize(
    ("fields", "field_name"),
    [
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"kv_retention": 0.123}, "kv_retention"),
        ({"prompt": [10**6]}, "prompt"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"n": 100}, "n"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_by_name(
    replica: EngineReplica, fields: dict[str, Any], field_name: str
) -> None:
    with serving(LocalHandle(replica)) as client:
        answer = client.post(COMPLETIONS, json=body() | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field_name


async def _die(sent: SentRequest) -> AsyncIterator[list[Event]]:
    raise ActorDiedError
    yield []


def test_a_request_without_a_token_is_sent_once_more_if_its_replica_dies(
    replica: EngineReplica,
) -> None:
    handle = LocalHandle(replica, [_die])
    with serving(handle) as client:
        answer = client.post(COMPLETIONS, json=body())
    assert answer.status_code == 200
    assert len(handle.sent) == 2
    handle = LocalHandle(replica, [_die, _die])
    with serving(handle) as client:
        answer = client.post(COMPLETIONS, json=body())
    assert answer.status_code == 503
    assert mentions(answer.json()["error"]["message"], "again")


def test_a_fault_is_told_and_not_repeated(replica: EngineReplica) -> None:
    async def fail(sent: SentRequest) -> AsyncIterator[list[Event]]:
        raise ZeroDivisionError
        yield []

    handle = LocalHandle(replica, [fail])
    with serving(handle) as client:
        answer = client.post(COMPLETIONS, json=body())
    assert answer.status_code == 500
    assert mentions(answer.json()["error"]["message"], "answered")
    assert len(handle.sent) == 1


def test_a_stream_whose_replica_dies_ends_with_an_error_event(replica: EngineReplica) -> None:
    async def begin_and_die(sent: SentRequest) -> AsyncIterator[list[Event]]:
        async for events in replica.answer(sent):
            yield events
            raise ActorDiedError

    handle = LocalHandle(replica, [begin_and_die])
    with serving(handle) as client:
        *told, last = frames(client.post(COMPLETIONS, json=body(stream=True)))
        after = client.post(COMPLETIONS, json=body())
    assert told
    assert mentions(last["error"]["message"], "replica ended")
    assert after.status_code == 200
    assert len(handle.sent) == 2


def test_a_client_that_goes_away_frees_its_pages(replica: EngineReplica) -> None:
    with serving(LocalHandle(replica)) as client:
        request = body(stream=True, max_tokens=2000, ignore_eos=True)
        with client.stream("POST", COMPLETIONS, json=request) as answer:
            lines = answer.iter_lines()  # the connection closes when this iterator is dropped
            next(lines)
            wait_for_running(replica, 1)
        wait_for_running(replica, 0)


def wait_for_running(replica: EngineReplica, wanted: int) -> None:
    end_s = time.monotonic() + 60
    while replica._engine.stats().running != wanted:
        assert time.monotonic() < end_s, f"never {wanted} running"
        time.sleep(0.02)


def test_full_queues_are_told_before_a_prompt_is_tokenized(replica: EngineReplica) -> None:
    async def hang(sent: SentRequest) -> AsyncIterator[list[Event]]:
        await asyncio.sleep(3600)
        yield []

    handle = LocalHandle(replica, [hang] * 6)
    with serving(handle, max_queue=100) as client:
        streams = [
            client.stream("POST", COMPLETIONS, json=body(stream=True)) for _ in range(6)
        ]  # two run and four wait
        for stream in streams:
            stream.__enter__()
        answer = client.post(COMPLETIONS, json=body())
        assert answer.status_code == 429, answer.text
        assert answer.json()["error"]["code"] == "queue_full"


def test_counters_of_a_replica_that_is_gone_stay_in_the_sums(replica: EngineReplica) -> None:
    totals, stats = FleetTotals(), replica._engine.stats()
    totals.take({"one": stats, "two": stats})
    assert totals.add().pages_total == 2 * stats.pages_total
    before = totals.add().prompt_tokens
    totals.take({"two": stats})
    assert totals.add().pages_total == stats.pages_total
    assert totals.add().prompt_tokens == before == 2 * stats.prompt_tokens > 0
    assert totals.add().page_bytes == stats.page_bytes
    assert totals.add().chunk_tokens == stats.chunk_tokens


def test_arguments_are_checked_by_name() -> None:
    config, options = read_arguments({"model": "smollm2", "kv_cache_gib": "0.5", "replicas": "3"})
    assert (config.kv_cache_gib, config.max_queue, options.replicas) == (0.5, 1024, 3)
    for given, message in (
        ({"replica": 3}, "replica option"),
        ({"replicas": 0}, "replicas 0 1"),
        ({"report_every_s": 3601}, "report_every_s 3601 3600"),
        ({"request_timeout_s": 0}, "request_timeout_s 0"),
        ({"chunk_tokens": "x"}, "chunk_tokens 'x' integer"),
        ({"kv_retention": 7}, "kv_retention 7.0 1"),
        ({"autoscaling": {"max_replicas": "many"}}, "max_replicas 'many'"),
    ):
        with pytest.raises(ConfigError, match=mentioning(message)):
            build_application(*read_arguments(given))


def engine_deployment(config: EngineConfig, **options: Any) -> Any:
    """The deployment of engines of an application."""
    ingress: Any = build_application(config, FleetOptions(**options))
    return ingress._bound_deployment.init_args[0]._bound_deployment


def test_each_rank_has_a_gpu_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 4.0})
    one, two = EngineConfig(threads=3), EngineConfig(threads=3, tensor_parallel_size=2)
    on_cpus = EngineConfig(tensor_parallel_size=2, device="cpu")
    for config, options, cpus, gpus in (
        (one, {}, 3, 1),
        (one, {"gpus_per_replica": 0.5}, 3, 0.5),
        (two, {}, 6, 2),
        (two, {"gpus_per_replica": 2}, 6, 2),
        (on_cpus, {"cpus_per_replica": 0.5}, 0.5, 0),
    ):
        asked = engine_deployment(config, **options).ray_actor_options
        assert (asked["num_cpus"], asked["num_gpus"]) == (cpus, gpus)
    for config, gpus in ((two, 1), (two, 0.5), (two, 3), (one, 2)):
        with pytest.raises(ConfigError, match=mentioning(f"gpus_per_replica {gpus}")):
            engine_deployment(config, gpus_per_replica=gpus)


def test_events_that_replicas_cannot_publish_are_refused_before_any_starts() -> None:
    for given, message in (
        ({"kv_events": "tcp://router:5557"}, "kv_events 'tcp://router:5557'"),
        (
            {"kv_events": "tcp://*:5557", "kv_events_replay": "inproc://x"},
            "kv_events_replay 'inproc://x'",
        ),
        ({"kv_events_topic": "kv@pod@model"}, "kv_events_topic kv_events"),
    ):
        with pytest.raises(ConfigError, match=mentioning(message)):
            engine_deployment(EngineConfig(), **given)


@dataclass
class FakeReplica:
    """What the router reads of Ray's `RunningReplica`."""

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)
    version: str = VERSION
    max_ongoing_requests = 8

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return {"version": self.version}

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DeploymentID("Engine", "tangram"))

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def make_router(replicas: list[FakeReplica]) -> ChunkRouter:
    """A router that knows `replicas`. Call it in an event loop."""
    router = ChunkRouter(DeploymentID("Engine", "tangram"), DeploymentHandleSource.REPLICA)
    router.initialize_state()
    router.update_replicas(replicas)  # type: ignore[arg-type]
    return router


def pending_call(argument: Any) -> Any:
    """A call that Ray Serve asks the router about."""
    return SimpleNamespace(
        args=[argument],
        metadata=SimpleNamespace(internal_request_id="1"),
        routing_context=SimpleNamespace(should_backoff=False),
    )


async def choose_names(replicas: list[FakeReplica], argument: Any) -> list[str]:
    router = make_router(replicas)
    ranks = await router.choose_replicas(replicas, pending_call(argument))  # type: ignore[arg-type]
    return sorted(one.name for rank in ranks for one in rank)


def test_in_a_redeploy_requests_go_to_engines_by_whose_facts_they_were_read() -> None:
    old, other = FakeReplica("old", version="before"), FakeReplica("other", version="before")
    new = FakeReplica("new")

    def choose(replicas: list[FakeReplica], version: str) -> list[str]:
        message = RequestMessage.of(Request("a", (1, 2), SamplingParams()), vocab_size=3)
        sent = SentRequest(Origin(version, ""), (), message)
        return asyncio.run(choose_names(replicas, sent))

    assert choose([old, other, new], "before") == ["old", "other"]
    assert choose([old, other, new], VERSION) == ["new"]
    assert choose([new], "before") == ["new"], "a request waits for a replica that never comes"


class RedeployedHandle(LocalHandle):
    """A handle whose calls Ray's router leads to an older replica, or to that of this process."""

    def __init__(self, replica: EngineReplica, replicas: list[FakeReplica]) -> None:
        super().__init__(replica)
        self._replicas = replicas
        self.describe = SimpleNamespace(remote=self._describe)
        self.report = SimpleNamespace(remote=self._report)  # type: ignore[method-assign]

    async def _describe(self, *question: FactsQuestion) -> Any:
        while not (names := await choose_names(self._replicas, *question or (None,))):
            await asyncio.sleep(0.01)
        facts = self.replica.describe(FactsQuestion(VERSION))
        old = replace(facts, origin=replace(facts.origin, version="before"))
        return old if "old" in names[-1] else facts

    async def _report(self) -> StatsReport:
        return StatsReport("one", self.replica._engine.stats())


def test_an_ingress_waits_for_the_facts_of_its_own_deployment(replica: EngineReplica) -> None:
    """Older engines are routable while it starts, and have the keys of another profile."""
    replicas = [FakeReplica("old", version="before"), FakeReplica("old-too", version="before")]

    async def start_while_engines_are_replaced() -> str:
        ingress = Ingress.__new__(Ingress)
        handle: Any = RedeployedHandle(replica, replicas)
        starting = asyncio.create_task(
            ingress.__init__(handle, "smollm2", FleetOptions(), VERSION)  # type: ignore[misc]
        )
        replicas.append(FakeReplica("new"))
        await asyncio.sleep(0.1)
        assert not starting.done(), "it would send all requests to one of three replicas"
        del replicas[0]
        await starting
        return ingress._fleet._origin.version

    assert asyncio.run(start_while_engines_are_replaced()) == VERSION


def test_each_application_is_a_deployment_of_its_own() -> None:
    versions = list[str]()
    for _ in range(2):
        ingress: Any = build_application(EngineConfig(), FleetOptions())._bound_deployment
        engines = ingress.init_args[0]._bound_deployment
        assert engines.init_args[2] == ingress.init_args[-1]
        versions.append(ingress.init_args[-1])
    assert versions[0] != versions[1]


def test_tokens_of_another_model_are_refused_with_a_request_to_send_them_again(
    replica: EngineReplica,
) -> None:
    def tokenized_before(sent: SentRequest) -> AsyncIterator[list[Event]]:
        return replica.answer(replace(sent, origin=Origin("before", "of another model")))

    with serving(LocalHandle(replica, [tokenized_before])) as client:
        answer = client.post(COMPLETIONS, json=body())
    assert answer.status_code == 503, answer.text
    assert mentions(answer.json()["error"]["message"], "again")


def test_a_report_that_is_known_is_not_decoded_again(replica: EngineReplica) -> None:
    report = dict(make_routing_stats((), 0, replica._engine.stats()))

    async def update() -> None:
        idle, busy = FakeReplica("a", report), FakeReplica("b", report | {"made_s": 1.0})
        router = make_router([idle, busy])
        idle.routing_stats = report | {"digest": b"cannot be decoded"}
        busy.routing_stats = report | {"made_s": 2.0}
        router.update_replicas([idle, busy])  # type: ignore[list-item]
        assert router._made_s == {"a": report["made_s"], "b": 2.0}
        busy.routing_stats = report | {"digest": b"cannot be decoded", "made_s": 3.0}
        with pytest.raises(ValueError, match=mentioning("17 8")):
            router.update_replicas([idle, busy])  # type: ignore[list-item]

    asyncio.run(update())


def test_an_idle_replica_repeats_its_report_until_a_request_or_its_age(
    replica: EngineReplica,
) -> None:
    with serving(LocalHandle(replica)) as client:
        client.post(COMPLETIONS, json=body())
        told = replica.record_routing_stats()
        assert replica.record_routing_stats() is told
        client.post(COMPLETIONS, json=body())  # all of it is held: the engine looks as before
        again = replica.record_routing_stats()
    assert again["made_s"] > told["made_s"]
    late = {**again, "made_s": again["made_s"] + REPEATED_S + 1}
    assert repeat_or_renew(again, late) is late
    assert repeat_or_renew(again, {**again, "queued": 1, "made_s": 0.0})["queued"] == 1


def test_the_router_sends_a_prompt_where_its_chunks_are(replica: EngineReplica) -> None:
    handle = LocalHandle(replica)
    with serving(handle) as client:
        client.post(COMPLETIONS, json=body())
    (sent,) = handle.sent
    stats, pending = replica._engine.stats(), pending_call(sent)

    async def choose() -> tuple[list[str], list[str]]:
        replicas = [FakeReplica("a"), FakeReplica("b"), FakeReplica("c")]
        router = make_router(replicas)
        before = await router.choose_replicas(replicas, pending)  # type: ignore[arg-type]
        for one in replicas:
            held = sent.chain if one.name == "b" else ()
            one.routing_stats = dict(make_routing_stats(held, 0, stats))
        router.update_replicas(replicas)  # type: ignore[arg-type]
        after = await router.choose_replicas(replicas, pending)  # type: ignore[arg-type]
        return [one.name for (one,) in before], [one.name for (one,) in after]

    before, after = asyncio.run(choose())
    assert sorted(before) == sorted(after) == ["a", "b", "c"]
    assert after[0] == "b"


def test_a_full_list_of_keys_loses_the_ends_of_chains() -> None:
    """A chain whose beginning is missing could not be found at all."""
    held, keys = HeldKeys(3), [bytes([number]) * 32 for number in range(5)]
    reading = SimpleNamespace(chunk_keys=keys)
    news = News(None, [SimpleNamespace(reading=reading)], False)  # type: ignore[list-item]
    held.observe(news, None)  # type: ignore[arg-type]
    watched: Any = SimpleNamespace(
        uses=lambda known: [SimpleNamespace(place=ChunkPlace.DEVICE) for _ in known]
    )
    assert list(held.list_held(watched)) == keys[:3]


def test_a_chunk_that_is_sealed_when_its_sequence_has_ended_is_held() -> None:
    held, keys = HeldKeys(3), [bytes([number]) * 32 for number in range(4)]
    watched: Any = SimpleNamespace(
        uses=lambda known: [SimpleNamespace(place=ChunkPlace.DEVICE) for _ in known]
    )
    reading = SimpleNamespace(chunk_keys=keys[:1])
    ended = News(None, [SimpleNamespace(reading=reading)], False)  # type: ignore[list-item]
    for news in (ended, *(News(None, [], True, [make_stored(*pair)]) for pair in pairwise(keys))):
        held.observe(news, None)  # type: ignore[arg-type]
    assert list(held.list_held(watched)) == keys[:3]


def make_stored(parent: bytes, key: bytes) -> ChunkStored:
    return ChunkStored(key, parent, np.zeros(4, np.int64), 1.0, None, salted=False)
