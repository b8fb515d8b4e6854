"""Logging, metrics and tracing of the commands."""

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
from tangram.serve.logs import LogForm, log_as_json

# Conversion and loading show progress bars. Requests are in the metrics and in the JSON log.
_QUIET = ("httpx", "transformers", "uvicorn.access")
_PLAIN = "%(asctime)s %(levelname)s %(message)s"
_log = logging.getLogger("tangram")


class OtherNames(StrEnum):
    """An engine under whose names metrics are shown, too."""

    vllm = "vllm"


LogFormat = Annotated[
    LogForm,
    option(Panel.server, "json writes an object per line to standard output, also for requests"),
]
MetricsAliases = Annotated[
    OtherNames | None,
    option(Panel.server, "show metrics under vLLM's names, too", default="Tangram's names only"),
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
    """A handler that writes to standard error, in columns if that is a terminal."""
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
    """Write log messages from WARNING on to standard error while inside."""
    handler = _text_handler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def logging_as(form: LogForm) -> Iterator[None]:
    """Log in this form while inside.

    A JSON log also contains the error that ends the command.
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
    """Limit these loggers to warnings and worse while inside; then restore all of logging."""
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
    log_as_json()
    try:
        yield
    except TangramError as error:
        _log.critical("%s", error)
        raise typer.Exit(exit_code(error)) from error
