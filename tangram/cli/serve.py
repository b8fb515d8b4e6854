"""`tangram serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from tangram.cli import console
from tangram.cli.options import with_config
from tangram.cli.serve_options import (
    KEY_VARIABLE,
    AllowedOrigins,
    ApiKeys,
    Explain,
    Host,
    HowManyProcesses,
    KvEvents,
    KvEventsReplay,
    KvEventsTopic,
    MaxBodyMb,
    MaxQueue,
    NoPage,
    OnUnknownFields,
    PageFor,
    Port,
    RequestTimeout,
    ServedModelName,
    ShownPage,
    ShutdownGrace,
    UnknownFields,
    choose_page,
    count_processes,
)
from tangram.cli.telemetry import LogFormat, MetricsAliases, OtlpEndpoint, OverflowEvery, logging_as
from tangram.collection import keep_uncollected, unfreeze_at_end
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.kv_events.address import EventAddress
from tangram.limits import SERVED_QUEUE
from tangram.link.api_process import ApiStart
from tangram.link.api_processes import ApiProcesses
from tangram.model.source import name_served_model
from tangram.serve.guard import Protection, check_served_name
from tangram.serve.listening import Listener
from tangram.serve.logs import LogForm

if TYPE_CHECKING:
    from tangram.engine.loop import Engine
    from tangram.kv_events.publisher import EventPublisher
    from tangram.page.access import Access
    from tangram.page.desk import PageDesk
    from tangram.serve.bridge import Limits

_log = logging.getLogger(__name__)


@with_config
def serve(
    config: EngineConfig,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key: ApiKeys = None,
    allowed_origins: AllowedOrigins = None,
    unknown_fields: OnUnknownFields = UnknownFields.refuse,
    max_body_mb: MaxBodyMb = 16.0,
    max_queue: MaxQueue = SERVED_QUEUE,
    request_timeout_s: RequestTimeout = 3600,
    shutdown_grace_s: ShutdownGrace = 20,
    api_processes: HowManyProcesses = None,
    page: ShownPage = PageFor.auto,
    no_page: NoPage = False,
    log_format: LogFormat = LogForm.text,
    metrics_aliases: MetricsAliases = None,
    otlp_endpoint: OtlpEndpoint = None,
    overflow_every: OverflowEvery = None,
    kv_events: KvEvents = None,
    kv_events_replay: KvEventsReplay = None,
    kv_events_topic: KvEventsTopic = "",
    explain: Explain = False,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    if explain:
        _explain(config)
    begin_s = time.monotonic()
    check_keys(api_key)
    shown = choose_page(page, no_page=no_page)
    name = _choose_name(config, served_model_name)
    with (
        _publish_events(EventAddress.of(kv_events, kv_events_replay, kv_events_topic)) as publisher,
        closing(Listener.at(host, port)) as listener,
        logging_as(log_format),
        ApiProcesses(listener, count_processes(api_processes, config.device)) as processes,
        unfreeze_at_end(),
    ):
        protection = Protection(tuple(api_key or ()), max_body_mb, tuple(allowed_origins or ()))
        _report_listening(listener, config.model)
        with keep_uncollected():
            from tangram.link.remote_engine import EngineNature

            limits = _check_limits(request_timeout_s, max_queue, otlp_endpoint, name)
            wanted = replace(config, max_queue=max_queue, overflow_every=overflow_every)
            engine, desk = _build(wanted, name, shown, publisher)
            start = ApiStart(
                EngineNature.of(engine),
                name,
                protection,
                limits,
                metrics_aliases is not None,
                otlp_endpoint,
                unknown_fields is UnknownFields.warn,
                _choose_access(shown, host),
                log_format,
                shutdown_grace_s,
            )
        ready = partial(_report_ready, listener, engine, name, log_format, begin_s, keys=api_key)
        _supervise(engine, desk, start, processes, ready)


def _explain(config: EngineConfig) -> NoReturn:
    """Print the steps that would prepare the model, and which of them apply; ends the command."""
    from rich.table import Table

    from tangram.engine.option_checks import check_options
    from tangram.model.load import outline_model
    from tangram.model.prepare import STEPS, Wanted

    device = check_options(config)
    model = outline_model(config, device)
    wanted = Wanted.of(config, device, model.dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    table = Table(title=f"{config.model}: {type(model).__name__} in {dtype} on {device}")
    for column in ("step", "applies", "needs", "leaves"):
        table.add_column(column)
    for step in STEPS:
        applies = step.applies(model, wanted)
        table.add_row(step.name, "yes" if applies else "", step.needs, step.leaves)
    console.output().print(table)
    raise typer.Exit


def _check_limits(
    request_timeout_s: float, max_queue: int, otlp_endpoint: str | None, name: str
) -> Limits:
    """The limits of requests. Raises `ConfigError` if traces cannot be sent."""
    from tangram.serve.bridge import Limits
    from tangram.serve.tracing import check_traces

    check_traces(otlp_endpoint, name)
    return Limits(request_timeout_s, max_queue=max_queue)


def _choose_name(config: EngineConfig, given: str | None) -> str:
    """The name by which requests call the model."""
    name = name_served_model(config.model) if given is None else given
    check_served_name(name)
    return name


def _choose_access(page: PageFor, host: str) -> Access | None:
    """Who may see the page; None if there is none."""
    from tangram.page.access import Access, Visibility

    return None if page is PageFor.off else Access(Visibility(page.value), host)


def _build(
    config: EngineConfig, name: str, page: PageFor, publisher: EventPublisher | None
) -> tuple[Engine, PageDesk | None]:
    """The engine, not started, and what it tells a page."""
    from tangram.engine.build import build_engine
    from tangram.page.desk import PageDesk

    engine = build_engine(config, records=page is not PageFor.off)
    _tell_publisher(publisher, engine)
    return engine, None if page is PageFor.off else PageDesk(engine, name)


def _supervise(
    engine: Engine,
    desk: PageDesk | None,
    start: ApiStart,
    processes: ApiProcesses,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal, or until the engine ends."""
    from tangram.link.engine_port import EnginePort
    from tangram.link.supervisor import Supervisor

    port = EnginePort(engine, desk)
    asyncio.run(Supervisor(engine, port, desk, start, processes, on_ready).run())


