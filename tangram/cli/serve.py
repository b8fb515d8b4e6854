"""`tangram serve`: the OpenAI-compatible server."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import Annotated

import typer

from tangram.cli.options import served_name, with_config
from tangram.cli.telemetry import LogForm, LogFormat, MetricsAliases, OtlpEndpoint, OverflowEvery, logging_as
from tangram.config import EngineConfig
from tangram.errors import ConfigError

KEY_VARIABLE = "TANGRAM_API_KEY"


@with_config
def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="name of the model in the API; MODEL if not given, of a path its last part")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="a key that requests may carry, again for more; in the variable with spaces between",
            envvar=KEY_VARIABLE,
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(help="most megabytes of a request's body")] = 16.0,
    max_queue: Annotated[
        int, typer.Option(help="while so many completions wait, new requests are told to come back later")
    ] = 1024,
    request_timeout_s: Annotated[
        float, typer.Option(help="most seconds from a request to the end of its answer")
    ] = 3600,
    shutdown_grace_s: Annotated[float, typer.Option(help="seconds that running answers get to end at SIGTERM")] = 20,
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

    if not api_key and KEY_VARIABLE in os.environ:
        raise ConfigError(f"{KEY_VARIABLE} is set and holds no key: unset it to serve everybody, or put a key in it")
    name = served_name(config) if served_model_name is None else served_model_name
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
