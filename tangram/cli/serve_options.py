"""The options of `tangram serve` that concern its server, not its engine."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

from tangram.cli.checks import within
from tangram.cli.options import Panel, engine_option, option
from tangram.errors import ConfigError
from tangram.limits import SERVED_QUEUE, SERVER_BOUNDS, Bounds

KEY_VARIABLE = "TANGRAM_API_KEY"


class UnknownFields(StrEnum):
    """The answer to a request with fields that are not supported."""

    refuse = "refuse"
    warn = "warn"


class PageFor(StrEnum):
    """Who may see the page: see `tangram.page.access.Access`."""

    auto = "auto"
    local = "local"
    open = "open"
    off = "off"


def choose_page(page: PageFor, *, no_page: bool) -> PageFor:
    """Who may see the page, by both options. Raises `ConfigError` if they contradict each other."""
    if no_page and page not in (PageFor.auto, PageFor.off):
        raise ConfigError(f"page is {page.value!r} and no_page is given: leave one of them out")
    return PageFor.off if no_page else page


def count_processes(wanted: int | None, device: str) -> int:
    """How many API processes serve an engine on `device`, an option's value."""
    if wanted is not None:
        return wanted
    # Whether there is a GPU is known when the model is loaded; these start before. Whoever has few
    # cores computes on them.
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return 1 if device == "cpu" else max(1, min(4, cores // 4))


Host = Annotated[str, option(Panel.server, "address to listen on")]
Port = Annotated[int, option(Panel.server, "port to listen on", callback=within(Bounds(0, 65535)))]
ServedModelName = Annotated[
    str | None,
    option(Panel.server, "name of the model in the API", default="MODEL; last part of a path"),
]
ApiKeys = Annotated[
    list[str] | None,
    option(
        Panel.server,
        "API key that clients must send; repeat for more; the variable separates keys by spaces",
        envvar=KEY_VARIABLE,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    option(
        Panel.server,
        "allow browser requests from this origin (https://HOST); repeat for more; * allows all",
    ),
]
OnUnknownFields = Annotated[
    UnknownFields,
    option(Panel.server, "refuse requests with unsupported fields, or warn: log and count them"),
]
MaxBodyMb = Annotated[
    float,
    option(
        Panel.server,
        "maximum size of a request's body in megabytes",
        callback=within(SERVER_BOUNDS["max_body_mb"]),
    ),
]
MaxQueue = Annotated[int, engine_option("max_queue", unset=str(SERVED_QUEUE), panel=Panel.server)]
RequestTimeout = Annotated[
    float,
    option(
        Panel.server,
        "maximum seconds from a request to the end of its answer",
        callback=within(SERVER_BOUNDS["request_timeout_s"]),
    ),
]
ShutdownGrace = Annotated[
    float,
    option(
        Panel.server,
        "seconds that running answers may take after SIGTERM",
        callback=within(SERVER_BOUNDS["shutdown_grace_s"]),
    ),
]
HowManyProcesses = Annotated[
    int | None,
    option(
        Panel.server,
        "processes that read requests and write answers beside the engine's",
        default="1 on a CPU; on a GPU one for four cores, up to 4",
        callback=within(Bounds(1, 64)),
    ),
]
ShownPage = Annotated[
    PageFor,
    option(
        Panel.server,
        "who may see the page at / and its data. auto: with API keys their holders, without keys "
        "clients of this machine; local: clients of this machine; open: every client; off: nobody",
        metavar="<who>",
    ),
]
NoPage = Annotated[bool, option(Panel.server, "the same as --page off", "--no-page")]
KvEvents = Annotated[
    str | None,
    option(
        Panel.server,
        "publish events of the KV cache here, in vLLM's form: tcp://*:5557",
        default="no events",
    ),
]
KvEventsReplay = Annotated[
    str | None,
    option(
        Panel.server, "send events again to those that ask here: tcp://*:5558", default="nowhere"
    ),
]
KvEventsTopic = Annotated[
    str, option(Panel.server, "topic of the events; llm-d reads kv@ADDRESS@MODEL", default="empty")
]
Explain = Annotated[
    bool,
    option(
        Panel.server,
        "print how the model would be prepared, step by step, and end; no weights are read",
        "--explain",
    ),
]
