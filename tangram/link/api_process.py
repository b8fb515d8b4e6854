"""An API process: `python -m tangram.link.api_process FD LISTENER…`, started by `ApiProcesses`.

It parses, tokenizes and compiles requests, and writes answers. The engine computes in the process
at the other end of the pair of sockets FD. It accepts connections at the LISTENERs, which are open
sockets. It ends with the engine's process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tangram.link.remote_engine import EngineNature
    from tangram.serve.options import ServerOptions
    from tangram.web.access import Access


@dataclass(frozen=True)
class ApiStart:
    """What an API process begins with: facts of the engine, and the options of its server.

    `max_queue` is the engine's. `web` says who may see the web page, None that there is none.
    """

    facts: EngineNature
    served_model_name: str
    options: ServerOptions
    max_queue: int | None
    web: Access | None


def main() -> None:
    """Serve until the engine's process ends or says so."""
    # Nothing is computed here. Transformers would import it for seconds, and hundreds of MB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    pipe = Connection(int(sys.argv[1]))
    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[2:]]
    # Imported while the engine's process loads the model.
    from tangram.link.collection import keep_uncollected

    with keep_uncollected():
        from tangram.link.remote_engine import RemoteEngine
        from tangram.serve.http import build_app, make_server
        from tangram.serve.observability.logs import log_inside
        from tangram.web.api import CacheWeb
    with pipe:  # with another open end of it here, nobody would see that this process hangs up
        try:
            start: ApiStart = pipe.recv()
        except (EOFError, OSError):  # the engine's process has ended
            return
        connection = socket.socket(fileno=os.dup(pipe.fileno()))
    options = start.options
    with log_inside(options.log_format):
        engine = RemoteEngine(
            start.facts, lambda: connection, lambda grace_s: server.drain(grace_s)
        )
        app = build_app(
            engine,
            served_model_name=start.served_model_name,
            options=options,
            max_queue=start.max_queue,
            web=None if start.web is None else CacheWeb(engine, start.web),
        )
        grace_s, on_ready = options.shutdown_grace_s, engine.tell_ready
        server = make_server(app, shutdown_grace_s=grace_s, on_ready=on_ready)
        asyncio.run(server.serve(listeners))


if __name__ == "__main__":
    main()
