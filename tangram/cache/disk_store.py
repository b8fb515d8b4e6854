"""Links on disk: a file each, by key. Any process finds them, also after a restart.

A file is a header and the pages of one link, as host memory has them. It appears whole, by a
rename. Its checksum covers its key and its pages: what was torn, changed or misplaced is removed
and never served. There is no index: the file system knows names, sizes, and when each link was last
used. So several engines may share a folder. Nothing waits for the disk: after a loss of power the
newest files may be torn.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

import numpy as np

from tangram.errors import ConfigError
from tangram.types import Int32, LinkName

FORMAT = 1  # of the files; another version has folders of its own
_HEADER = struct.Struct("<8s32sQI12x")  # mark, key, bytes of the pages, checksum
_MARK = b"tangram\1"
_SHARE = 32  # of the limit: written between two looks at the folder, and freed at a time
_STALE_S = 3600.0  # files that were begun and not ended: their writer is gone; or clocks differ
_MANIFEST, _GONE = "store.json", ".tangram-gone-"
_MANIFEST_BYTES = 64 << 10  # the most that is read of one
_KEY, _PARTIAL = re.compile(r"[0-9a-f]{64}"), re.compile(r"\.[0-9a-f]{32}\.partial")
_log = logging.getLogger("tangram")


class DiskStore:
    """Links of at most `limit_bytes` in `folder`, least recently used ones removed.

    `made_for` says what the entries depend on besides their tokens. `links` and `used_bytes` are as
    of the last look at the folder and of what was written since; `corrupt` counts the files that
    were removed because they were not what they should be. `epoch` grows when links are forgotten:
    what was asked to be written before is not.
    """

    def __init__(self, folder: Path, made_for: Mapping[str, str | int], limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.links = self.used_bytes = self.corrupt = self.epoch = 0
        self._manifest = json.dumps(dict(made_for), indent=1)
        self._unseen_bytes = 0  # written since the last look
        self._counting = threading.Lock()
        # Folders that should be gone and links that are not sound, as long as the disk keeps them.
        self._withheld = set[Path]()
        self._is_unreadable = False  # the last read failed
        self._make_folder()

    def has(self, name: LinkName) -> bool:
        """Whether there is a file of the link; `read` says whether it is sound."""
        path = self._path(name)
        return not self._withholds(path) and os.path.exists(path)  # noqa: PTH110 - it never raises

    def read(self, name: LinkName, shape: tuple[int, int]) -> Int32 | None:
        """The pages of a link as int32 [pages, words of a page] = `shape`; None if they are lost.

        A file that is not what it should be is removed and counted. One that cannot be read stays.
        """
        path = self._path(name)
        if self._withholds(path):
            return None
        try:
            words = _read_file(path, name.key, shape)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                self._withheld.add(path)
            if not self._is_unreadable:  # once: without descriptors no file can be read
                _log.warning("%s cannot be read, its tokens are computed again: %s", path, error)
            self._is_unreadable = True
            return None
        except ValueError as error:
            self._remove_unsound(path, error)
            return None
        self._is_unreadable = False
        return words

    def advise(self, names: Sequence[LinkName]) -> None:
        """Tell the kernel that the files of `names` are read next."""
        for name in names:
            with suppress(OSError, ValueError), _open_regular(self._path(name)) as file:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)

    def write(self, name: LinkName, words: Int32, epoch: int) -> bool:
        """Write the pages of a link, int32 [pages, words of a page]; they may evict others.

        False if links were forgotten since `epoch`. Raises `OSError` if the disk refuses.
        """
        path, size = self._path(name), _HEADER.size + words.nbytes
        if self.used_bytes + size > self.limit_bytes or self._unseen_bytes > self._share_bytes:
            self.look(self.limit_bytes - size)
            if self.used_bytes + size > self.limit_bytes:
                fault = f"{self.limit_bytes} bytes are used, and older links cannot be removed"
                raise OSError(errno.ENOSPC, fault, str(self.folder))
        try:
            path.parent.mkdir(0o700, exist_ok=True)
        except FileNotFoundError:  # another engine has cleared the store
            self._make_folder()
            path.parent.mkdir(0o700, exist_ok=True)
        parts = (_header(name.key, words), _bytes_of(words))
        # After that question `forget` moves the partial file away, too.
        if not _replace(path, parts, lambda: epoch == self.epoch):
            return False
        self._withheld.discard(path)
        self.links += 1
        self.used_bytes += size
        self._unseen_bytes += size
        return True

    def touch(self, names: Sequence[LinkName]) -> None:
        """The links of `names`, parents before their children, are in use: remove others first."""
        now_ns = time.time_ns()
        for number, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._path(name), ns=(now_ns - number, now_ns - number))

    def forget(self, root: bytes) -> None:
        """Remove all links of the chains that begin with the chunk `root`.

        Where the disk refuses that, they are withheld.
        """
        self._remove(self.folder / root.hex())

    def clear(self) -> None:
        """Remove all links."""
        self._remove(self.folder)
        with suppress(OSError):  # a disk that refuses it refuses writes, too
            self._make_folder()
        self.links = self.used_bytes = 0

    def look(self, limit_bytes: int) -> None:
        """Count what the folder has, and remove the least recently used links above the limit.

        What was forgotten leaves the disk here.
        """
        for gone in self.folder.parent.glob(f"{_GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)
        found = sorted(self._walk())
        self.links, self.used_bytes = len(found), sum(size for _, size, _ in found)
        self._unseen_bytes = 0
        if self.used_bytes <= limit_bytes:
            return
        for _, size, path in found:
            if self.used_bytes <= limit_bytes - self._share_bytes:
                break
            try:
                os.unlink(path)  # noqa: PTH108 - a path object for each file takes longer
            except FileNotFoundError:  # another engine has removed it
                pass
            except OSError:
                continue
            self.links -= 1
            self.used_bytes -= size

    @property
    def _share_bytes(self) -> int:
        return self.limit_bytes // _SHARE

    def _path(self, name: LinkName) -> Path:
        return self.folder / name.root.hex() / name.key.hex()

    def _make_folder(self) -> None:
        """Make the folder and its manifest. Raises `OSError` if others may change what is there."""
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        known, user = self.folder.lstat(), os.geteuid()
        if stat.S_ISLNK(known.st_mode):
            raise OSError(f"{self.folder} is a symbolic link, remove it")
        if known.st_uid != user:
            raise OSError(f"{self.folder} belongs to user {known.st_uid}, not to {user}")
        if known.st_mode & 0o022:
            mode = stat.S_IMODE(known.st_mode)
            raise OSError(f"others may write {self.folder}, its mode is {mode:o}: chmod go-w")
        _replace(self.folder / _MANIFEST, (self._manifest.encode(),), lambda: True)

    def _walk(self) -> Iterator[tuple[int, int, str]]:
        """When each file was used, its bytes and its path. What is left of a crash is removed.

        A time that is yet to come is not believed.
        """
        now_s = time.time()
        for root, root_stat in _scan(self.folder, now_s):
            if not _KEY.fullmatch(root.name) or not stat.S_ISDIR(root_stat.st_mode):
                continue
            for file, known in _scan(root, now_s):
                if _KEY.fullmatch(file.name) and stat.S_ISREG(known.st_mode):
                    used_ns = known.st_mtime_ns if known.st_mtime <= now_s + _STALE_S else 0
                    yield used_ns, known.st_size, file.path
            if abs(root_stat.st_mtime - now_s) > _STALE_S:
                with suppress(OSError):  # it is in use, or not empty
                    os.rmdir(root)  # noqa: PTH106

    def _remove_unsound(self, path: Path, fault: ValueError) -> None:
        try:
            path.unlink()
        except FileNotFoundError:  # another thread or engine has removed it
            pass
        except OSError as error:
            self._withheld.add(path)
            _log.warning(
                "%s is not read any more: %s, and cannot be removed: %s", path, fault, error
            )
        else:
            with self._counting:  # several threads read
                self.corrupt += 1
            _log.warning("%s is removed, its tokens are computed again: %s", path, fault)

    def _remove(self, folder: Path) -> None:
        """Move `folder` away: a file that is being written into it goes with it."""
        self.epoch += 1
        try:
            folder.rename(self.folder.with_name(f"{_GONE}{uuid.uuid4().hex}"))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._withheld.add(folder)
            _log.warning("%s cannot be removed, and is not read any more: %s", folder, error)

    def _withholds(self, path: Path) -> bool:
        return bool(self._withheld) and not self._withheld.isdisjoint((path, *path.parents))


def open_store(folder: Path, made_for: Mapping[str, str | int], limit_bytes: int) -> DiskStore:
    """The store in `folder` of entries that were `made_for` what the mapping says.

    Stores that were made for something else are left alone, and logged. Raises `ConfigError` if the
    folder cannot be written, or if others may write the store.
    """
    digest = hashlib.sha256(json.dumps(dict(made_for), sort_keys=True).encode()).hexdigest()
    name = f"v{FORMAT}-{digest[:16]}"
    try:
        store = DiskStore(folder / name, made_for, limit_bytes)
        others = [
            entry for entry in folder.iterdir() if re.fullmatch(r"v\d+-[0-9a-f]{16}", entry.name)
        ]
    except OSError as error:
        raise ConfigError(
            f"kv_disk_path is {str(folder)!r}, which cannot be used: {error}; give a folder of "
            "your own"
        ) from error
    for other in sorted(others):
        if other.name != name:
            _log.warning(
                "%s is left alone, it was made for another %s; remove it if nothing needs it",
                other,
                ", ".join(_differences(other, made_for)),
            )
    return store


def _differences(folder: Path, made_for: Mapping[str, str | int]) -> Sequence[str]:
    """In what a store in `folder` differs, as far as it says so."""
    try:
        with _open_regular(folder / _MANIFEST) as file:
            if os.fstat(file).st_size > _MANIFEST_BYTES:
                return ["format"]
            found = json.loads(os.read(file, _MANIFEST_BYTES))
        return [key for key in sorted(made_for) if found.get(key) != made_for[key]] or ["format"]
    except (OSError, ValueError, AttributeError, RecursionError):
        return ["format"]


def _scan(
    folder: Path | os.DirEntry[str], now_s: float
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """What is in a folder, as far as it can be read. What is left of a crash is removed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                known = entry.stat(follow_symlinks=False)
                if _PARTIAL.fullmatch(entry.name) and abs(known.st_mtime - now_s) > _STALE_S:
                    os.unlink(entry)  # noqa: PTH108
            except OSError:  # another engine has removed it, or it cannot be removed
                continue
            yield entry, known


