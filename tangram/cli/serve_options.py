"""The options of `tangram serve` that concern its server, not its engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from tangram.cli.checks import within
from tangram.cli.options import Panel, engine_option, option
from tangram.limits import Bounds

KEY_VARIABLE = "TANGRAM_API_KEY"


class UnknownFields(StrEnum):
    """What becomes of a request with fields that are not served."""

    refuse = "refuse"
    warn = "warn"


Host = Annotated[str, option(Panel.server, "address to listen on")]
Port = Annotated[int, option(Panel.server, "port to listen on", callback=within(Bounds(0, 65535)))]
ServedModelName = Annotated[
    str | None,
    option(Panel.server, "name of the model in the API", default="MODEL, of a path its last part"),
]
ApiKeys = Annotated[
    list[str] | None,
    option(
        Panel.server,
        "a key that requests may carry, again for more; in the variable with spaces between",
        envvar=KEY_VARIABLE,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    option(
        Panel.server,
        "web pages of this origin (https://HOST) may ask from a browser, again for more; * is all",
    ),
]
OnUnknownFields = Annotated[
    UnknownFields,
    option(
        Panel.server, "refuse requests with fields that are not served; warn logs and counts them"
    ),
]
MaxBodyMb = Annotated[
    float,
    option(
        Panel.server,
        "most megabytes of a request's body",
        callback=within(Bounds(0.0, 1024.0, open_low=True)),
    ),
]
MaxQueue = Annotated[int, engine_option("max_queue", unset="1024", panel=Panel.server)]
RequestTimeout = Annotated[
    float,
    option(
        Panel.server,
        "most seconds from a request to the end of its answer",
        callback=within(Bounds(0.0, 1e9, open_low=True)),
    ),
]
ShutdownGrace = Annotated[
    float,
    option(
        Panel.server,
        "seconds that running answers get to end at SIGTERM",
        callback=within(Bounds(0.0, 1e6)),
    ),
]
