"""What another package may add to a server: routes, and news of what the server does."""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI

from tangram.serve.record import Generation, Record


class Extension(Protocol):
    """Adds routes to a server. All is called on the server's loop but `drain`."""

    def mount(self, app: FastAPI, *, locked: bool) -> None:
        """Add the routes; `locked` if requests need an API key."""
        ...

    def is_open(self, path: bytes) -> bool:
        """Whether `path`, as it came, needs no key."""
        ...

    def start(self) -> None:
        """The server's loop runs."""
        ...

    def announce(self, generation: Generation, record: Record) -> None:
        """What the request of `record` asks for is about to be submitted."""
        ...

    def count(self, record: Record) -> None:
        """A request has its answer."""
        ...

    def drain(self) -> None:
        """End what would never end by itself: the server is about to. Any thread may call it."""
        ...

    def close(self) -> None:
        """The server ends."""
        ...
