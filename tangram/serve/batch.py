"""Files of requests in OpenAI's batch format, answered by an engine in this process.

A line of the input is `{"custom_id", "method", "url", "body"}`. A line of the output has the same
`custom_id` and a `response` with `status_code` and `body`, or an `error`, or both. Answers are
written in the order in which they are finished.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copymode
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tangram.errors import ConfigError, RequestError, TangramError
from tangram.foreign_files import replace_file
from tangram.serve.bodies.body import Json
from tangram.serve.chat.schema import ChatRequest, CompletionRequest
from tangram.serve.service import Service
from tangram.serve.transport.api_errors import ApiError, as_api_error
from tangram.serve.transport.parsing import parse

_BODIES: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_BEGIN = b'{"id": "line-'  # of every line of the output
_log = logging.getLogger(__name__)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    `custom_id` is None if the line has none of its own. `request` is None if the line is wrong.
    """

    number: int
    custom_id: str | None
    request: _Line | None
    error: ApiError | None

    @property
    def id(self) -> str:
        """The name of the output line."""
        return f"line-{self.number}"

    @property
    def key(self) -> str:
        """The name of the line among earlier answers: the `custom_id`, else the line number."""
        return self.id if self.custom_id is None else f"custom {self.custom_id}"


@dataclass
class BatchFiles:
    """The requests that have no answer in the output yet.

    One that has an error there is tried again, and its error leaves the output. So does a last line
    that was cut short, by a crash for example. The output stays open and locked until it is closed.
    Raises `ConfigError` if a file cannot be read, if both are the same, if another run writes the
    output, or if the output holds anything but answers. Then the output is unchanged.
    """

    source: Path
    target: Path
    tasks: list[BatchLine] = field(init=False)
    total: int = field(init=False)
    output: io.FileIO = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            source, target = self.source, self.target
            if target.exists() and source.exists() and source.samefile(target):
                raise ConfigError(
                    f"output is {str(self.target)!r}, the file of the requests: choose another file"
                )
            tasks = list(_tasks(self.source))
            self.output = _open(self.target)
            try:
                lines = _read_lines(self.output, self.target)
                # The error of a line that had no `custom_id` is named by its place.
                asked = {name for task in tasks for name in (task.key, task.id)}
                again = {line.key for line in lines if line.failed} & asked
                if again:
                    kept = [line for line in lines if not (line.failed and line.key in again)]
                    self.output = _rewrite(self.output, self.target, kept)
                    lines = kept
            except BaseException:
                self.output.close()
                raise
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"batch is {str(self.source)!r}, output {str(self.target)!r}: {error}"
            ) from error
        self.total = len(tasks)
        done = {line.key for line in lines}
        self.tasks = [task for task in tasks if task.key not in done]

    @property
    def skipped(self) -> int:
        """How many lines were answered before."""
        return self.total - len(self.tasks)


