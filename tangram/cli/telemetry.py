"""Logging, metrics and tracing of the commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from tangram.cli.command import exit_code
from tangram.cli.options import Panel, engine_option, option
from tangram.errors import TangramError
from tangram.serve.logs import LogForm, log_inside, make_text_handler

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


@contextmanager
def warnings_as_text() -> Iterator[None]:
    """Write log messages from WARNING on to standard error while inside."""
    handler = make_text_handler()
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
    with log_inside(form):
        try:
            yield
        except TangramError as error:
            if form is LogForm.text:
                raise
            _log.critical("%s", error)
            raise typer.Exit(exit_code(error)) from error
