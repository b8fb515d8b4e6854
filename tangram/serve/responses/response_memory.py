"""Stored responses as an event loop sees them.

They are gone on from, asked for, cancelled, and run in the background.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tangram.errors import MachineError
from tangram.serve.answers.answer import Answer
from tangram.serve.bodies.body import Json
from tangram.serve.chat.chat_messages import MAX_MESSAGES
from tangram.serve.observability.record import Record
from tangram.serve.preparation import WorkThreads
from tangram.serve.responses.response_store import (
    RUNNING,
    ContextBound,
    ResponseStore,
    StoredResponse,
    StoreFull,
    TooLong,
)
from tangram.serve.transport.api_errors import ApiError

if TYPE_CHECKING:
    from tangram.serve.options import ServerOptions
    from tangram.serve.responses.responses_schema import ResponsesRequest

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_EVERY_S = 0.5
_LAST_WORDS_S = 2.0
_MOST_QUOTED = 64
_log = logging.getLogger(__name__)


def name_owner(record: Record | None, salt: str) -> bytes:
    """Who may see a response: the holder of a key, or on a server without keys everybody, with
    the same `cache_salt`.
    """
    key = b"" if record is None or record.key_digest is None else record.key_digest
    return sha256(key + b"\0" + salt.encode(errors="replace")).digest()


@dataclass(frozen=True)
class Recalled:
    """What is stored of a request's conversation.

    `items` are those up to its own input, which goes on from response `number`; `named` are those
    that it refers to, by their ids.
    """

    number: int | None = None
    items: Sequence[Json] = ()
    named: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptResponse:
    """One response that is to be stored in `memory`, for `owner`."""

    memory: ResponseMemory
    owner: bytes
    recalled: Recalled
    write_items: Callable[[], Sequence[Json]]

    async def begin(
        self, response: Json, answer: Answer, draft: Callable[[ApiError | None], Json]
    ) -> str | None:
        """Store the response as it begins. Returns a warning if it cannot be stored.

        `draft` makes the response of what there is if it ends before its end, and of why.
        """
        return await self.memory.begin(response, self._store, answer, draft)

    async def end(self, response: Json) -> str | None:
        """Store it as it has ended. Returns a warning if it cannot be stored."""
        return await self.memory.end(response)

    def _store(self, store: ResponseStore, response: Json) -> None:
        items, body = self.write_items(), response | {"output": []}
        if not store.begin(self.owner, self.recalled.number, body, items):
            # What it goes on from was removed meanwhile: its items become this one's.
            store.begin(self.owner, None, body, [*self.recalled.items, *items])


@dataclass(frozen=True)
class _Running:
    answer: Answer
    draft: Callable[[ApiError | None], Json]


class ResponseMemory:
    """The responses in `store`, as an event loop asks for them; with None nothing is remembered.

    A conversation that goes on has at most `most_bytes` of JSON.
    """

    def __init__(self, store: ResponseStore | None = None, most_bytes: int = 0) -> None:
        self._store, self._bound = store, ContextBound(MAX_MESSAGES, most_bytes)
        # A file is read and written by one thread: on the loop, every stream would wait.
        self._thread = WorkThreads(1, "responses")
        self._running: dict[str, _Running] = {}
        self._watching: asyncio.Task[None] | None = None
        self._beside = set[asyncio.Task[Any]]()

    @classmethod
    def of(cls, options: ServerOptions) -> ResponseMemory:
        """That of a server with `options`. Raises `ConfigError` for a file that is no store."""
        if not options.store_responses:
            return cls()
        return cls(ResponseStore.of(options), int(options.max_body_mb * 1_000_000))

    @property
    def busy(self) -> bool:
        """Whether responses run in the background."""
        return bool(self._beside)

    async def recall(self, body: ResponsesRequest, owner: bytes) -> Recalled:
        """What `body` goes on from and refers to. Raises `ApiError` if there is no such thing."""
        previous, named = body.previous_response_id, body.named_items
        if previous is None and not named:
            return Recalled()
        if self._store is None:
            raise ApiError(
                400,
                "this server stores no responses (store_responses): send the whole conversation as "
                "input",
                param="input" if previous is None else "previous_response_id",
                code="invalid_value",
            )
        room = ContextBound(self._bound.items - len(body.input), self._bound.bytes)
        return await self._call(self._recall, self._store, previous, named, room, owner)

    def _recall(
        self,
        store: ResponseStore,
        previous: str | None,
        named: Sequence[str],
        room: ContextBound,
        owner: bytes,
    ) -> Recalled:
        number, items = None, list[Json]()
        with store.snapshot():
            if previous is not None:
                number = _check_previous(previous, store.find(previous, owner)).number
                with _blame("previous_response_id"):
                    items = store.read_context(number, room)
            with _blame("input"):
                found = store.find_items(named, owner, self._bound)
        for item_id in named:
            if item_id not in found:
                message = f"Item with id {_quote(item_id)} not found: send the item itself"
                raise ApiError(404, message, param="input", code="item_not_found")
        return Recalled(number, items, found)

    def keep(self, body: ResponsesRequest, owner: bytes, recalled: Recalled) -> KeptResponse | None:
        """What stores the response to `body`; None if it is not to be stored.

        Raises `ApiError` if it asks for that and nothing is stored here.
        """
        if not body.store:
            return None
        if self._store is not None:
            return KeptResponse(self, owner, recalled, lambda: body.write_items(recalled.named))
        for name in {"store", "background"} & body.model_fields_set:
            if getattr(body, name):
                message = f"{name} is true, but this server stores no responses (store_responses)"
                raise ApiError(400, f"{message}: leave it out", param=name, code="invalid_value")
        return None

    async def begin(
        self,
        response: Json,
        enter: Callable[[ResponseStore, Json], None],
        answer: Answer,
        draft: Callable[[ApiError | None], Json],
    ) -> str | None:
        """Store `response`, which runs as `answer`, by `enter`. See `KeptResponse.begin`."""
        self._running[response["id"]] = _Running(answer, draft)
        warning = await self._try(self._call(enter, self._opened, response))
        if warning is not None:
            del self._running[response["id"]]
        elif self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return warning

    async def end(self, response: Json) -> str | None:
        """Store how a response has ended. See `KeptResponse.end`."""
        if self._running.pop(response["id"], None) is None:
            return None
        # It goes on if the client leaves now.
        return await asyncio.shield(self._try(self._call(self._opened.end, response)))

    async def find(self, response_id: str, owner: bytes) -> StoredResponse:
        """A stored response. Raises `ApiError` 404."""
        return await self._get(ResponseStore.find, response_id, owner)

    async def cancel(self, response_id: str, owner: bytes) -> StoredResponse:
        """The response, cancelled if it ran. Raises `ApiError` 404."""
        found = await self._get(ResponseStore.cancel, response_id, owner)
        await self._look()
        return found

    async def remove(self, response_id: str, owner: bytes) -> None:
        """Remove a response, which ends it if it runs. Raises `ApiError` 404."""
        await self._get(ResponseStore.remove, response_id, owner)
        await self._look()

    async def list_input(self, response_id: str, owner: bytes) -> list[Json]:
        """The items that a response has answered, the oldest first. Raises `ApiError` 404."""
        return await self._get(ResponseStore.list_input, response_id, owner)

    async def _get(
        self, read: Callable[[ResponseStore, str, bytes], T | None], response_id: str, owner: bytes
    ) -> T:
        found = None
        if self._store is not None:
            found = await self._call(read, self._store, response_id, owner)
        if not found:
            raise ApiError(404, f"Response with id {_quote(response_id)} not found")
        return found

    def run_beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in the background. Its failure is that of its response."""
        task = asyncio.create_task(work)
        self._beside.add(task)

        def end(task: asyncio.Task[T]) -> None:
            self._beside.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, ApiError):
                _log.error("a response in the background has failed", exc_info=error)

        task.add_done_callback(end)
        return task

    async def stop(self) -> None:
        """Store what runs as ended, and close the store. The engine has stopped."""
        if self._beside:
            await asyncio.wait(self._beside, timeout=_LAST_WORDS_S)
        if self._watching is not None:
            self._watching.cancel()
        if self._store is None:
            return
        for running in list(self._running.values()):
            await self.end(running.draft(running.answer.failure))
        store, self._store = self._store, None
        await self._thread.run(store.close)
        self._thread.shutdown(wait=False)

    async def _watch(self) -> None:
        """While responses run: say so in the store, and end those that are to end."""
        while self._running:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        looked_at = dict(self._running)
        for running in looked_at.values():
            if running.answer.closed:
                await self.end(running.draft(running.answer.failure))
        if self._store is None:
            return
        with suppress(MachineError):  # a warning tells of it where an answer cannot be stored
            going_on = await self._call(self._store.watch, looked_at.keys())
            for response_id in looked_at.keys() - going_on:
                looked_at[response_id].answer.cancel()

    @property
    def _opened(self) -> ResponseStore:
        if self._store is None:
            raise MachineError("the server is ending: its stored responses are closed")
        return self._store

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._thread.run(work, *args, **kwargs)
        except sqlite3.Error as error:
            raise MachineError(
                f"the stored responses cannot be used ({error}): send the whole conversation as "
                "input, with store false"
            ) from error

    async def _try(self, work: Awaitable[object]) -> str | None:
        """Have `work` change the store. Returns a warning if it cannot."""
        try:
            await work
        except (MachineError, StoreFull) as error:
            _log.warning("a response was not stored: %s", error)
            return f"this response was not stored: {error}"
        return None


def _check_previous(response_id: str, found: StoredResponse | None) -> StoredResponse:
    """`found`. Raises `ApiError` unless it has ended so that a conversation can go on."""
    if found is None:
        message, code = f"Previous response with id {_quote(response_id)} not found", "not_found"
    elif found.status not in ("completed", "incomplete"):
        wait = ": wait until it has ended" if found.status == RUNNING else ""
        message = f"Previous response with id {_quote(response_id)} is {found.status}{wait}"
        code = "not_completed"
    else:
        return found
    code = f"previous_response_{code}"
    raise ApiError(400, message, param="previous_response_id", code=code)


@contextmanager
def _blame(field: str) -> Iterator[None]:
    """`TooLong` inside comes out as an `ApiError` about `field`."""
    try:
        yield
    except TooLong as error:
        message = f"{field}: the stored conversation {error}: begin another, or send part of it"
        raise ApiError(400, message, param=field, code="invalid_value") from error


def _quote(name: str) -> str:
    return repr(name if len(name) <= _MOST_QUOTED else f"{name[:_MOST_QUOTED]}…")
