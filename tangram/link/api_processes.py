"""The API processes of a server. They start before its model is loaded, and import meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tangram.link.api_process import ApiStart
    from tangram.serve.transport.listening import Listener

WORKER = "tangram.link.api_process"
# Where they keep their counts; prometheus_client reads it when it is imported.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Transformers would say on standard error that it finds no PyTorch, which is meant.
_QUIET = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


class ApiProcess:
    """A process that imports what it needs, and then waits for its `begin`.

    It counts in files of `folder`, which all of a server share.
    """

    def __init__(self, listener: Listener, folder: str) -> None:
        self._pipe, theirs = Pipe()
        numbers = [theirs.fileno(), *(opened.fileno() for opened in listener.sockets)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, *map(str, numbers)],
                pass_fds=numbers,
                env=os.environ | {FOLDER_VARIABLE: folder, **_QUIET},
                start_new_session=True,  # an interrupt is for the engine's process, which ends it
            )

    def begin(self, start: ApiStart) -> socket:
        """Have it serve. Returns this end of the pair of sockets."""
        with suppress(OSError):  # it has ended, which is seen where its end is read
            self._pipe.send(start)
        with self._pipe:
            return socket(fileno=os.dup(self._pipe.fileno()))

    def wait(self, most_s: float) -> str:
        """How it has ended, in words; it is killed if it has not after `most_s`."""
        try:
            code = self._process.wait(most_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            return f"has not ended in {most_s:g} s and was killed"
        return f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


class ApiProcesses:
    """`count` processes that serve at `listener`; all are killed at the end of the context."""

    def __init__(self, listener: Listener, count: int) -> None:
        self._listener = listener
        self._folder = TemporaryDirectory(prefix="tangram-counts-", ignore_cleanup_errors=True)
        self._all = [ApiProcess(listener, self._folder.name) for _ in range(count)]

    def __enter__(self) -> ApiProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self._all:
            process.wait(0)
        self._folder.cleanup()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, place: int) -> ApiProcess:
        return self._all[place]

    @property
    def folder(self) -> Path:
        """A private folder that they share. It ends with them."""
        return Path(self._folder.name)

    def start_again(self, place: int) -> None:
        """Start another process in the place of one that has ended. Raises `OSError`."""
        self._all[place] = ApiProcess(self._listener, self._folder.name)

    def kill(self) -> None:
        """End all of them at once. Their counts are lost."""
        for process in self._all:
            process.kill()
        self._folder.cleanup()  # the caller may end this process now
