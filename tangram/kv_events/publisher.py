"""Publishes KV events over ZeroMQ as vLLM does: PUB for news, ROUTER for what was missed.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian, from 0), and
the batch. A subscriber that misses a number asks the replay endpoint, from which number on it wants
the batches; the last reply has the number -1.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from tangram.errors import ConfigError
from tangram.kv_events.address import EventAddress, is_bound
from tangram.kv_events.events import EventBatch, KvEvent

# So many batches can be asked for again, and so many may wait for a slow subscriber.
REPLAYED_BATCHES, WAITING_BATCHES = 10_000, 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class EndpointInUse(ConfigError):
    """Another socket listens there."""


class EventPublisher:
    """Publishes at `address`, and answers at its replay endpoint, if it has that.

    An endpoint with a wildcard, `ipc` or `inproc` is bound, another connected to, as vLLM does.
    Batches name `rank`, which tells the engines behind one server apart. `send` never waits: a
    subscriber that is too slow loses batches. Raises `ConfigError` if an endpoint cannot be used.
    """

    def __init__(self, address: EventAddress, rank: int = 0) -> None:
        self._context, self._rank = zmq.Context(), rank
        self._topic, self._encoder = address.topic.encode(), msgspec.msgpack.Encoder()
        self._kept = deque[tuple[bytes, bytes]](maxlen=REPLAYED_BATCHES)
        self._lock = threading.Lock()
        self._next = 0
        try:
            self._news = self._context.socket(zmq.PUB)
            self._news.set_hwm(WAITING_BATCHES)
            bind = is_bound(address.endpoint)
            self.endpoint = _attach(self._news, address.endpoint, "kv_events", bind=bind)
            if address.replay is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.set_hwm(0)  # a router drops what exceeds it
                _attach(replay, address.replay, "kv_events_replay", bind=True)
                threading.Thread(
                    target=self._replay, args=(replay,), name="tangram-kv-replay", daemon=True
                ).start()
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def send(self, events: Sequence[KvEvent]) -> None:
        """Publish `events` as one batch. For one thread."""
        payload = self._encoder.encode(EventBatch(time.time(), list(events), self._rank))
        number = self._next.to_bytes(8, "big")
        with self._lock:
            self._kept.append((number, payload))
        self._news.send_multipart((self._topic, number, payload))
        self._next += 1

    def close(self) -> None:
        """Close both endpoints. Nothing may be sent any more."""
        self._news.close(linger=100)
        self._context.term()  # ends the other thread, which closes its own socket

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while True:
                try:
                    frames = socket.recv_multipart()
                except zmq.ContextTerminated:
                    return
                if len(frames) != 3 or len(frames[2]) != 8:
                    continue
                client, empty, first = frames
                with self._lock:
                    missed = [batch for batch in self._kept if batch[0] >= first]
                for number, payload in [*missed, (_END, b"")]:
                    socket.send_multipart((client, empty, number, payload))


def publish_beside_others(address: EventAddress) -> EventPublisher:
    """The publisher of one of several engines, which share the ports from `address` on.

    Its rank is the lowest at whose ports (`EventAddress.of_rank`) no other listens on this machine.
    Raises `ConfigError` if an endpoint cannot be used.
    """
    rank = 0
    while True:
        try:
            return EventPublisher(address.of_rank(rank), rank)
        except EndpointInUse:
            rank += 1


def _attach(socket: zmq.Socket[bytes], endpoint: str, field: str, *, bind: bool) -> str:
    """The endpoint that `socket` has then: a wildcard is resolved.

    Raises `ConfigError`, which names `field`.
    """
    socket.linger = 0
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        refusal = EndpointInUse if error.errno == zmq.EADDRINUSE else ConfigError
        raise refusal(
            f"{field} is {endpoint!r}, which ZeroMQ cannot use ({error}): choose a free address "
            "such as tcp://*:5557"
        ) from error
    return socket.get_string(zmq.LAST_ENDPOINT)
