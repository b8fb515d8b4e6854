"""`tangram serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from tangram.cli import console
from tangram.cli.options import KEY_VARIABLE, with_server
from tangram.cli.serve_options import (
    Explain,
    Host,
    HowManyProcesses,
    NotShown,
    Port,
    ShownTo,
    choose_visibility,
    count_processes,
)
from tangram.cli.telemetry import logging_as
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.kv_events.address import EventAddress
from tangram.link.api_process import ApiStart
from tangram.link.api_processes import ApiProcesses
from tangram.link.collection import keep_uncollected
from tangram.model.source import name_served_model
from tangram.serve.observability.logs import LogForm
from tangram.serve.options import ServerOptions, Visibility
from tangram.serve.responses.response_store import ResponseStore
from tangram.serve.transport.guard import check_served_name
from tangram.serve.transport.listening import Listener

if TYPE_CHECKING:
    from tangram.kv_events.publisher import EventPublisher
    from tangram.link.engine_port import EnginePort

_log = logging.getLogger(__name__)


@with_server(ServerOptions)
def serve(
    config: EngineConfig,
    options: ServerOptions,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_processes: HowManyProcesses = None,
    page: ShownTo = Visibility.auto,
    no_page: NotShown = False,
    explain: Explain = False,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    if explain:
        with logging_as(options.log_format):
            _explain(config)
    begin_s = time.monotonic()
    check_keys(options.api_key)
    shown = choose_visibility(page, no_page=no_page)
    name = choose_name(config, options.served_model_name)
    with (
        _publish_events(options.events) as publisher,
        closing(Listener.at(host, port)) as listener,
        logging_as(options.log_format),
        ApiProcesses(listener, count_processes(api_processes, config.device)) as processes,
        ExitStack() as ending,
    ):
        options = _place_store(options, processes)
        # Frozen objects are not freed at exit, and Triton's bindings report them as leaks.
        ending.callback(gc.unfreeze)
        _report_listening(listener, config.model)
        with keep_uncollected():
            from tangram.link.remote_engine import EngineNature
            from tangram.link.supervisor import Supervisor
            from tangram.serve.observability.tracing import check_traces
            from tangram.web.access import Access

            check_traces(options.otlp_endpoint, name)
            served = _build(config, name, shown, publisher)
            facts = EngineNature.of(served.engine)
            access = None if served.web is None else Access(shown, host)
            start = ApiStart(facts, name, options, config.max_queue, access)
        on_ready = partial(_report_ready, listener, start, begin_s)
        asyncio.run(Supervisor(served, start, processes, on_ready).run())


def _explain(config: EngineConfig) -> NoReturn:
    """Print the steps that would prepare the model, and which of them apply; ends the command."""
    from rich.table import Table

    from tangram.engine.setup.option_checks import check_options
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


def choose_name(config: EngineConfig, given: str | None) -> str:
    """The name by which requests call the model."""
    name = name_served_model(config.model) if given is None else given
    check_served_name(name)
    return name


def _build(
    config: EngineConfig, name: str, shown: Visibility, publisher: EventPublisher | None
) -> EnginePort:
    """The engine, not started, with what it tells the web page, if there is one."""
    from tangram.engine.setup.build import build_engine
    from tangram.link.engine_port import EnginePort
    from tangram.web.desk import WebDesk

    engine = build_engine(config, records=shown is not Visibility.off)
    if publisher is not None:
        from tangram.kv_events.stream import KvEventStream

        KvEventStream(engine.watch, publisher.send)
    return EnginePort(engine, None if shown is Visibility.off else WebDesk(engine, name))


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


def _place_store(options: ServerOptions, processes: ApiProcesses) -> ServerOptions:
    """`options` with a file of responses that `processes` share. Raises `ConfigError`."""
    if not options.store_responses:
        return options
    path = options.store_path or str(processes.folder / "responses.sqlite")
    placed = options.model_copy(update={"store_path": path})
    with closing(ResponseStore.of(placed)) as store:
        store.check()
    return placed


def _report_listening(listener: Listener, model: str) -> None:
    where = f"{listener.url}{', on all interfaces' if listener.is_open_to_all else ''}"
    _log.info("listening at %s; loading PyTorch, then %s", where, model)


def _report_ready(listener: Listener, start: ApiStart, begin_s: float) -> None:
    seconds, url = time.monotonic() - begin_s, f"{listener.url}/v1"
    _log.info("ready after %.1f s: %s", seconds, url, extra={"fields": {"url": url}})
    if start.options.log_format is LogForm.text:
        chats = start.facts.codec.tokenizer.chat_template is not None
        locked, name = bool(start.options.api_key), start.served_model_name
        console.tell(first_request(url, name, chats=chats, locked=locked))


def check_keys(api_key: Sequence[str]) -> None:
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
