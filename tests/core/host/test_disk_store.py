"""Links as files: whatever happens to a file or to its writer, what is read is what was written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.cache import disk_store
from tangram.cache.disk import DiskTier
from tangram.cache.disk_store import DiskStore, open_store
from tangram.errors import ConfigError
from tangram.types import Int32, LinkName
from tests.core.host.disk_double import DeferredExecutor
from tests.mentions import mentioning, mentions

MADE_FOR = {"weights": "abc", "dtype": "float32"}
SHAPE = (3, 50)
LINK_BYTES = 64 + 4 * 3 * 50


def name_of(number: int, root: int = 0) -> LinkName:
    return LinkName(bytes([root]) * 32, number.to_bytes(32))


def pages_of(number: int) -> Int32:
    return np.random.default_rng(number).integers(-(2**31), 2**31, SHAPE, np.int32)


def open_at(folder: Path, links: int = 100) -> DiskStore:
    return open_store(folder, MADE_FOR, links * LINK_BYTES)


def put(store: DiskStore, *numbers: int, root: int = 0) -> None:
    for number in numbers:
        assert store.write(name_of(number, root), pages_of(number), store.epoch)


def read(store: DiskStore, number: int, root: int = 0) -> bool:
    """Whether a link is there; it is as it was written then."""
    found = store.read(name_of(number, root), SHAPE)
    assert found is None or np.array_equal(found, pages_of(number))
    return found is not None


def path_of(store: DiskStore, number: int) -> Path:
    return store.folder / name_of(number).root.hex() / name_of(number).key.hex()


def test_a_restart_finds_every_link_and_counts_them(tmp_path: Path) -> None:
    put(open_at(tmp_path), 1, 2)
    store = open_at(tmp_path)
    store.look(store.limit_bytes)
    assert (store.links, store.used_bytes) == (2, 2 * LINK_BYTES)
    assert store.has(name_of(1)) and not store.has(name_of(3))
    assert read(store, 1) and read(store, 2) and not read(store, 3) and not store.corrupt


def test_nobody_else_may_read_it_and_no_token_is_in_it(tmp_path: Path) -> None:
    store = open_at(tmp_path / "new" / "folder")
    put(store, 1)
    for path in store.folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    assert store.folder.stat().st_mode & 0o077 == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_file_that_was_torn_or_changed_is_found_removed_and_counted(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        damage(open_at(Path(folder)), data)


def damage(store: DiskStore, data: st.DataObject) -> None:
    put(store, 1, 2)
    path = path_of(store, 1)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * 52 - 1) | st.integers(8 * 64, 8 * len(whole) - 1))
        whole[bit // 8] ^= 1 << bit % 8
    else:
        end = data.draw(st.integers(0, len(whole) - 1))
        kept = data.draw(st.booleans())  # a file has its size before it has its blocks
        whole = whole[:end] + bytes(len(whole) - end if kept else 0)
    if bytes(whole) == path.read_bytes():
        return
    path.write_bytes(whole)
    assert store.has(name_of(1)) and not read(store, 1)
    assert store.corrupt == 1 and not store.has(name_of(1)) and read(store, 2)


def test_a_link_in_the_place_of_another_is_not_served(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, 1, 2)
    path_of(store, 1).rename(path_of(store, 2))
    assert not read(store, 2) and store.corrupt == 1
    put(store, 3)
    assert store.read(name_of(3), (2, 50)) is None and store.corrupt == 2


def _write_for_ever(folder: Path) -> None:
    store, number = open_at(folder, 20), 0
    while True:
        put(store, number % 40)
        number += 1


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path, seed: int) -> None:
    """Two at once write and evict in one folder; both are killed at some point of a write."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_for_ever, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    store, deadline = open_at(tmp_path, 20), time.monotonic() + 0.2 + 0.07 * seed
    while time.monotonic() < deadline:
        for number in range(40):
            read(store, number)
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert sum(read(store, number) for number in range(40)) > 0 and not store.corrupt
    store.look(store.limit_bytes)
    assert store.used_bytes <= store.limit_bytes + 2 * LINK_BYTES


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, 1)
    begun = path_of(store, 1).with_name(f".{'a' * 32}.partial")
    begun.write_bytes(b"begun")
    store.look(store.limit_bytes)
    assert begun.exists() and store.links == 1
    os.utime(begun, (0, 0))
    store.look(store.limit_bytes)
    assert not begun.exists() and read(store, 1)