def _tasks(source: Path) -> Iterator[BatchLine]:
    first_lines: dict[str, int] = {}
    for number, text in enumerate(source.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not text.strip():
            continue
        task = _task(number, text)
        if (
            task.custom_id is not None
            and (first := first_lines.setdefault(task.custom_id, number)) != number
        ):
            message = (
                f"custom_id is {task.custom_id!r}, as in line {first}: each line needs its own"
            )
            task = BatchLine(
                number, None, None, ApiError(400, message, param="custom_id", code="invalid_value")
            )
        yield task


def _task(number: int, text: str) -> BatchLine:
    try:
        data = parse(text.encode(), f"line {number}")
    except ApiError as error:
        return BatchLine(number, None, None, error)
    given = data.get("custom_id") if isinstance(data, dict) else None
    custom_id = given if isinstance(given, str) else None
    try:
        return BatchLine(number, custom_id, _Line.model_validate(data), None)
    except ValidationError as error:
        return BatchLine(number, custom_id, None, as_api_error(error))


def _open(target: Path) -> io.FileIO:
    """The output, opened for appending and locked. Raises `ConfigError`, `OSError`."""
    if target.exists() and not target.is_file():  # reading a pipe or a device may never end
        raise ConfigError(f"output is {str(target)!r}, it must be a regular file")
    file = io.FileIO(target, "a+")
    try:
        # The system unlocks it however the process ends
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise _explain_other_run(target) from None
    except OSError:  # a file system without locks
        pass
    if not os.path.samestat(os.fstat(file.fileno()), target.stat()):  # one has just replaced it
        file.close()
        raise _explain_other_run(target)
    return file


def _explain_other_run(target: Path) -> ConfigError:
    return ConfigError(f"output is {str(target)!r}, another run writes to it: wait for its end")


@dataclass(frozen=True)
class _OutputLine:
    """A line of the output, and the `BatchLine.key` of its request."""

    key: str
    failed: bool
    text: bytes


def _read_lines(file: io.FileIO, target: Path) -> list[_OutputLine]:
    """The lines of `file`. A last line that a crash has cut is removed."""
    file.seek(0)
    *whole, rest = file.readall().split(b"\n")
    lines = [_read_line(target, number, line) for number, line in enumerate(whole, 1)]
    if rest and _is_cut_short(rest):
        file.truncate(file.seek(-len(rest), os.SEEK_END))
    elif rest:
        lines.append(_read_line(target, len(whole) + 1, rest))
        _append(file, b"\n")
    return lines


def _rewrite(file: io.FileIO, target: Path, lines: list[_OutputLine]) -> io.FileIO:
    """The output with these `lines` alone, opened and locked; at each moment there is a whole file.

    Closes `file`, which it has replaced.
    """
    with replace_file(target) as path, path.open("wb") as new:
        copymode(target, path)
        new.writelines(line.text + b"\n" for line in lines)
        new.flush()
        os.fsync(new.fileno())
    file.close()
    return _open(target)


def _append(file: io.FileIO, data: bytes) -> None:
    """Append all of it; the system may write it in parts."""
    while data:
        data = data[file.write(data) :]


def _read_line(target: Path, number: int, line: bytes) -> _OutputLine:
    try:
        record = json.loads(line)
        answer = record["response"] or record["error"]
        key = record["id"] if record["custom_id"] is None else f"custom {record['custom_id']}"
        if isinstance(answer, dict) and isinstance(key, str):
            return _OutputLine(key, record["error"] is not None, line)
    except (ValueError, LookupError, TypeError, RecursionError):  # also bytes that are no text
        pass
    raise ConfigError(
        f"output is {str(target)!r}, its line {number} is no answer to a batch: choose another file"
    )


def _is_cut_short(rest: bytes) -> bool:
    """Whether these bytes are the beginning of a line of `_record`, and not all of it."""
    if not (rest.startswith(_BEGIN) or _BEGIN.startswith(rest)):
        return False
    try:
        json.loads(rest)
    except (ValueError, RecursionError):
        return True
    return False


def answer_all(
    service: Service, files: BatchFiles, *, at_once: int, on_line: Callable[[], None]
) -> int:
    """Answer the remaining lines of `files`, `at_once` at a time; returns how many got an error.

    `on_line` is called after each line is written. Starts the engine and stops it. Raises
    `TangramError` if the engine dies, or if a grammar cannot be tried. Lines without an answer are
    not written then, and the next run continues with them.
    """
    with files.output:
        return asyncio.run(_answer_all(service, files, at_once, on_line))


async def _answer_all(
    service: Service, files: BatchFiles, at_once: int, on_line: Callable[[], None]
) -> int:
    failed, tasks = 0, iter(files.tasks)

    async def work() -> None:
        nonlocal failed
        for task in tasks:
            record = await _record(service, task)
            # Only ASCII: an answer may hold half a character, which UTF-8 cannot spell.
            _append(files.output, json.dumps(record).encode("ascii") + b"\n")
            failed += record["error"] is not None
            on_line()

    await service.start()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except ExceptionGroup as errors:
        # Not `except*`: up to Python 3.11.3 what is raised there comes out in a group.
        first = errors.exceptions[0]
        if isinstance(first, OSError):
            raise TangramError(
                f"output {str(files.target)!r} cannot be written: {first}"
            ) from first
        if isinstance(first, TangramError):
            raise first from None
        raise
    finally:
        await service.stop()
    return failed


async def _record(service: Service, task: BatchLine) -> Json:
    head: Json = {"id": task.id, "custom_id": task.custom_id}
    if task.request is None:
        return head | {
            "response": None,
            "error": None if task.error is None else task.error.body()["error"],
        }
    status, body = await _response(service, task.request)
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
    return head | {"response": response, "error": body["error"] if status != 200 else None}


async def _response(service: Service, line: _Line) -> tuple[int, Json]:
    try:
        body = _BODIES[line.url].model_validate(line.body)
        service.check_model(body.model)
        if body.stream:
            raise ApiError(
                400, "'stream' is true, a file has no use for it: leave it out", param="stream"
            )
        return 200, await service.whole(body)
    except (ApiError, RequestError, ValidationError) as error:
        failure = as_api_error(error)
    except TangramError as error:
        if service.engine.healthy:
            raise  # about the engine, not about this line
        failure = ApiError(503, str(error))
    except Exception:
        _log.exception("a request of the batch failed")
        failure = ApiError(500, "internal error: the log has the details")
    if not service.engine.healthy:
        raise TangramError(
            "the engine has stopped: the log has the reason; run it again to go on after what is "
            "done"
        )
    return failure.status, failure.body()
