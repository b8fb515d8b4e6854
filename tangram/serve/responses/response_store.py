"""The file of stored responses.

The API processes of a server share it, by SQLite. A response has its own items; the earlier ones of
its conversation are those of the response that it goes on from. One that is removed stays hidden in
the file as long as another goes on from it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tangram.errors import ConfigError
from tangram.foreign_files import refuse_irregular
from tangram.serve.bodies.body import Json

if TYPE_CHECKING:
    from tangram.serve.options import ServerOptions

# What SQLite's header says of such a file: whose it is, and the version of the tables.
_APPLICATION, _VERSION = 0x54_47_52_53, 1
_APPLICATION_AT = 68
_WAIT_S = 10.0  # for other processes that write
_DAY_S = 86_400
# A row of more than a quarter of a page has pages of its own for the rest: messages are longer
# than a quarter of SQLite's 4 KiB.
_PAGE_BYTES = 16 * 2**10
_LOG_BYTES = 16 * 2**20  # what the file of changes keeps once they are entered
# A response that runs is seen by its process again and again. Later than this, nobody runs it.
LOST_AFTER_S = 30.0
RUNNING = "in_progress"
_TABLES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner BLOB NOT NULL,
    previous INTEGER, followers INTEGER NOT NULL DEFAULT 0, hidden INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL, status TEXT NOT NULL, seen_s REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX shown ON responses (number) WHERE NOT hidden;
CREATE INDEX aged ON responses (created_s) WHERE NOT hidden;
CREATE INDEX running ON responses (id) WHERE status = 'in_progress';
CREATE TABLE items (
    response INTEGER NOT NULL, place INTEGER NOT NULL, is_output INTEGER NOT NULL, id TEXT,
    item BLOB NOT NULL, PRIMARY KEY (response, place)) WITHOUT ROWID;
CREATE INDEX named ON items (id);
"""


class StoreFull(Exception):
    """A response does not fit within the bounds of the store, whatever else is removed."""


class TooLong(Exception):
    """The items of a conversation exceed a bound; says by what."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, and what it is called in the store."""

    number: int
    status: str
    body: Json


@dataclass(frozen=True)
class ContextBound:
    """How much of a conversation may be read: items, and bytes of their JSON."""

    items: int
    bytes: int


