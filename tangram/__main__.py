"""`python -m tangram` and the `tangram` command: standard streams, and one line at Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

_INTERRUPTED = 128 + signal.SIGINT
# The disk, the quota or the largest file is full, or a device fails.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """The entry point of the `tangram` command."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # characters that the encoding lacks are written as \\x.., instead of a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        from tangram.cli import main as command

        command()
    except (KeyboardInterrupt, SystemExit) as end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C would disturb the end
        if isinstance(end, SystemExit) and end.code != _INTERRUPTED:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        print(f"error: the output could not be written: {error.strerror}", file=sys.stderr)
        _reopen(sys.stdout.fileno())  # the rest of its buffer would fail again
        sys.exit(1)


def _open_streams() -> None:
    """Open the null device for each standard stream that the process was started without.

    Otherwise the next file that is opened gets that descriptor, and what is written to the stream.
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