@contextmanager
def _publish_events(address: EventAddress | None) -> Iterator[EventPublisher | None]:
    """The publisher of KV events at `address`, if there is one; it is closed at the end.

    Raises `ConfigError` if an endpoint cannot be used.
    """
    if address is None:
        yield None
        return
    from tangram.kv_events.publisher import EventPublisher

    with closing(EventPublisher(address)) as publisher:
        _log.info("KV events at %s", publisher.endpoint)
        yield publisher


def _tell_publisher(publisher: EventPublisher | None, engine: Engine) -> None:
    """Hand what `engine` tells of its prefix cache to `publisher`, if there is one."""
    if publisher is not None:
        from tangram.kv_events.stream import KvEventStream

        KvEventStream(engine, publisher.send)


def _report_listening(listener: Listener, model: str) -> None:
    where = f"{listener.url}{', on all interfaces' if listener.is_open_to_all else ''}"
    _log.info("listening at %s; loading PyTorch, then %s", where, model)


def _report_ready(
    listener: Listener,
    engine: Engine,
    model: str,
    form: LogForm,
    begin_s: float,
    *,
    keys: list[str] | None,
) -> None:
    seconds, url = time.monotonic() - begin_s, f"{listener.url}/v1"
    _log.info("ready after %.1f s: %s", seconds, url, extra={"fields": {"url": url}})
    if form is LogForm.text:
        _tell_first_request(listener, engine, model, locked=bool(keys))


def _tell_first_request(listener: Listener, engine: Engine, model: str, *, locked: bool) -> None:
    chats = engine.codec.tokenizer.chat_template is not None
    console.tell(first_request(f"{listener.url}/v1", model, chats=chats, locked=locked))


def check_keys(api_key: list[str] | None) -> None:
    """Raise `ConfigError` if the variable for keys is set and holds none."""
    if not api_key and KEY_VARIABLE in os.environ:
        raise ConfigError(
            f"{KEY_VARIABLE} is set and holds no key: unset it to serve everybody, or put a key in "
            "it"
        )


def first_request(url: str, model: str, *, chats: bool, locked: bool) -> str:
    """A command line that asks the server at `url` for an answer."""
    asked = {"messages": [{"role": "user", "content": "Hello!"}]} if chats else {"prompt": "Hello"}
    path = "chat/completions" if chats else "completions"
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if locked else [])]
    given = [part for header in headers for part in ("-H", header)]
    return shlex.join(["curl", f"{url}/{path}", *given, "-d", json.dumps({"model": model} | asked)])