class ResponseStore:
    """The responses in the file at `path`; in a private one that ends with this if it is empty.

    The oldest are removed to keep at most `most` of them, `most_bytes` of the file and `most_s` of
    age. Every call may block, and any thread may call, one at a time. Raises `ConfigError` if the
    file is no such store, and `sqlite3.Error` where it cannot be read or written.
    """

    def __init__(self, path: str, most: int, most_bytes: int, most_s: float) -> None:
        self._path, self._most, self._most_bytes, self._most_s = path, most, most_bytes, most_s
        try:
            if path:
                _create(path)
            self._db = sqlite3.connect(
                path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            with ExitStack() as undoing:
                undoing.callback(self.close)
                self._prepare()
                undoing.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise self._refuse(str(error)) from error

    @classmethod
    def of(cls, options: ServerOptions) -> ResponseStore:
        """The store that `options` describe. Raises as the class does."""
        return cls(
            str(Path(options.store_path).absolute()) if options.store_path else "",
            options.store_responses,
            int(options.store_gib * 2**30),
            options.store_days * _DAY_S,
        )

    def _prepare(self) -> None:
        self._db.execute("PRAGMA trusted_schema = OFF")  # the file may be somebody else's
        self._db.execute("PRAGMA synchronous = NORMAL")
        application, version = self._ask("PRAGMA application_id"), self._ask("PRAGMA user_version")
        if application == version == 0 and self._ask("SELECT count(*) FROM sqlite_master") == 0:
            self._db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._writing():
                if self._ask("PRAGMA user_version") == 0:  # no other process was faster
                    for statement in filter(str.strip, _TABLES.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif application != _APPLICATION:
            raise self._refuse("it is no store of responses")
        elif version != _VERSION:
            raise self._refuse(f"it is a store of version {version}, this is {_VERSION}")
        self._db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")

    def check(self) -> None:
        """Raise `ConfigError` if the file is damaged."""
        try:
            found = self._ask("PRAGMA quick_check(1)")
        except sqlite3.Error as error:
            found = str(error)
        if found != "ok":
            raise self._refuse(f"it is damaged ({found})")

    def _refuse(self, reason: str) -> ConfigError:
        return ConfigError(
            f"store_path is {self._path!r}, which cannot be used: {reason}; choose another path, "
            "or remove that file"
        )

    def close(self) -> None:
        """Close the file. Nothing else may be called afterwards."""
        self._db.close()

    def begin(self, owner: bytes, previous: int | None, body: Json, items: Sequence[Json]) -> bool:
        """Store a response that runs, with its own input.

        Returns False and stores nothing if `previous` is no more. Raises `StoreFull`.
        """
        now_s = time.time()
        with self._writing():
            follow = "UPDATE responses SET followers = followers + 1 WHERE number = ?"
            if previous is not None and self._db.execute(follow, (previous,)).rowcount == 0:
                return False
            entered = self._db.execute(
                "INSERT INTO responses (id, owner, previous, created_s, status, seen_s, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(body["id"], owner, previous, now_s, body["status"], now_s),
                    msgspec.json.encode(body),
                ),
            )
            number = entered.lastrowid
            assert number is not None
            self._enter(number, 0, items)
            self._make_room(number)
        return True

    def end(self, body: Json) -> bool:
        """Store how a running response has ended; False if it was cancelled or removed."""
        with self._writing():
            row = self._db.execute(
                "SELECT number, (SELECT count(*) FROM items WHERE response = number)"
                " FROM responses WHERE id = ? AND status = ? AND NOT hidden",
                (body["id"], RUNNING),
            ).fetchone()
            if row is None:
                return False
            number, place = row
            self._enter(number, place, body["output"], is_output=True)
            self._update(number, body)
            self._make_room(number)
        return True

    def find(self, response_id: str, owner: bytes) -> StoredResponse | None:
        """A response of `owner`, as it is now."""
        now_s = time.time()
        with self.snapshot():
            row = self._db.execute(
                "SELECT number, status, seen_s, body FROM responses"
                " WHERE id = ? AND owner = ? AND NOT hidden AND created_s >= ?",
                (response_id, owner, now_s - self._most_s),
            ).fetchone()
            if row is None:
                return None
            number, status, seen_s, encoded = row
            body = msgspec.json.decode(encoded)
            output = "SELECT item FROM items WHERE response = ? AND is_output ORDER BY place"
            items = self._db.execute(output, (number,)).fetchall()
        if status == RUNNING and seen_s < now_s - LOST_AFTER_S:
            reason = "the server ended while this was generated: send the request again"
            error = {"code": "server_error", "message": reason}
            body |= {"status": (status := "failed"), "error": error}
        body["output"] = [msgspec.json.decode(item) for (item,) in items]
        return StoredResponse(number, status, body)

    def cancel(self, response_id: str, owner: bytes) -> StoredResponse | None:
        """Have a response be cancelled if it runs; who runs it sees that by `watch`."""
        with self._writing():
            found = self.find(response_id, owner)
            if found is None or found.status != RUNNING:
                return found
            self._update(found.number, found.body | {"status": "cancelled"})
        return self.find(response_id, owner)

    def remove(self, response_id: str, owner: bytes) -> bool:
        """Remove a response; False if `owner` has none of this id."""
        with self._writing():
            found = self.find(response_id, owner)
            if found is not None:
                self._remove(found.number)
        return found is not None

    def watch(self, running: AbstractSet[str]) -> AbstractSet[str]:
        """Say of responses that they are `running` here. Returns those that are to go on."""
        with self._writing():
            rows = self._db.execute("SELECT id FROM responses WHERE status = 'in_progress'")
            going_on = running & {response_id for (response_id,) in rows}
            seen = [(time.time(), response_id) for response_id in going_on]
            self._db.executemany("UPDATE responses SET seen_s = ? WHERE id = ?", seen)
        return going_on

    def read_context(self, number: int, bound: ContextBound) -> list[Json]:
        """The items of a conversation, up to the output of a response. Raises `TooLong`."""
        return self._read(number, with_output=True, bound=bound)

    def list_input(self, response_id: str, owner: bytes) -> list[Json] | None:
        """The items that a response of `owner` has answered, the oldest first."""
        with self.snapshot():
            found = self.find(response_id, owner)
            return None if found is None else self._read(found.number, with_output=False)

    def _read(
        self, number: int, *, with_output: bool, bound: ContextBound | None = None
    ) -> list[Json]:
        """A walk back, which cannot be long: what went on from too much was refused."""
        turns, items, size, at = [], 0, 0, number
        while at is not None:
            rows = self._db.execute(
                "SELECT item FROM items WHERE response = ? AND is_output <= ? ORDER BY place",
                (at, with_output or at != number),
            )
            turn = [item for (item,) in rows]
            items, size = items + len(turn), size + sum(map(len, turn))
            if bound is not None:
                _check_bound(bound, items, size)
            turns.append(turn)
            # No file that was tampered with makes a circle of it.
            back = "SELECT previous FROM responses WHERE number = ? AND previous < number"
            at = self._ask(back, at)
        return [msgspec.json.decode(item) for turn in reversed(turns) for item in turn]

    def find_items(self, ids: Sequence[str], owner: bytes, bound: ContextBound) -> dict[str, Json]:
        """The newest items of these ids in responses of `owner`. Raises `TooLong`.

        `ids` names an item as often as it is wanted, and each counts.
        """
        found, size = dict[str, bytes](), 0
        for place, item_id in enumerate(ids):
            if item_id not in found:
                item = self._ask(
                    "SELECT item FROM items JOIN responses ON number = response WHERE items.id = ?"
                    " AND owner = ? AND NOT hidden AND created_s >= ? ORDER BY number DESC LIMIT 1",
                    *(item_id, owner, time.time() - self._most_s),
                )
                if item is None:
                    continue
                found[item_id] = item
            size += len(found[item_id])
            _check_bound(bound, place + 1, size)
        return {item_id: msgspec.json.decode(item) for item_id, item in found.items()}

    def _enter(
        self, number: int, place: int, items: Sequence[Json], *, is_output: bool = False
    ) -> None:
        rows = (
            (number, at, is_output, item.get("id"), msgspec.json.encode(item))
            for at, item in enumerate(items, place)
        )
        self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)

    def _update(self, number: int, body: Json) -> None:
        kept = msgspec.json.encode(body | {"output": []})
        update = "UPDATE responses SET status = ?, body = ? WHERE number = ?"
        self._db.execute(update, (body["status"], kept, number))

    def _make_room(self, kept: int) -> None:
        """Remove what is too old, then the oldest. What runs stays, and so does `kept`."""
        now_s = time.time()
        old = "SELECT number FROM responses WHERE NOT hidden AND created_s < ?"
        for (number,) in self._db.execute(old, (now_s - self._most_s,)).fetchall():
            self._remove(number)
        count = "SELECT count(*) FROM responses WHERE NOT hidden"
        while self._ask(count) > self._most or self._used_bytes > self._most_bytes:
            oldest = self._ask(
                "SELECT number FROM responses WHERE NOT hidden AND number != ?"
                " AND (status != ? OR seen_s < ?) ORDER BY number LIMIT 1",
                *(kept, RUNNING, now_s - LOST_AFTER_S),
            )
            if oldest is None:
                raise StoreFull(
                    f"its conversation and what runs exceed {self._most} responses "
                    f"(store_responses) or {self._most_bytes} bytes (store_gib)"
                )
            self._remove(oldest)

    def _remove(self, number: int) -> None:
        """Remove a response, and those hidden before it that nothing goes on from now."""
        at: int | None = number
        while at is not None:
            select = "SELECT previous, followers FROM responses WHERE number = ?"
            previous, followers = self._db.execute(select, (at,)).fetchone()
            if followers:
                hide = "UPDATE responses SET hidden = 1, body = '' WHERE number = ?"
                self._db.execute(hide, (at,))
                return
            self._db.execute("DELETE FROM items WHERE response = ?", (at,))
            self._db.execute("DELETE FROM responses WHERE number = ?", (at,))
            leave = "UPDATE responses SET followers = followers - 1 WHERE number = ?"
            self._db.execute(leave, (previous,))
            unused = "SELECT number FROM responses WHERE number = ? AND hidden AND followers = 0"
            at = self._ask(unused, previous)

    @property
    def _used_bytes(self) -> int:
        pages = self._ask("PRAGMA page_count") - self._ask("PRAGMA freelist_count")
        return int(pages * self._ask("PRAGMA page_size"))

    def _ask(self, statement: str, *values: object) -> Any:
        """The first column of the first row; None without a row."""
        row = self._db.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def _writing(self) -> AbstractContextManager[None]:
        """All of it is written, or nothing."""
        return self._transaction("IMMEDIATE")

    def snapshot(self) -> AbstractContextManager[None]:
        """All that is read inside is of one moment, whatever other processes remove."""
        return self._transaction("DEFERRED")

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        if self._db.in_transaction:
            yield
            return
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has rolled it back already
                self._db.execute("ROLLBACK")
            raise


def _check_bound(bound: ContextBound, items: int, size: int) -> None:
    """Raise `TooLong` if so many items, or bytes of them, are more than `bound`."""
    if items > bound.items:
        raise TooLong(f"has more than {bound.items} items")
    if size > bound.bytes:
        raise TooLong(f"has more than {bound.bytes} bytes")


def _create(path: str) -> None:
    """Have a file at `path`; a store its owner alone may read. Raises `OSError`."""
    refuse_irregular(path)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
        head = file.read(_APPLICATION_AT + 4)
        if not head or head[_APPLICATION_AT:] == _APPLICATION.to_bytes(4):
            os.fchmod(file.fileno(), 0o600)  # files of changes get the same