def test_the_least_recently_used_are_removed_and_children_before_their_parents(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path, 5)
    for number in (1, 2, 3, 4, 5):
        put(store, number)
    for number in (5, 4, 3):
        os.utime(path_of(store, number), ns=(number, number))
    store.touch([name_of(1), name_of(2)])
    put(store, 6)
    assert not read(store, 3) and store.used_bytes <= store.limit_bytes
    put(store, 7, 8)
    assert not read(store, 4) and not read(store, 5)
    put(store, 9)
    assert not read(store, 2) and read(store, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_full_or_read_only_disk_costs_the_links_that_it_refuses_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store, reading, writing = open_at(tmp_path), DeferredExecutor(), DeferredExecutor()
    disk = DiskTier(store, 200, reading, writing)

    def save(number: int) -> None:
        disk.save(name_of(number), LINK_BYTES, lambda: pages_of(number))
        writing.run()

    save(1)
    real = os.open
    with monkeypatch.context() as broken:

        def refuse(path: str, flags: int, *mode: int) -> int:
            if flags & os.O_CREAT:
                raise OSError(code, os.strerror(code))
            return real(path, flags, *mode)

        broken.setattr(disk_store.os, "open", refuse)
        save(2)
        save(3)
        assert read(store, 1) and disk.dropped == 2
    told = [text for text in caplog.messages if mentions(text, os.strerror(code))]
    assert len(told) == 1
    save(4)
    assert read(store, 4) and not read(store, 2) and disk.dropped == 2


def test_a_disk_that_fills_up_within_a_write_keeps_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_at(tmp_path)
    put(store, 1)
    real = disk_store._create

    def fill(path: Path) -> object:
        file = real(path)
        os.truncate(path, 10)
        write = file.raw.write

        class Full:
            def __enter__(self) -> Full:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                write(data[:7])
                raise OSError(errno.ENOSPC, "full")

        return Full()

    monkeypatch.setattr(disk_store, "_create", fill)
    with pytest.raises(OSError, match="full"):
        store.write(name_of(2), pages_of(2), store.epoch)
    assert [path.name for path in path_of(store, 1).parent.iterdir()] == [path_of(store, 1).name]


def test_what_is_forgotten_is_not_written_by_those_who_began_before(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, 1, 2)
    put(store, 3, root=1)
    epoch = store.epoch
    store.forget(name_of(1).root)
    assert not read(store, 1) and not read(store, 2) and read(store, 3, root=1)
    assert not store.write(name_of(1), pages_of(1), epoch) and not read(store, 1)
    put(store, 1)
    store.clear()
    assert not read(store, 1) and not read(store, 3, root=1)
    put(store, 1)
    store.look(store.limit_bytes)
    assert store.links == 1 and [path.name for path in tmp_path.iterdir()] == [store.folder.name]


def test_what_a_read_only_disk_keeps_is_not_served_once_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_at(tmp_path)
    put(store, 1)
    put(store, 2, root=1)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Path, "rename", refuse)
    store.forget(name_of(1).root)
    assert not store.has(name_of(1)) and not read(store, 1) and read(store, 2, root=1)
    store.clear()
    assert not store.has(name_of(2, 1)) and not read(store, 2, root=1)


