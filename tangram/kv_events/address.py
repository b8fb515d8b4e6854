"""Where KV events go, as options say it. What sends them there is in `publisher.py`."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

from tangram.errors import ConfigError

_PORT = re.compile(r"tcp://.*:(\d+)")
_MOST_PORT = 65535


@dataclass(frozen=True)
class EventAddress:
    """Events go to `endpoint` under `topic`; who missed some asks at `replay`, if that is given."""

    endpoint: str
    replay: str | None
    topic: str

    @classmethod
    def of(cls, endpoint: str | None, replay: str | None, topic: str) -> EventAddress | None:
        """What --kv-events, --kv-events-replay and --kv-events-topic say; None is no events.

        Raises `ConfigError` if the latter two stand alone, or ZeroMQ is missing.
        """
        if endpoint is None:
            if replay is not None or topic:
                raise ConfigError(
                    "kv_events_replay or kv_events_topic is given without kv_events: add "
                    "kv_events, or leave them out"
                )
            return None
        try:
            importlib.import_module("zmq")
        except ImportError as error:
            raise ConfigError(
                f"kv_events is {endpoint!r}, but zmq is not installed: pip install "
                "'tangram-serve[kv-events]', or leave kv_events out"
            ) from error
        return cls(endpoint, replay, topic)

    def of_rank(self, rank: int) -> EventAddress:
        """The address of engine `rank` of several: each port is higher by `rank`.

        Raises `ConfigError` for an endpoint that several engines cannot share in this way: one that
        is not bound, or without a port.
        """
        replay = None if self.replay is None else _shift(self.replay, "kv_events_replay", rank)
        return EventAddress(_shift(self.endpoint, "kv_events", rank), replay, self.topic)


def is_bound(endpoint: str) -> bool:
    """Whether `endpoint` is listened at, as vLLM decides it: others are connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _shift(endpoint: str, field: str, rank: int) -> str:
    found = _PORT.fullmatch(endpoint)
    if found is None or not is_bound(endpoint):
        raise ConfigError(
            f"{field} is {endpoint!r}, and each replica listens at a port of its own: name the "
            "first one, like tcp://*:5557"
        )
    port = int(found[1]) + rank
    if port > _MOST_PORT:
        raise ConfigError(
            f"{field} is {endpoint!r}, and no port from there to {_MOST_PORT} is free: name a "
            "lower one"
        )
    return f"{endpoint[: found.start(1)]}{port}"
