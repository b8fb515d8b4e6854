"""The options of `tangram serve` alone, and the address of `tangram deploy`, too."""

from __future__ import annotations

import os
from typing import Annotated

from tangram.cli.checks import within
from tangram.cli.options import Panel, option
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tangram.serve.options import Visibility


def choose_visibility(page: Visibility, *, no_page: bool) -> Visibility:
    """Who may see the web page, by both options. Raises `ConfigError` if they contradict."""
    if no_page and page not in (Visibility.auto, Visibility.off):
        raise ConfigError(f"page is {page.value!r} and no_page is given: leave one of them out")
    return Visibility.off if no_page else page


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
HowManyProcesses = Annotated[
    int | None,
    option(
        Panel.server,
        "processes that read requests and write answers beside the engine's",
        default="1 on a CPU; on a GPU one for four cores, up to 4",
        callback=within(Bounds(1, 64)),
    ),
]
ShownTo = Annotated[
    Visibility,
    option(
        Panel.server,
        "who may see the page at / and its data. auto: with API keys their holders, without keys "
        "clients of this machine; local: clients of this machine; open: every client; off: nobody",
        metavar="<who>",
    ),
]
NotShown = Annotated[bool, option(Panel.server, "the same as --page off", "--no-page")]
Explain = Annotated[
    bool,
    option(
        Panel.server,
        "print how the model would be prepared, step by step, and end; no weights are read",
        "--explain",
    ),
]
