"""What the web page's endpoints ask of the engine's process, and where they ask it."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from tangram.web.watchers import Watcher


class ModelQuestion(Struct, frozen=True, array_like=True, tag=0):
    """What never changes while the server runs."""


class RequestQuestion(Struct, frozen=True, array_like=True, tag=1):
    """All of completion `index` of a request of `client`, its tokens from `tokens_from` on."""

    id: str
    index: int
    tokens_from: int
    client: bytes | None


class KeptQuestion(Struct, frozen=True, array_like=True, tag=2):
    """The positions that the heads of a chunk have kept."""

    id: str
    index: int
    chunk: int
    client: bytes | None


class PoolQuestion(Struct, frozen=True, array_like=True, tag=3):
    """The state of each page; conversations of others than `client` have no id."""

    client: bytes | None


class HistoryQuestion(Struct, frozen=True, array_like=True, tag=4):
    """The last `seconds`."""

    seconds: int


Question = ModelQuestion | RequestQuestion | KeptQuestion | PoolQuestion | HistoryQuestion


class Announcement(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """A request of the API, known by the id of its answer and by that in `x-request-id`.

    The engine calls it `engine_id`. `first_choice` is the number of its first completion. `client`
    is the digest of its API key, None where there are no keys.
    """

    engine_id: str
    answer_id: str
    request_id: str
    first_choice: int
    client: bytes | None
    queued_s: float

    @property
    def names(self) -> tuple[str, str]:
        """What clients may call it."""
        return self.answer_id, self.request_id


class AnswerTimes(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Of a request that has ended: seconds to its first token, and from token to token."""

    first_token_s: float
    token_s: float | None


class WebSource(Protocol):
    """Answers what the web page asks. For the server's event loop."""

    async def ask(self, question: Question) -> bytes:
        """The answer as JSON. Raises `ApiError`."""

    async def watch(self, watcher: Watcher) -> None:
        """Send `watcher` all news from now on, first what there is. Raises `ApiError`."""

    def unwatch(self, watcher: Watcher) -> None:
        """Send nothing more."""

    def announce(self, announcement: Announcement) -> None:
        """A request is about to be submitted."""

    def count(self, times: AnswerTimes) -> None:
        """A request has ended."""
