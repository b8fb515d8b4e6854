"""The process of a rank other than 0: builds its part of the engine and computes what it is told.

`python -m tangram.engine.rank_process FD`, started by `Ranks` with its end of a pipe.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

from tangram.engine.ranks.ranks import RankStart, join_ranks, share_cores
from tangram.engine.setup.build import follower
from tangram.errors import IntegrityError, TangramError


def serve_rank(pipe: Connection) -> None:
    """Tell that the process is ready, build, and compute until rank 0 ends.

    Raises `IntegrityError` if it is told anything before it starts, and what the making of an
    engine or a step raises.
    """
    pipe.send("ready")
    try:
        start, told = pipe.recv(), SimpleQueue[bytes]()
    except (EOFError, OSError):
        os._exit(0)  # rank 0 has ended
    Thread(target=_read, args=(pipe, told), daemon=True).start()
    if not isinstance(start, RankStart):
        raise IntegrityError(f"a rank starts with {RankStart.__name__}, it was told {start!r}")
    share_cores(start.config)
    join_ranks(start.config, start.rank, start.meeting)
    logging.disable(logging.WARNING)  # rank 0 says the same
    runner = follower(start.config)
    logging.disable(logging.NOTSET)
    while True:
        runner.follow(told.get())


def _read(pipe: Connection, told: SimpleQueue[bytes]) -> None:
    """Read what is told. If rank 0 has ended, so does this process, whatever it is doing."""
    try:
        while True:
            told.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def main() -> None:
    """Run a rank; its failure is told to rank 0 in a line."""
    pipe = Connection(int(sys.argv[1]))
    try:
        serve_rank(pipe)
    except BaseException as error:
        if not isinstance(error, TangramError):
            traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)  # rank 0 ends it anyway; nothing may wait for a collective


if __name__ == "__main__":
    main()
