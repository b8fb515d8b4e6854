"""Logging of the commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tangram.cli.command import exit_code
from tangram.errors import TangramError
from tangram.serve.observability.logs import LogForm, log_inside, make_text_handler

_log = logging.getLogger("tangram")


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