def test_a_store_of_something_else_is_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(open_at(tmp_path), 1)
    newer = tmp_path / "v9-0123456789abcdef"
    newer.mkdir()
    (newer / "something").write_text("new")
    other = open_store(tmp_path, MADE_FOR | {"weights": "def"}, 1000)
    assert not read(other, 1)
    first, second = sorted(caplog.messages)
    assert mentions(first, "weights") and "dtype" not in first
    assert mentions(second, "v9-0123456789abcdef format")
    assert (newer / "something").read_text() == "new" and read(open_at(tmp_path), 1)


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        ('{"weights": "def", "dtype": "float32", "unknown": 1}', "weights"),
        ('{"weights": "def"}', "dtype, weights"),
        ("[" * 30_000, "format"),
        ('{"weights": "def"}' + " " * (64 << 10), "format"),
        (b"\xff", "format"),
        ("[]", "format"),
        (os.mkfifo, "format"),
    ],
    ids=range(7),
)
def test_the_manifest_of_another_store_is_read_with_care(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    manifest: str | bytes | Callable[[Path], None],
    named: str,
) -> None:
    other = tmp_path / "v9-0123456789abcdef"
    other.mkdir()
    if callable(manifest):
        manifest(other / "store.json")
    else:
        (other / "store.json").write_bytes(
            manifest if isinstance(manifest, bytes) else manifest.encode()
        )
    open_at(tmp_path)
    (told,) = caplog.messages
    assert f"another {named};" in told


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to(path.parents[1] / "kept")]
)
def test_what_is_in_the_place_of_the_manifest_is_replaced_and_nothing_behind_it(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    manifest = open_at(tmp_path).folder / "store.json"
    (tmp_path / "kept").write_text("kept")
    manifest.unlink()
    make(manifest)
    open_at(tmp_path)
    assert (tmp_path / "kept").read_text() == "kept"
    assert manifest.is_file() and not manifest.is_symlink() and "abc" in manifest.read_text()


@pytest.mark.parametrize("fault", ["symbolic link", "mode 770 chmod", "user"])
def test_a_store_that_others_may_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = open_at(tmp_path).folder
    if fault == "user":
        monkeypatch.setattr(disk_store.os, "geteuid", lambda: 12345)
    elif fault == "symbolic link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.chmod(0o770)
    with pytest.raises(ConfigError, match=mentioning(f"kv_disk_path {folder} {fault}")):
        open_at(tmp_path)


@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES, errno.EIO]
)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_sound_file_that_cannot_be_read_now_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    store = open_at(tmp_path)
    put(store, 1, 2)
    with monkeypatch.context() as broken:

        def refuse(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        broken.setattr(disk_store.os, call, refuse)
        store.advise([name_of(1)])
        assert not read(store, 1) and not read(store, 1)
    assert not store.corrupt and path_of(store, 1).exists() and len(caplog.messages) == 1
    # What the disk has lost is not asked for again before it is written again.
    assert store.has(name_of(1)) == read(store, 1) == (code != errno.EIO)
    put(store, 1)
    assert store.has(name_of(1)) and read(store, 1)


def make_socket(path: Path) -> None:
    at = os.open(path.parent, os.O_RDONLY)  # the path is longer than an address may be
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{at}/{path.name[:40]}")
    path.with_name(path.name[:40]).rename(path)
    os.close(at)


@pytest.mark.parametrize(
    "make", [os.mkfifo, make_socket, lambda path: path.symlink_to("/dev/zero"), Path.mkdir]
)
def test_what_is_no_file_in_the_place_of_a_link_is_removed_or_not_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    store = open_at(tmp_path)
    put(store, 2)
    make(path_of(store, 1))
    store.look(store.limit_bytes)
    assert store.links == 1
    store.advise([name_of(1)])
    assert store.has(name_of(1)) and not read(store, 1) and not store.has(name_of(1))
    is_removed = not path_of(store, 1).exists()
    assert store.corrupt == is_removed == (make is not Path.mkdir)
    assert not read(store, 1) and len(caplog.messages) == 1
    assert ("is removed," in caplog.messages[0]) == is_removed


def test_a_link_without_pages_is_kept_like_others(tmp_path: Path) -> None:
    """A chunk of a model all of whose layers have windows."""
    store, empty = open_at(tmp_path), np.empty((0, 50), np.int32)
    assert store.write(name_of(1), empty, store.epoch)
    found = store.read(name_of(1), (0, 50))
    assert found is not None and found.shape == (0, 50)
    assert store.read(name_of(1), SHAPE) is None and store.corrupt == 1


def test_a_file_that_the_disk_gives_piece_by_piece_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = open_at(tmp_path), os.preadv
    put(store, 1)
    monkeypatch.setattr(
        disk_store.os, "preadv", lambda file, parts, at: real(file, [parts[0][:100]], at)
    )
    assert read(store, 1)


def test_times_that_are_yet_to_come_keep_nothing_for_ever(tmp_path: Path) -> None:
    store, ahead_s = open_at(tmp_path, 3), time.time() + 1e6
    put(store, 1, 2, 3)
    begun = path_of(store, 1).with_name(f".{'a' * 32}.partial")
    begun.write_bytes(b"begun")
    for path in (path_of(store, 1), begun):
        os.utime(path, (ahead_s, ahead_s))
    put(store, 4)
    assert not read(store, 1) and read(store, 3) and not begun.exists()


def test_what_it_did_not_write_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = open_at(tmp_path, 2)
    put(store, 1)
    strange = [
        store.folder / "notes" / name_of(1).key.hex(),
        *(path_of(store, 1).with_name(name) for name in ("notes", ".hidden", ".x.partial")),
    ]
    strange[0].parent.mkdir()
    for path in strange:
        path.write_bytes(b"x" * 10_000)
        os.utime(path, (0, 0))
    store.look(0)
    assert store.links == store.used_bytes == 0 and not read(store, 1)
    assert all(path.exists() for path in strange)


def test_what_cannot_be_removed_counts_and_no_more_is_written_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are removed, also behind a partial file that stays."""
    store = open_at(tmp_path, 3)
    put(store, 1, 2, 3)
    begun = path_of(store, 1).with_name(f".{'a' * 32}.partial")
    begun.write_bytes(b"begun")
    for number, path in enumerate([begun, *(path_of(store, number) for number in (1, 2, 3))]):
        os.utime(path, ns=(number, number))
    real, kept = os.unlink, {os.fspath(begun), os.fspath(path_of(store, 1))}

    def refuse(path: str | os.DirEntry[str]) -> None:
        if os.fspath(path) in kept:
            raise PermissionError(errno.EPERM, "kept")
        real(path)

    monkeypatch.setattr(disk_store.os, "unlink", refuse)
    put(store, 4)
    assert read(store, 1) and not read(store, 2) and (store.links, begun.exists()) == (2, True)
    kept.update(os.fspath(path_of(store, number)) for number in range(10))
    with pytest.raises(OSError, match="cannot be removed"):
        for number in range(5, 10):
            put(store, number)
    store.look(store.limit_bytes)
    assert store.used_bytes <= store.limit_bytes


def test_a_store_that_another_engine_has_removed_is_made_again(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, 1)
    shutil.rmtree(store.folder)
    put(store, 1)
    assert read(store, 1) and (store.folder / "store.json").exists()
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in [store.folder, *store.folder.rglob("*")]
    )


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=mentioning(f"kv_disk_path {tmp_path / 'file'}")):
        open_at(tmp_path / "file")


def test_a_store_of_100_gb_is_opened_at_once_and_looked_through_in_a_moment(tmp_path: Path) -> None:
    """Sparse files of 3 MB."""
    store = open_store(tmp_path, MADE_FOR, 200 << 30)
    for root in range(64):
        folder = store.folder / (bytes([root]) * 32).hex()
        folder.mkdir()
        for number in range(512):
            with (folder / number.to_bytes(32).hex()).open("wb") as file:
                file.truncate(3_100_000)
    begin_s = time.perf_counter()
    store = open_store(tmp_path, MADE_FOR, 200 << 30)
    opened_s = time.perf_counter() - begin_s
    store.look(store.limit_bytes)
    assert store.used_bytes > 100e9 and opened_s < 0.1
    assert time.perf_counter() - begin_s < 5
