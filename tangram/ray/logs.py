"""The log of a process that Ray has started."""

from __future__ import annotations

import logging

from tangram.serve.observability.logs import LogForm, log_as_json


def log_in_worker(form: LogForm) -> None:
    """Log from INFO on in this form. Ray collects what a worker writes, and shows it."""
    if form is LogForm.json:
        log_as_json()
        return
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tangram.requests").setLevel(logging.WARNING)
