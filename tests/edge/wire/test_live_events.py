"""`tangram serve --kv-events`: what a subscriber over ZeroMQ hears of a server that answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.edge.host.kv_story import STREAM

from .conftest import free_port, healthy, wait_until
from .tiny import COMPLETIONS, body, numbers, tiny_folder

pytestmark = pytest.mark.nightly
CHUNK = 32
OPTIONS = (
    f"--load-format dummy --dtype float32 --threads 1 --kv-retention 1.0 --chunk-tokens {CHUNK} "
    "--page-tokens 8 --max-num-batched-tokens 128 --max-num-seqs 4 --max-model-len 256 "
    "--kv-cache-gib 0.0004 --kv-offload-gib 0.0008 --kv-events-topic kv@pod@tiny"
)
Event = dict[str, Any]


@dataclass
class Subscriber:
    """What a router has heard: batches by number, in the order of their arrival."""

    news: zmq.Socket[bytes]
    replay: zmq.Socket[bytes]
    batches: dict[int, list[Event]] = field(default_factory=dict)

    def listen(self, wait_ms: int = 200) -> list[Event]:
        """The events of the batches that have come now."""
        found = list[Event]()
        while self.news.poll(wait_ms):
            topic, number, payload = self.news.recv_multipart()
            assert topic == b"kv@pod@tiny"
            self.batches[int.from_bytes(number, "big")] = events = decode(payload)
            found += events
        return found

    def ask_again(self, first: int) -> dict[int, list[Event]]:
        """All batches from number `first` on."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = dict[int, list[Event]]()
        while True:
            assert self.replay.poll(60_000)
            _, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return found
            found[int.from_bytes(number, "big")] = decode(payload)


def decode(payload: bytes) -> list[Event]:
    """The events of a batch, which have the form that vLLM's classes have decoded."""
    at_s, events, rank = msgspec.msgpack.decode(payload)
    assert at_s > 1.7e9
    assert rank == 0
    for event in events:
        assert form_of(event) in FORMS, event
    return list(events)


def form_of(event: Event) -> tuple[object, ...]:
    """The fields of an event in their order, the types of their values, and its medium."""
    kinds = tuple((name, type(value)) for name, value in event.items() if value is not None)
    return event["type"], event.get("medium"), tuple(event), kinds


FORMS = {
    form_of(event)
    for batch in json.loads(STREAM.read_text())["decoded"]
    for event in batch["events"]
}


@contextmanager
def subscribe(events: int, replay: int) -> Iterator[Subscriber]:
    with zmq.Context() as context, context.socket(zmq.SUB) as news:
        news.connect(f"tcp://127.0.0.1:{events}")
        news.subscribe("kv@pod@")
        with context.socket(zmq.DEALER) as asked:
            asked.connect(f"tcp://127.0.0.1:{replay}")
            yield Subscriber(news, asked)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, python: list[str]
) -> Iterator[tuple[str, int, int]]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    port, events, replay = free_port(), free_port(), free_port()
    command = [*python, "-m", "tangram", "serve", str(folder), "--port", str(port)]
    command += ["--kv-events", f"tcp://*:{events}", "--kv-events-replay", f"tcp://*:{replay}"]
    command += ["--served-model-name", "fake-model", *OPTIONS.split()]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: process.poll() is not None or healthy(url), "no health", 180)
            assert process.poll() is None
            yield url, events, replay
        finally:
            process.terminate()


def test_a_router_hears_what_the_prefix_cache_holds(server: tuple[str, int, int]) -> None:
    """Chunks come, go to host memory and come back; those of a salt are never told of."""
    url, *ports = server

    def complete(prompt: list[int], **fields: Any) -> None:
        answer = httpx.post(f"{url}{COMPLETIONS}", json=body(prompt, **fields), timeout=60)
        assert answer.status_code == 200, answer.text

    with subscribe(*ports) as router:
        begun = router.ask_again(0)
        assert begun == {0: [{"type": "AllBlocksCleared"}]}
        router.listen()  # the subscription has arrived by now

        prompt = numbers(3 * CHUNK + 5)
        complete(prompt)
        first, second, third = router.listen()
        for number, event in enumerate((first, second, third)):
            assert event["type"] == "BlockStored" and event["medium"] == "GPU"
            assert event["token_ids"] == prompt[number * CHUNK : (number + 1) * CHUNK]
            assert event["block_size"] == CHUNK
        parents = [event["parent_block_hash"] for event in (first, second, third)]
        chain = [event["block_hashes"][0] for event in (first, second, third)]
        assert parents == [None, *chain[:2]]

        complete([*prompt[: 2 * CHUNK], *numbers(CHUNK + 5, 7)])
        (branch,) = router.listen()
        assert branch["parent_block_hash"] == chain[1]
        complete(numbers(3 * CHUNK + 5, 11), cache_salt="secret")
        assert router.listen() == []

        held = {"GPU": {*chain, *branch["block_hashes"]}, "CPU": set[int]()}
        for step in range(12, 30):  # more than the pool holds
            complete(numbers(3 * CHUNK + 5, step))
            follow(held, router.listen())
        assert held["CPU"], "nothing has gone to host memory"
        assert chain[0] not in held["GPU"] | held["CPU"], "the oldest is gone from everywhere"

        again = router.ask_again(0)
        assert list(again) == list(range(len(again)))
        assert router.batches.items() <= again.items()
        told: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        follow(told, [event for events in again.values() for event in events])
        assert told == held


def follow(held: dict[str, set[int]], events: list[Event]) -> None:
    """What a router keeps books of: a block is stored once and removed once in a medium."""
    for event in events:
        if event["type"] == "AllBlocksCleared":
            continue
        own, blocks = held[event["medium"]], set(event["block_hashes"])
        if event["type"] == "BlockStored":
            assert own.isdisjoint(blocks)
            own |= blocks
        else:
            assert blocks <= own
            own -= blocks
