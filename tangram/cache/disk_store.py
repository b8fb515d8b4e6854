"""Links on disk: a file each, by key. Any process finds them, also after a restart.

A file is a header and the pages of one link, as host memory has them. It appears whole, by a
rename. Its checksum covers its key and its pages: what was torn, changed or misplaced is removed
and never served. There is no index: the file system knows names, sizes, and when each link was last
used. So several engines may share a folder. Nothing waits for the disk: after a loss of power the
newest files may be torn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path

import numpy as np

from tangram.errors import ConfigError
from tangram.types import Int32, LinkName

FORMAT = 1  # of the files; another version has folders of its own
_HEADER = struct.Struct("<8s32sQI12x")  # mark, key, bytes of the pages, checksum
_MARK = b"tangram\1"
_SHARE = 32  # of the limit: written between two looks at the folder, and freed at a time
_STALE_S = 3600.0  # files that were begun and not ended: their writer is gone
_MANIFEST, _GONE = "store.json", ".tangram-gone-"
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
        self._withheld = set[Path]()  # folders that should be gone, and that the disk keeps
        self._make_folder()

    def has(self, name: LinkName) -> bool:
        """Whether there is a file of the link; `read` says whether it is sound."""
        path = self._path(name)
        return not self._withholds(path) and os.path.exists(path)  # noqa: PTH110 - it never raises

    def read(self, name: LinkName, shape: tuple[int, int]) -> Int32 | None:
        """The pages of a link as int32 [pages, words of a page] = `shape`; None if it has no file.

        A file that is not what it should be is removed and counted.
        """
        path = self._path(name)
        if self._withholds(path):
            return None
        try:
            words = _read_file(path, name.key, shape)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            with self._counting:  # several threads read
                self.corrupt += 1
            _log.warning("%s is removed, its tokens are computed again: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        return words

    def advise(self, names: Sequence[LinkName]) -> None:
        """Tell the kernel that the files of `names` are read next."""
        for name in names:
            with suppress(OSError), self._path(name).open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def write(self, name: LinkName, words: Int32, epoch: int) -> bool:
        """Write the pages of a link, int32 [pages, words of a page]; they may evict others.

        False if links were forgotten since `epoch`. Raises `OSError` if the disk refuses.
        """
        path, size = self._path(name), _HEADER.size + words.nbytes
        if self.used_bytes + size > self.limit_bytes or self._unseen_bytes > self._share_bytes:
            self.look(self.limit_bytes - size)
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        partial = path.with_name(f".{uuid.uuid4().hex}.partial")
        try:
            with _create(partial) as file:
                file.write(_header(name.key, words))
                file.write(words.data.cast("B"))
            # From here on `forget` moves the partial file away, too.
            if epoch != self.epoch:
                return False
            partial.rename(path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
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
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - a path object for each file takes longer
            self.links -= 1
            self.used_bytes -= size

    @property
    def _share_bytes(self) -> int:
        return self.limit_bytes // _SHARE

    def _path(self, name: LinkName) -> Path:
        return self.folder / name.root.hex() / name.key.hex()

    def _make_folder(self) -> None:
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        with _create(self.folder / _MANIFEST) as file:
            file.write(self._manifest.encode())

    def _walk(self) -> Iterator[tuple[int, int, str]]:
        """When each file was used, its bytes and its path. What is left of a crash is removed."""
        stale_s = time.time() - _STALE_S
        with suppress(OSError), os.scandir(self.folder) as roots:
            for root in roots:
                if not root.is_dir(follow_symlinks=False):
                    continue
                with suppress(OSError), os.scandir(root) as files:
                    for file in files:
                        try:
                            known = file.stat(follow_symlinks=False)
                        except OSError:  # another engine has removed it
                            continue
                        if not file.name.startswith("."):
                            yield known.st_mtime_ns, known.st_size, file.path
                        elif known.st_mtime < stale_s:
                            os.unlink(file)  # noqa: PTH108
                with suppress(OSError):  # it is in use, or not empty
                    if root.stat().st_mtime < stale_s:
                        os.rmdir(root)  # noqa: PTH106

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
        return bool(self._withheld) and not self._withheld.isdisjoint(path.parents)


def open_store(folder: Path, made_for: Mapping[str, str | int], limit_bytes: int) -> DiskStore:
    """The store in `folder` of entries that were `made_for` what the mapping says.

    Stores that were made for something else are left alone, and logged. Raises `ConfigError` if the
    folder cannot be written.
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
            f"kv_disk_path is {str(folder)!r}, which cannot be written: {error}; give a folder of "
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
        found = json.loads((folder / _MANIFEST).read_text())
        keys = sorted({*found, *made_for})
        return [key for key in keys if found.get(key) != made_for.get(key)] or ["format"]
    except (OSError, ValueError, TypeError, AttributeError):
        return ["format"]


def _read_file(path: Path, key: bytes, shape: tuple[int, int]) -> Int32:
    """The pages of link `key`. Raises `ValueError` if the file is not what was written."""
    header, words = bytearray(_HEADER.size), np.empty(shape, np.int32)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        done = os.preadv(file.fileno(), [header, words.data.cast("B")], 0)
    if not size == done == _HEADER.size + words.nbytes:
        raise ValueError(f"it has {size} bytes, not {_HEADER.size + words.nbytes}")
    if bytes(header) != _header(key, words):
        raise ValueError("its checksum is another")
    return words


def _header(key: bytes, words: Int32) -> bytes:
    checksum = zlib.crc32(words.data.cast("B"), zlib.crc32(key))
    return _HEADER.pack(_MARK, key, words.nbytes, checksum)


def _create(path: Path) -> BufferedWriter:
    """A file to write that only its owner may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
