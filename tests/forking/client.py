"""`client.py SOCKET ARGUMENTS…` is `python ARGUMENTS…`, run in a fork of the server at SOCKET.

It has the fork's standard streams, signals and end. A kill of this process kills the fork.
Where a fork would differ from a start, this process becomes the interpreter itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def main(path: str, *arguments: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until there is somebody to forward to
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes as long as all else here
    told = {"arguments": arguments, "environment": dict(os.environ), "folder": folder}
    command = json.dumps(told).encode()
    socket.send_fds(server, [len(command).to_bytes(8)], [0, 1, 2])
    server.sendall(command)
    answers = server.makefile()
    answer = answers.readline()
    if answer == "real\n":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.execv(sys.executable, [sys.executable, *arguments])
    process = int(answer)

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(process, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(*sys.argv[1:])
