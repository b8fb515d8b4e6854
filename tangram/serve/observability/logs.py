"""The log as JSON lines, and a line for each request.

No line has a prompt, an answer or a key.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, TextIO

# An API process is no command, and its lines stand between those of a command.
from rich.console import Console  # noqa: TID251
from rich.logging import RichHandler

from tangram.serve.observability.record import Record
from tangram.types import LossReason, LostPrefix

# Conversion and loading show progress bars. Requests are in the metrics and in the JSON log.
_QUIET = ("httpx", "transformers", "uvicorn.access")
_PLAIN = "%(asctime)s %(levelname)s %(message)s"
PROBES = ("/health", "/ready", "/metrics")
_MOST_PATH_CHARACTERS = 200  # a path is whatever a client sends
# A request that has lost more prompt tokens has a line, unless there was one just before.
LOST_TOKENS, LOST_EVERY_S = 4096, 10.0
_log = logging.getLogger("tangram.requests")
_reuse_log = logging.getLogger("tangram.reuse")


class LogForm(StrEnum):
    """The format of the log."""

    text = "text"
    json = "json"


class JsonFormatter(logging.Formatter):
    """Lines with `time` (UTC), `level`, `logger`, `message`, and what the record adds.

    A record may add `request_id`, `fields` and an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON, with line breaks escaped."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogLines(logging.StreamHandler[TextIO]):
    """Says once, on standard error, that the log cannot be written.

    `logging` would print a traceback for each line.
    """

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Called when a line was lost."""
        if not self._has_failed:
            self._has_failed = True
            with suppress(OSError):
                print(
                    f"the log cannot be written, lines are lost: {sys.exception()}", file=sys.stderr
                )


def make_text_handler() -> logging.Handler:
    """A handler that writes to standard error, in columns if that is a terminal."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_PLAIN, "%Y-%m-%d %H:%M:%S"))
    return handler


@contextmanager
def log_inside(form: LogForm) -> Iterator[None]:
    """Log in this form while inside; then all of logging is as before."""
    quiet = (*_QUIET, _log.name) if form is LogForm.text else _QUIET
    root, loggers = logging.getLogger(), list(map(logging.getLogger, quiet))
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *loggers)]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        if form is LogForm.text:
            logging.basicConfig(level=logging.INFO, handlers=[make_text_handler()], force=True)
        else:
            log_as_json()
        yield
    finally:
        root.handlers[:] = handlers
        for logger, level in zip((root, *loggers), levels, strict=True):
            logger.setLevel(level)


def log_as_json() -> None:
    """Write logs from INFO on, and Python's warnings, as JSON lines to standard output."""
    handler = LogLines(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_request(record: Record) -> None:
    """Log a request whose answer is sent; requests of probes are logged at DEBUG."""
    path = record.path[:_MOST_PATH_CHARACTERS]
    level = logging.DEBUG if path in PROBES else logging.INFO
    message = "%s %s: %s"
    status = "cut" if record.status is None else record.status
    _log.log(
        level,
        message,
        record.method,
        path,
        status,
        extra={"request_id": record.request_id, "fields": _fields(record, path)},
    )


class LossLog:
    """Logs requests that have computed many tokens again: in numbers, and not each of many."""

    def __init__(self) -> None:
        self._silent_until_s = 0.0
        self._left_out = 0

    def __call__(self, record: Record) -> None:
        """Log the loss of a request, if it is large."""
        lost = None if record.generation is None else record.generation.lost
        if lost is None or lost[1].tokens <= LOST_TOKENS:
            return
        now_s = time.monotonic()
        if now_s < self._silent_until_s:
            self._left_out += 1
            return
        self._silent_until_s = now_s + LOST_EVERY_S
        more, self._left_out = self._left_out, 0
        _reuse_log.info(
            "request %s computed %s prompt tokens again: %s%s",
            record.request_id,
            f"{lost[1].tokens:,}",
            _say_why(lost[1]),
            f" ({more} more such requests since the last line)" if more else "",
            extra={"request_id": record.request_id},
        )


def _say_why(lost: LostPrefix) -> str:
    if lost.reason is LossReason.EVICTED:
        return "they were evicted from the prefix cache"
    if lost.reason is LossReason.STATELESS:
        return "the recurrent state behind their KV entries was not kept"
    return (
        f"it differs at token {lost.at:,} from an earlier conversation of its client "
        "(explain_reuse shows both texts)"
    )


def _fields(record: Record, path: str) -> dict[str, Any]:
    """The answer and its timing: seconds from the start of the request."""
    line: dict[str, Any] = {
        "method": record.method,
        "path": path,
        "status": record.status,
        "duration_s": _round(record.duration_s),
    }
    generation = record.generation
    if generation is None:
        return line
    usage, lost = generation.usage, generation.lost
    return line | {
        "response_id": generation.response_id,
        "stream": generation.stream,
        "kv_retention": generation.first.kv_retention,
        "kv_scorer": generation.first.kv_scorer,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "lost_tokens": 0 if lost is None else lost[1].tokens,
        "lost_reason": None if lost is None else lost[1].reason.value,
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": generation.finish_reasons,
        "queue_s": _round(record.since_start(generation.admitted_s)),
        "first_token_s": _round(record.since_start(generation.first_token_s)),
        "kv_bytes": usage.kv_bytes,
        "failure": generation.failure,
    }


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
