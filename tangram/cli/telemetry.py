"""What `tangram serve` tells of itself: how it logs, and under which names and where else it is
watched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer
from rich.logging import RichHandler

from tangram.cli.command import exit_code
from tangram.cli.console import messages
from tangram.cli.options import Panel, engine_option, option
from tangram.errors import TangramError

# Conversion and weight loading have progress bars of their own; requests are in the metrics, and in
# the log as JSON.
_QUIET = ("httpx", "transformers", "uvicorn.access")
_PLAIN = "%(asctime)s %(levelname)s %(message)s"
_log = logging.getLogger("tangram")


class LogForm(StrEnum):
    """How the log is written."""

    text = "text"
    json = "json"


class OtherNames(StrEnum):
    """Whose names metrics have besides their own."""

    vllm = "vllm"


LogFormat = Annotated[
    LogForm,
    option(Panel.server, "json: an object a line on standard output, and one for each request"),
]
MetricsAliases = Annotated[
    OtherNames | None,
    option(Panel.server, "show metrics under vLLM's names, too", default="only their own"),
]
OtlpEndpoint = Annotated[
    str | None,
    option(
        Panel.server,
        "send traces to this OpenTelemetry collector, http://HOST:4318",
        default="OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    ),
]
OverflowEvery = Annotated[int | None, engine_option("overflow_every")]


def _text_handler() -> logging.Handler:
    """Writes to standard error: in columns in a terminal, else a line each."""
    console = messages()
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_PLAIN, "%Y-%m-%d %H:%M:%S"))
    return handler


@contextmanager
def warnings_as_text() -> Iterator[None]:
    """Inside, what is logged from WARNING on goes to standard error."""
    handler = _text_handler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def logging_as(form: LogForm) -> Iterator[None]:
    """Log in this form while inside. An error that ends the command is a line of the log where that
    is JSON.
    """
    quiet = (*_QUIET, "tangram.requests") if form is LogForm.text else _QUIET
    with _quieten(quiet):
        if form is LogForm.text:
            logging.basicConfig(level=logging.INFO, handlers=[_text_handler()], force=True)
            yield
        else:
            with _as_json():
                yield


@contextmanager
def _quieten(names: Iterable[str]) -> Iterator[None]:
    """Of these loggers only warnings and worse while inside; afterwards all of logging is as
    before.
    """
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in names]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *loggers)]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip((root, *loggers), levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _as_json() -> Iterator[None]:
    from tangram.serve.logs import log_as_json

    log_as_json()
    try:
        yield
    except TangramError as error:
        _log.critical("%s", error)
        raise typer.Exit(exit_code(error)) from error
