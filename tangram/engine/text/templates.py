"""The chat template of a model, rendered in small processes that can be killed."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

from tangram.engine.text import template_process
from tangram.engine.text.template_process import MOST_BYTES, MOST_S, READY
from tangram.errors import MachineError, RequestError
from tangram.limits import TEMPLATE_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROCESSES = 2  # one that is kept busy holds up no other conversation
_LIMITS = f"{MOST_S} s or {MOST_BYTES >> 20} MiB of memory"
# Signals that end a process from outside; they say nothing about a template.
_ENDED_FROM_OUTSIDE = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGKILL)
_log = logging.getLogger("tangram")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The chat template of `tokenizer`. Safe to share between threads.

    `PROCESSES` conversations are rendered at a time. Each takes at most `MOST_S` and `MOST_BYTES`
    of memory in `template_process.py`. Its processes start at the first conversation, or at `warm`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._processes = tokenizer, _Processes()
        self._exceeds = False  # an example has shown that it does

    def render(
        self, messages: Messages, tools: Tools = (), options: Mapping[str, Any] | None = None
    ) -> str:
        """The text of a conversation up to the start of the assistant's answer.

        Raises `RequestError` (field `messages`) if the template rejects the messages or needs more
        time or memory than it may. Raises `MachineError` if no process could render them.
        """
        result = self._render(messages, tools, {"add_generation_prompt": True, **(options or {})})
        if result is None:
            raise RequestError(
                lambda field: (
                    f"{field}: the model's chat template takes more than {_LIMITS} for them: send "
                    "less, or mend the template in the model's folder"
                ),
                "messages",
            )
        if "refused" in result:
            raise _explain_rejection(result["refused"])
        return str(result["done"])

    def render_example(
        self, messages: Messages, tools: Tools = (), *, add_generation_prompt: bool = False
    ) -> str:
        """A conversation that shows what the template does; empty if it does not render it.

        Once it has exceeded its limits, no further example is tried. Raises `MachineError`.
        """
        if self._exceeds:
            return ""
        wanted = {"add_generation_prompt": add_generation_prompt}
        try:
            result = self._render(messages, tools, wanted)
        except RequestError:
            return ""
        self._note(result)
        return "" if result is None else result.get("done", "")

    @cached_property
    def options(self) -> frozenset[str]:
        """The variables that every template of the tokenizer reads and that a request may set."""
        found = self._tokenizer.chat_template or {}
        read = [
            self._read(each) for each in ([found] if isinstance(found, str) else found.values())
        ]
        given = TEMPLATE_NAMES.union(self._tokenizer.special_tokens_map)
        return frozenset.intersection(*read) - given if read else frozenset()

    def warm(self) -> None:
        """Start the processes, which takes them a second or two."""
        if self._tokenizer.chat_template is not None:
            self._processes.start()

    def close(self) -> None:
        """End the processes, and what they render; conversations after it start them again."""
        self._processes.kill()

    def _render(
        self, messages: Messages, tools: Tools, options: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        shown = [dict(tool) for tool in tools] or None
        try:
            template = self._tokenizer.get_chat_template(tools=shown)
        except ValueError as error:  # several templates, and none of them is the default
            raise _explain_rejection() from error
        # Transformers leaves fields without a value out, too.
        given = [{k: v for k, v in each.items() if v is not None} for each in messages]
        names = self._tokenizer.special_tokens_map
        asked = {"conversations": [given], "tools": shown, "chat_template": template}
        return self._answer({"render": {**names, **options, **asked}})

    def _read(self, template: str) -> frozenset[str]:
        if self._exceeds:
            return frozenset()
        result = self._answer({"read": template})
        self._note(result)
        return frozenset() if result is None else frozenset(result["done"])

    def _answer(self, job: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            line = json.dumps(job).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error)
            raise RequestError(
                lambda field: f"{field}: they hold what JSON cannot spell: {reason}", "messages"
            ) from error
        return self._processes.answer(line)

    def _note(self, result: object | None) -> None:
        if result is None:
            self._exceeds = True
            _log.warning("the model's chat template takes more than %s for an example", _LIMITS)


def _explain_rejection(reason: str = "") -> RequestError:
    return RequestError(
        lambda field: f"{field}: the model's chat template rejects them{reason}", "messages"
    )


class _Processes:
    """`PROCESSES` processes. The one that was used last is used next, if it is idle."""

    def __init__(self) -> None:
        self._all = [_Process() for _ in range(PROCESSES)]
        self._idle, self._places = deque(self._all), Semaphore(PROCESSES)

    def answer(self, job: bytes) -> dict[str, Any] | None:
        """The result of a job; None if it exceeds its limits. Raises `MachineError`."""
        with self._places:
            process = self._idle.pop()
            try:
                return process.answer(job)
            except BaseException:  # Ctrl-C too: its result must not become that of the next job
                process.kill()
                raise
            finally:
                if process.lives:
                    self._idle.append(process)
                else:
                    process.start()  # it is ready when it is needed
                    self._idle.appendleft(process)

    def start(self) -> None:
        for process in self._all:
            process.start()

    def kill(self) -> None:
        for process in self._all:
            process.kill()


class _Process:
    """A process of `template_process.py`, for one job at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    @property
    def lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, if it does not live; this does not wait until it is ready."""
        if self.lives:
            return
        command = [sys.executable, "-P", str(Path(template_process.__file__))]
        try:
            # In a group of its own: Ctrl-C in a terminal is the server's, which lets requests end.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            raise _explain_absence(str(error)) from error
        self._process, self._ready = process, False
        weakref.finalize(self, _end, process)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def answer(self, job: bytes) -> dict[str, Any] | None:
        """See `_Processes.answer`."""
        self.start()
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise _explain_absence("it has no pipes")
        if not self._ready:
            self._ready = process.stdout.readline() == READY
        with suppress(BrokenPipeError):
            process.stdin.write(job)
            process.stdin.flush()
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            result: dict[str, Any] | None = json.loads(line)
            return result
        code = process.wait()
        if not self._ready or code in _ENDED_FROM_OUTSIDE:
            raise _explain_absence(f"code {code}")
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError), process:
        pass  # this closes its pipes and waits for it


def _explain_absence(reason: str) -> MachineError:
    _log.error("the process that renders chat templates could not run: %s", reason)
    return MachineError(
        "the server could not render the conversation just now: send the request again in a while"
    )
