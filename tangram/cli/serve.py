"""`tangram serve`: the OpenAI-compatible server."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Annotated

from tangram.cli.options import Panel, option, served_name, with_config
from tangram.cli.telemetry import LogForm, LogFormat, MetricsAliases, OtlpEndpoint, OverflowEvery, logging_as
from tangram.config import EngineConfig


@with_config
def serve(
    config: EngineConfig,
    host: Annotated[str, option(Panel.server, "address to listen on")] = "127.0.0.1",
    port: Annotated[int, option(Panel.server, "port to listen on")] = 8000,
    served_model_name: Annotated[
        str | None, option(Panel.server, "name of the model in the API", default="MODEL, of a path its last part")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            Panel.server,
            "a key that requests may carry, again for more; in the variable with spaces between",
            envvar="TANGRAM_API_KEY",
        ),
    ] = None,
    max_body_mb: Annotated[float, option(Panel.server, "most megabytes of a request's body")] = 16.0,
    max_queue: Annotated[
        int, option(Panel.server, "while so many completions wait, new requests are told to come back later")
    ] = 1024,
    request_timeout_s: Annotated[
        float, option(Panel.server, "most seconds from a request to the end of its answer")
    ] = 3600,
    shutdown_grace_s: Annotated[float, option(Panel.server, "seconds that running answers get to end at SIGTERM")] = 20,
    log_format: LogFormat = LogForm.text,
    metrics_aliases: MetricsAliases = None,
    otlp_endpoint: OtlpEndpoint = None,
    overflow_every: OverflowEvery = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    # Imports and weights live as long as the process: collecting among them costs half a second now and a pause later.
    gc.disable()
    from tangram.engine.setup import build_engine
    from tangram.serve.bridge import Limits
    from tangram.serve.guard import Protection
    from tangram.serve.http import Telemetry, serve_forever
    from tangram.serve.tracing import traces_to

    name = served_model_name or served_name(config)
    with logging_as(log_format):
        protection = Protection(tuple(api_key or ()), max_body_mb)
        limits = Limits(request_timeout_s, max_queue=max_queue)
        telemetry = Telemetry(metrics_aliases is not None, traces_to(otlp_endpoint, name))
        engine = build_engine(replace(config, max_queue=max_queue, overflow_every=overflow_every))
        gc.freeze()
        gc.enable()
        serve_forever(
            engine, host=host, port=port, served_model_name=name, protection=protection, limits=limits,
            telemetry=telemetry, shutdown_grace_s=shutdown_grace_s,
        )  # fmt: skip
