"""`python -m tangram` and the `tangram` command: how they begin without streams, and end with one
line at Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

_INTERRUPTED = 128 + signal.SIGINT
# A disk, a quota or the largest file is full; a device gives up.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """The entry point of the `tangram` command."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # what its encoding lacks is written as \\x.., not as a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        from tangram.cli import main as command

        command()
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != _INTERRUPTED:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would disturb the end
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        print(f"error: what was to be written has no room: {error.strerror}", file=sys.stderr)
        _reopen(sys.stdout.fileno())  # what is left in its buffer would fail again
        sys.exit(1)


def _open_streams() -> None:
    """Make the standard streams that the process was started without go nowhere.

    The next file that it opened would be one of them, and get what is meant for them.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _reopen(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def _reopen(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


if __name__ == "__main__":
    main()
