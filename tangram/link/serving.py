"""The server of an API process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from socket import socket

from tangram.link.api_process import ApiStart
from tangram.link.remote_engine import RemoteEngine
from tangram.serve.http import build_from_options, make_server
from tangram.web.api import CachePage


def serve_api(start: ApiStart, connection: socket, listeners: Sequence[socket]) -> None:
    """Serve until the process at the other end of `connection` says so, or has ended."""

    def drain(grace_s: float) -> None:
        server.drain(grace_s)

    engine = RemoteEngine(start.facts, connection, drain)
    page = None if start.page is None else CachePage(engine, start.page)
    options = start.options
    app = build_from_options(engine, start.served_model_name, options, start.max_queue, page)
    server = make_server(app, shutdown_grace_s=options.shutdown_grace_s, on_ready=engine.tell_ready)
    asyncio.run(server.serve(list(listeners)))
