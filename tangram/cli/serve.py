"""`tangram serve`: the OpenAI-compatible server."""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
import time
from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

from tangram.cli import console
from tangram.cli.checks import within
from tangram.cli.options import Panel, engine_option, name_served_model, option, with_config
from tangram.cli.telemetry import (
    LogForm,
    LogFormat,
    MetricsAliases,
    OtlpEndpoint,
    OverflowEvery,
    logging_as,
)
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tangram.serve.guard import Protection, check_served_name
from tangram.serve.listening import Listener

KEY_VARIABLE = "TANGRAM_API_KEY"
_log = logging.getLogger(__name__)


class UnknownFields(StrEnum):
    """What becomes of a request with fields that are not served."""

    refuse = "refuse"
    warn = "warn"


@with_config
def serve(
    config: EngineConfig,
    host: Annotated[str, option(Panel.server, "address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, option(Panel.server, "port to listen on", callback=within(Bounds(0, 65535)))
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        option(
            Panel.server, "name of the model in the API", default="MODEL, of a path its last part"
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            Panel.server,
            "a key that requests may carry, again for more; in the variable with spaces between",
            envvar=KEY_VARIABLE,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        option(
            Panel.server,
            "web pages of this origin (https://HOST) may ask from a browser, again for more; * is "
            "all",
        ),
    ] = None,
    unknown_fields: Annotated[
        UnknownFields,
        option(
            Panel.server,
            "refuse requests with fields that are not served; warn logs and counts them",
        ),
    ] = UnknownFields.refuse,
    max_body_mb: Annotated[
        float,
        option(
            Panel.server,
            "most megabytes of a request's body",
            callback=within(Bounds(0.0, 1024.0, open_low=True)),
        ),
    ] = 16.0,
    max_queue: Annotated[int, engine_option("max_queue", unset="1024", panel=Panel.server)] = 1024,
    request_timeout_s: Annotated[
        float,
        option(
            Panel.server,
            "most seconds from a request to the end of its answer",
            callback=within(Bounds(0.0, 1e9, open_low=True)),
        ),
    ] = 3600,
    shutdown_grace_s: Annotated[
        float,
        option(
            Panel.server,
            "seconds that running answers get to end at SIGTERM",
            callback=within(Bounds(0.0, 1e6)),
        ),
    ] = 20,
    log_format: LogFormat = LogForm.text,
    metrics_aliases: MetricsAliases = None,
    otlp_endpoint: OtlpEndpoint = None,
    overflow_every: OverflowEvery = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    begin_s = time.monotonic()
    if not api_key and KEY_VARIABLE in os.environ:
        raise ConfigError(
            f"{KEY_VARIABLE} is set and holds no key: unset it to serve everybody, or put a key in "
            "it"
        )
    name = name_served_model(config) if served_model_name is None else served_model_name
    check_served_name(name)
    with closing(Listener.at(host, port)) as listener, logging_as(log_format):
        protection = Protection(tuple(api_key or ()), max_body_mb, tuple(allowed_origins or ()))
        where = f"{listener.url}{', on all interfaces' if listener.is_open_to_all else ''}"
        _log.info("listening at %s; loading PyTorch, then %s", where, config.model)
        # Imports and weights live as long as the process: to collect among them costs half a
        # second.
        gc.disable()
        try:
            from tangram.engine.build import build_engine
            from tangram.serve.bridge import Limits
            from tangram.serve.http import Telemetry, build_app, serve_on
            from tangram.serve.tracing import traces_to

            limits = Limits(request_timeout_s, max_queue=max_queue)
            telemetry = Telemetry(metrics_aliases is not None, traces_to(otlp_endpoint, name))
            engine = build_engine(
                replace(config, max_queue=max_queue, overflow_every=overflow_every)
            )
            app = build_app(
                engine,
                served_model_name=name,
                protection=protection,
                limits=limits,
                telemetry=telemetry,
                let_unknown_by=unknown_fields is UnknownFields.warn,
            )
            gc.freeze()
        finally:
            gc.enable()

        def tell() -> None:
            seconds, url = time.monotonic() - begin_s, f"{listener.url}/v1"
            _log.info("ready after %.1f s: %s", seconds, url, extra={"fields": {"url": url}})
            if log_format is LogForm.text:
                chats = engine.codec.tokenizer.chat_template is not None
                console.tell(first_request(url, name, chats=chats, locked=bool(api_key)))

        try:
            serve_on(listener, engine, app, shutdown_grace_s=shutdown_grace_s, on_ready=tell)
        finally:
            # What is frozen is not freed at the end, and Triton's bindings report it as leaked
            gc.unfreeze()


def first_request(url: str, model: str, *, chats: bool, locked: bool) -> str:
    """A command line that asks the server at `url` for an answer."""
    asked = {"messages": [{"role": "user", "content": "Hello!"}]} if chats else {"prompt": "Hello"}
    path = "chat/completions" if chats else "completions"
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if locked else [])]
    given = [part for header in headers for part in ("-H", header)]
    return shlex.join(["curl", f"{url}/{path}", *given, "-d", json.dumps({"model": model} | asked)])
