"""Forks itself for each command that `client.py` asks for, after it has imported what takes long.

A fork has the arguments, environment, folder, and standard streams of the client. Limits, umask,
process group and terminal are this server's. The interpreter ends as it always does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from types import ModuleType
from typing import Any, TextIO

# Variables that nothing reads while it is imported. Another difference needs a real start.
_FREE = {
    "COLUMNS",
    "LINES",
    "PYTEST_CURRENT_TEST",
    "TANGRAM_API_KEY",
    "TANGRAM_CACHE",
    "XDG_STATE_HOME",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch sets it before each use
}
_TESTS = 0  # its standard input ends with the tests


@dataclass(frozen=True)
class InterpreterCommand:
    """What an interpreter is started with; `streams` are the descriptors of the client."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: tuple[int, ...]


@dataclass(frozen=True)
class Child:
    """A fork, and the connection of the client that stands for it."""

    process: int
    end: int  # readable when the process has ended
    client: socket.socket

    def report(self) -> None:
        """Tell the client how it ended. Nobody may be there to hear it."""
        _, status = os.waitpid(self.process, 0)
        with suppress(OSError):
            self.client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        self.close()

    def close(self) -> None:
        """Forget it."""
        self.client.close()
        os.close(self.end)


def can_fork(command: InterpreterCommand, environment: Mapping[str, str]) -> bool:
    """Whether a fork is what a start would be: one that was imported with other values is not."""
    read = [
        {name: value for name, value in variables.items() if name not in _FREE}
        for variables in (command.environment, environment)
    ]
    return read[0] == read[1] and command.arguments[:1] in (["-m"], ["-c"])


def serve(listener: socket.socket, environment: Mapping[str, str]) -> InterpreterCommand | None:
    """Fork until the tests end. A fork returns the command that it is to run.

    What was imported was imported in `environment`.
    """
    children = dict[int, Child]()
    while True:
        clients = {child.client.fileno(): child for child in children.values()}
        ready, _, _ = select.select([_TESTS, listener, *children, *clients], [], [])
        for number in {*ready} & clients.keys():  # a client says nothing: it was killed
            os.kill(clients[number].process, signal.SIGKILL)
        if _TESTS in ready:
            for child in children.values():
                os.kill(child.process, signal.SIGKILL)
            return None
        for number in {*ready} & children.keys() | {
            clients[at].end for at in ready if at in clients
        }:
            children.pop(number).report()
        if listener not in ready:
            continue
        client, _ = listener.accept()
        with suppress(OSError, ValueError):  # as above
            command = _receive(client)
            process = os.fork() if can_fork(command, environment) else None
            if process == 0:
                for child in children.values():
                    child.close()
                client.close()
                listener.close()
                return command
            _close(command.streams)
            if process is None:
                with client:
                    client.sendall(b"real\n")
            else:
                child = Child(process, os.pidfd_open(process), client)
                children[child.end] = child
                client.sendall(b"%d\n" % process)


def _receive(client: socket.socket) -> InterpreterCommand:
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as file:
        told: dict[str, Any] = json.loads(file.read(int.from_bytes(size)))
    return InterpreterCommand(**told, streams=tuple(streams))


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def run(command: InterpreterCommand) -> None:
    """Become the process that an interpreter with these arguments would be."""
    for number, stream in enumerate(command.streams):
        os.dup2(stream, number)
    _close(command.streams)
    sys.stdin = sys.__stdin__ = _open(0, sys.__stdin__)
    sys.stdout = sys.__stdout__ = _open(1, sys.__stdout__)
    sys.stderr = sys.__stderr__ = _open(2, sys.__stderr__)
    os.chdir(command.folder)
    for name in _FREE - command.environment.keys():
        os.environ.pop(name, None)
    os.environ.update(command.environment)  # imports have set others, as they do in every start
    option, what, *arguments = command.arguments
    sys.argv = [option, *arguments]
    if option == "-m":
        sys.path[0] = command.folder
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _open(number: int, like: TextIO | None) -> TextIOWrapper:
    """A standard stream with the encoding and the buffer that the interpreter chose for its own."""
    assert isinstance(like, TextIOWrapper)
    direct = like.write_through  # PYTHONUNBUFFERED
    binary = open(number, "wb" if number else "rb", 0 if direct else -1, closefd=False)  # noqa: SIM115 - as long as the process
    return TextIOWrapper(
        binary,
        like.encoding,
        like.errors,
        newline="\n",
        line_buffering=not direct and (number == 2 or binary.isatty()),
        write_through=direct,
    )


if __name__ == "__main__":
    _, descriptor, *modules = sys.argv
    environment = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"  # noqa: PTH208
    gc.freeze()  # no fork copies pages to look for garbage in them
    if (asked := serve(socket.socket(fileno=int(descriptor)), environment)) is not None:
        run(asked)
