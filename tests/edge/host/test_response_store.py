"""The file of stored responses: its bounds, its chains, and what is no such file."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tangram.errors import ConfigError
from tangram.serve.responses.response_store import ContextBound, ResponseStore, StoreFull, TooLong
from tangram.serve.responses.responses_schema import ResponsesRequest

OWNER, OTHER = b"owner", b"other"
ALL = ContextBound(10_000, 10**9)


@contextmanager
def open_store(
    path: Path | str = "", most: int = 10_000, most_bytes: int = 2**30, most_s: float = 1e6
) -> Iterator[ResponseStore]:
    with closing(ResponseStore(str(path), most, most_bytes, most_s)) as store:
        yield store


def item(text: str, name: str | None = None) -> dict[str, Any]:
    return {"id": name or f"msg_{text[:8]}", "type": "message", "content": text}


def put(store: ResponseStore, name: str, text: str = "a", previous: str | None = None) -> None:
    """Store a response that has ended."""
    number = None if previous is None else find(store, previous).number
    assert store.begin(OWNER, number, {"id": name, "status": "in_progress"}, [item(text)])
    assert store.end({"id": name, "status": "completed", "output": [item(f"to {text}")]})


def find(store: ResponseStore, name: str) -> Any:
    return store.find(name, OWNER)


def read(store: ResponseStore, name: str) -> list[str]:
    """The texts of a conversation."""
    return [each["content"] for each in store.read_context(find(store, name).number, ALL)]


def test_a_chain_of_thousands_of_links_is_read_and_removed_soon(tmp_path: Path) -> None:
    begin_s, count = time.process_time(), 3000
    with open_store(tmp_path / "store") as store:
        put(store, "0", "0")
        for number in range(1, count):
            put(store, str(number), str(number), str(number - 1))
        begun_s = time.process_time()
        last = str(count - 1)
        context = read(store, last)
        assert context[:3] == ["0", "to 0", "1"] and len(context) == 2 * count
        for number in range(count - 1):
            assert store.remove(str(number), OWNER)
        assert read(store, last) == context, "what goes on from them needs them"
        with pytest.raises(TooLong, match="100 items"):
            store.read_context(find(store, last).number, ContextBound(100, 10**9))
        assert store.remove(last, OWNER)
    assert time.process_time() - begun_s < 5 and time.process_time() - begin_s < 20
    with closing(sqlite3.connect(tmp_path / "store")) as file:
        left = [file.execute(f"SELECT count(*) FROM {name}") for name in ("responses", "items")]
        assert [rows.fetchone() for rows in left] == [(0,), (0,)]


def test_long_conversations_cost_little_more_than_their_bytes(tmp_path: Path) -> None:
    """In the file, and in the index of ids, where those of one conversation are near each other."""
    said = [{"role": "user", "content": "x" * 2100}] * 100
    body = ResponsesRequest.model_validate({"model": "m", "input": said})
    with open_store(tmp_path / "store") as store:
        for number in range(20):
            items = body.write_items({})
            ids = [each["id"] for each in items]
            assert ids == sorted(set(ids))
            assert store.begin(OWNER, None, {"id": str(number), "status": "in_progress"}, items)
    bytes_stored = 20 * len(json.dumps(items))
    assert (tmp_path / "store").stat().st_size < 1.3 * bytes_stored


def test_a_circle_that_somebody_has_written_into_the_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        put(store, "a")
        put(store, "b", "b", "a")
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE responses SET previous = 2")
    with open_store(path) as store:
        assert read(store, "b") == ["b", "to b"]
        assert store.remove("b", OWNER)


def test_a_removed_link_leaves_its_branches_alone() -> None:
    with open_store() as store:
        put(store, "root")
        for name in ("left", "right"):
            put(store, name, name, "root")
        gone = find(store, "root").number
        store.remove("root", OWNER)
        store.remove("left", OWNER)
        assert read(store, "right") == ["a", "to a", "right", "to right"]
        assert find(store, "root") is None
        store.remove("right", OWNER)
        assert not store.begin(OWNER, gone, {"id": "late", "status": "in_progress"}, [])


def test_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    most = 2**20
    with open_store(tmp_path / "store", most_bytes=most) as store:
        for number in range(60):
            put(store, str(number), f"{number} " + "x" * 50_000)
        found = [number for number in range(60) if find(store, str(number)) is not None]
        assert found == list(range(found[0], 60)) and 5 < len(found) < 20
        with pytest.raises(StoreFull, match="store_gib"):
            put(store, "large", "x" * most)
        assert [n for n in range(60) if find(store, str(n)) is not None] == found
        before = find(store, "59").number
        assert store.begin(OWNER, before, {"id": "run", "status": "in_progress"}, [])
    assert (tmp_path / "store").stat().st_size < most + 200_000


def test_the_oldest_go_and_what_runs_stays() -> None:
    with open_store(most=3) as store:
        assert store.begin(OWNER, None, {"id": "run", "status": "in_progress"}, [])
        for name in "abcd":
            put(store, name)
        assert [name for name in ("run", *"abcd") if find(store, name)] == ["run", "c", "d"]
        assert store.watch({"run", "c"}) == {"run"}
    with open_store(most=1) as store:
        assert store.begin(OWNER, None, {"id": "one", "status": "in_progress"}, [])
        with pytest.raises(StoreFull, match="store_responses"):
            store.begin(OWNER, None, {"id": "two", "status": "in_progress"}, [])


def test_what_is_too_old_is_gone() -> None:
    with open_store(most_s=0.05) as store:
        put(store, "a")
        time.sleep(0.06)
        assert find(store, "a") is None and not store.find_items(["msg_a"], OWNER, ALL)
        put(store, "b")
        assert find(store, "b") is not None


def test_an_item_counts_as_often_as_it_is_wanted() -> None:
    with open_store() as store:
        put(store, "a", "x" * 1000)
        name = item("x" * 1000)["id"]
        assert store.find_items([name, name], OWNER, ALL)[name]["content"] == "x" * 1000
        assert not store.find_items([name], OTHER, ALL)
        with pytest.raises(TooLong, match="5000 bytes"):
            store.find_items([name] * 5, OWNER, ContextBound(100, 5000))


def test_what_nobody_runs_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store") as store:
        assert store.begin(OWNER, None, {"id": "a", "status": "in_progress"}, [])
    with open_store(tmp_path / "store") as store:
        assert find(store, "a").status == "in_progress"
        monkeypatch.setattr("tangram.serve.responses.response_store.LOST_AFTER_S", -1.0)
        found = find(store, "a")
        assert (found.status, found.body["error"]["code"]) == ("failed", "server_error")


def write_other(path: Path, kind: str) -> None:
    """Something at `path` that is no store."""
    if kind == "text":
        path.write_text("Dear diary, " * 100)
    elif kind == "folder":
        path.mkdir()
    elif kind == "damaged":
        with open_store(path) as store:
            for number in range(50):
                put(store, str(number), "x" * 3000)
        content = bytearray(path.read_bytes())
        content[8192:60_000] = b"z" * (60_000 - 8192)
        path.write_bytes(content)
    else:
        if kind == "newer":
            with open_store(path) as store:
                put(store, "a")
        with closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA user_version = 7" if kind == "newer" else "CREATE TABLE a (b)")


@pytest.mark.parametrize("kind", ["text", "folder", "damaged", "newer", "database", "nowhere"])
def test_another_file_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("missing/store" if kind == "nowhere" else "store")
    if kind != "nowhere":
        write_other(path, kind)
    content = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=r"store_path is .*store"), open_store(path) as store:
        store.check()
    assert content == (path.read_bytes() if path.is_file() else None)


def test_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch(mode=0o666)
    with open_store(path) as store:
        put(store, "a")
        store.check()
        assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}


def test_what_is_read_is_of_one_moment(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as one, open_store(tmp_path / "store") as other:
        put(one, "root")
        put(one, "leaf", "leaf", "root")
        with one.snapshot():
            found = find(one, "leaf")
            for name in ("root", "leaf"):
                assert other.remove(name, OWNER)
            texts = [each["content"] for each in one.read_context(found.number, ALL)]
        assert texts == ["a", "to a", "leaf", "to leaf"]
        assert find(one, "leaf") is None
