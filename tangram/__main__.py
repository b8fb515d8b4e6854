"""`python -m tangram` and the `tangram` command, which end at Ctrl-C with one line, whatever they are at."""

from __future__ import annotations

import io
import signal
import sys

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """The entry point of the `tangram` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding lacks is written as \\x.., not as a traceback
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


if __name__ == "__main__":
    main()
