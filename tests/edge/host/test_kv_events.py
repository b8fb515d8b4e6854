"""KV events in vLLM's form: what its decoder reads, and what travels over ZeroMQ."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import msgspec
import pytest
import typer
import zmq

from tangram.cli import app
from tangram.errors import ConfigError
from tangram.kv_events.address import EventAddress
from tangram.kv_events.events import AllBlocksCleared, BlockRemoved, EventBatch, hash_of
from tangram.kv_events.publisher import EventPublisher, publish_beside_others
from tests.edge.host.kv_story import (
    KEYS,
    STORY,
    STREAM,
    TOKENS,
    C,
    batches_of,
    payloads_of,
    store_chunk,
)
from tests.mentions import mentioning, mentions

FREE = "tcp://127.0.0.1:*"
WAIT_MS = 60_000


def test_vllm_reads_our_events() -> None:
    """Its classes have decoded these very bytes: `tests/fixtures/kv_events/make_fixture.py`."""
    stream = json.loads(STREAM.read_text())
    assert payloads_of(batches_of(STORY)) == stream["payloads"]
    first, second = map(hash_of, KEYS)

    def block(key: int, parent: int | None, tokens: list[int], medium: str) -> dict[str, object]:
        return {
            "type": "BlockStored",
            "block_hashes": [key],
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": C,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }

    def tell_removed(key: int, medium: str) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": [key], "medium": medium}

    tokens = TOKENS.tolist()
    expected = [
        [{"type": "AllBlocksCleared"}],
        [block(first, None, tokens[:C], "GPU"), block(second, first, tokens[C : 2 * C], "GPU")],
        [block(second, None, [], "CPU"), tell_removed(second, "GPU")],
        [block(second, first, tokens[C : 2 * C], "GPU"), tell_removed(second, "CPU")],
        [tell_removed(second, "GPU"), tell_removed(first, "GPU")],
    ]
    assert [batch["events"] for batch in stream["decoded"]] == expected
    assert [batch["ts"] for batch in stream["decoded"]] == [float(at) for at in range(5)]


def test_chunks_of_another_ratio_are_not_told_of() -> None:
    assert batches_of([[store_chunk(0, ratio=0.5)]]) == [[AllBlocksCleared()]]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def number_of(frames: list[bytes]) -> int:
    return int.from_bytes(frames[-2], "big", signed=True)


def events_of(frames: list[bytes]) -> list[object]:
    return list(msgspec.msgpack.Decoder(EventBatch).decode(frames[-1]).events)


def test_a_subscriber_reads_numbered_batches_and_asks_for_those_it_missed(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    sent = [[BlockRemoved([number], "GPU")] for number in range(40)]
    replays = f"tcp://127.0.0.1:{free_ports(1)}"
    with closing(EventPublisher(EventAddress(FREE, replays, "kv@pod@model"))) as publisher:
        for events in sent[:3]:
            publisher.send(events)
        with context.socket(zmq.SUB) as news, context.socket(zmq.DEALER) as replay:
            news.connect(publisher.endpoint)
            news.subscribe("kv@pod@")
            replay.connect(replays)
            number = 3
            while not news.poll(100):  # until the subscription has arrived
                publisher.send(sent[number])
                number += 1
            frames = news.recv_multipart()
            assert frames[0] == b"kv@pod@model"
            assert events_of(frames) == sent[number_of(frames)]

            replay.send_multipart((b"", (1).to_bytes(8, "big")))
            answers = list[list[bytes]]()
            while not answers or number_of(answers[-1]) >= 0:
                assert replay.poll(WAIT_MS)
                answers.append(replay.recv_multipart())
            assert [number_of(one) for one in answers] == [*range(1, number), -1]
            assert [events_of(one) for one in answers[:-1]] == sent[1:number]


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "http://*:5557", ""])
def test_an_endpoint_that_is_none_is_refused_by_its_option(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(f"kv_events {endpoint!r} ZeroMQ")):
        EventPublisher(EventAddress(endpoint, None, ""))


def test_an_endpoint_in_use_is_refused_and_the_other_is_free_again() -> None:
    with closing(EventPublisher(EventAddress(FREE, None, ""))) as taken:
        port = taken.endpoint.rpartition(":")[2]
        with pytest.raises(ConfigError, match=mentioning(f"kv_events_replay 'tcp://*:{port}' use")):
            EventPublisher(EventAddress(FREE, f"tcp://*:{port}", ""))


def test_engines_of_a_machine_share_the_ports_from_the_first_on() -> None:
    """One port is in use; where replays are asked for has the same distance as the events."""
    first = free_ports(6)
    address = EventAddress(f"tcp://*:{first}", f"tcp://*:{first + 3}", "")
    with ExitStack() as stack:
        other = EventAddress(f"tcp://*:{first + 4}", None, "")
        stack.enter_context(closing(EventPublisher(other)))
        made = [stack.enter_context(closing(publish_beside_others(address))) for _ in range(2)]
        ports = [one.endpoint.rpartition(":")[2] for one in made]
        assert ports == [str(first), str(first + 2)], "the replays of rank 1 would be at the other"
        replay = f"tcp://*:{first + 5}"
        with pytest.raises(ConfigError, match=mentioning(f"kv_events_replay '{replay}' use")):
            EventPublisher(EventAddress(FREE, replay, ""))


def free_ports(count: int) -> int:
    """The first of `count` ports in a row at which nobody listens."""
    while True:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            sockets[0].bind(("", 0))
            first = int(sockets[0].getsockname()[1])
            with suppress(OSError, OverflowError):
                for distance, other in enumerate(sockets[1:], 1):
                    other.bind(("", first + distance))
                return first


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (EventAddress("tcp://router:5557", None, ""), "kv_events 'tcp://router:5557'"),
        (EventAddress("ipc:///tmp/events", None, ""), "kv_events 'ipc:///tmp/events'"),
        (EventAddress("tcp://*:5557", "tcp://*:*", ""), "kv_events_replay 'tcp://*:*'"),
        (EventAddress("tcp://*:65535", None, ""), "kv_events 65535"),
    ],
)
def test_what_several_engines_cannot_share_is_refused(address: EventAddress, message: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(message)):
        address.of_rank(1)


def serve(*options: str) -> None:
    command = typer.main.get_command(app)
    command.main(["serve", "smollm2", "--port", "0", *options], standalone_mode=False)


def test_options_of_events_without_events_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    serve("--kv-events-topic", "kv@pod@model")
    assert "without kv_events: add kv_events" in capsys.readouterr().err


def test_a_missing_package_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    serve("--kv-events", FREE)
    said = capsys.readouterr().err
    assert mentions(said, "zmq 'tangram-serve[kv-events]'")
