"""The server of an API process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from socket import socket

from tangram.link.api_process import ApiStart
from tangram.link.remote_engine import RemoteEngine
from tangram.serve.http import Telemetry, build_app, make_server
from tangram.serve.tracing import traces_to
from tangram.web.api import CachePage


def serve_api(start: ApiStart, connection: socket, listeners: Sequence[socket]) -> None:
    """Serve until the process at the other end of `connection` says so, or has ended."""
    name = start.served_model_name

    def drain(grace_s: float) -> None:
        server.drain(grace_s)

    engine = RemoteEngine(start.facts, connection, drain)
    app = build_app(
        engine,
        served_model_name=name,
        protection=start.protection,
        limits=start.limits,
        telemetry=Telemetry(start.vllm_names, traces_to(start.otlp_endpoint, name)),
        let_unknown_by=start.let_unknown_by,
        page=None if start.page is None else CachePage(engine, start.page),
    )
    server = make_server(app, shutdown_grace_s=start.shutdown_grace_s, on_ready=engine.tell_ready)
    asyncio.run(server.serve(list(listeners)))