@contextmanager
def _open_regular(path: Path) -> Iterator[int]:
    """A descriptor to read a file. Raises `ValueError` if there is something else at `path`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            raise ValueError("it is not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("it is not a regular file")
        yield file
    finally:
        os.close(file)


def _read_file(path: Path, key: bytes, shape: tuple[int, int]) -> Int32:
    """The pages of link `key`. Raises `ValueError` if the file is not what was written."""
    whole = np.empty(_HEADER.size + 4 * math.prod(shape), np.uint8)
    with _open_regular(path) as file:
        size, done = os.fstat(file).st_size, 0
        while done < len(whole) and (count := os.preadv(file, [whole[done:].data], done)):
            done += count
    if not size == done == len(whole):
        raise ValueError(f"it has {size} bytes, not {len(whole)}")
    words = whole[_HEADER.size :].view(np.int32).reshape(shape)
    if whole[: _HEADER.size].tobytes() != _header(key, words):
        raise ValueError("its checksum is another")
    return words


def _header(key: bytes, words: Int32) -> bytes:
    checksum = zlib.crc32(_bytes_of(words), zlib.crc32(key))
    return _HEADER.pack(_MARK, key, words.nbytes, checksum)


def _bytes_of(words: Int32) -> memoryview:
    return words.reshape(-1).view(np.uint8).data  # a cast of memory refuses no pages


def _replace(path: Path, parts: Sequence[bytes | memoryview], wanted: Callable[[], bool]) -> bool:
    """Write `parts` as the file `path`, whole or not at all; False if it is not `wanted` then."""
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with _create(partial) as file:
            for part in parts:
                file.write(part)
        if is_wanted := wanted():
            partial.rename(path)
        return is_wanted
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _create(path: Path) -> BufferedWriter:
    """A new file to write that only its owner may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb")
