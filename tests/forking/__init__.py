"""Commands of Python in forks of a process that has imported what they import.

An import of the command line with PyTorch and Transformers takes four seconds, a fork a tenth.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = Path(__file__).parent


@contextmanager
def run_fork_server(*modules: str) -> Iterator[list[str]]:
    """The command to write in the place of `sys.executable`, while the server runs.

    The server imports `modules`, which must start no thread.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/forks"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            number = listener.fileno()
            server = subprocess.Popen(
                [sys.executable, "-m", f"{__name__}.fork_server", str(number), *modules],
                cwd=_FOLDER.parents[1],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                start_new_session=True,  # Ctrl-C ends the tests first
            )
        with server:
            yield [sys.executable, "-I", "-S", str(_FOLDER / "client.py"), path]
