"""Calls of tools in what a model writes, found while it is written; whatever is no proper call stays text.

Transformers' own parser of answers (`utils/chat_parsing`) gives up where JSON is broken and needs a mark at both ends;
an answer that a limit has cut, and Llama's calls, which have no marks, are everyday here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tangram.serve.bridge import Codec
from tangram.serve.replies import ChatFormat, Choice, Json
from tangram.types import Event, FinishReason, ToolFormat


@dataclass(frozen=True)
class Call:
    """A call of the function `name`; `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def json(self) -> Json:
        """The call as an answer has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Takes one completion apart as its text comes. `names` are the functions there are."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._held, self._inside, self._searched, self._plain = "", False, 0, False
        self.called = False

    def push(self, text: str) -> Iterator[str | Call]:
        """Text and calls that are now certain."""
        self._held += text
        if not self._begin:
            yield from self._whole_answer()
            return
        while (found := self._held.find(self._end if self._inside else self._begin, self._searched)) >= 0:
            yield from self._close(found) if self._inside else self._open(found)
        self._searched = max(0, len(self._held) - max(len(self._begin), len(self._end)))
        if not self._inside:
            yield from self._free(self._undecided())

    def finish(self) -> Iterator[str | Call]:
        """What was still held back, when the completion has ended."""
        held, self._held = self._held, ""
        call = None if self._begin or self._plain else self._call(held)
        if call is not None:
            yield call
        elif held.strip() or not self.called:
            yield self._begin + held if self._inside else held

    def _whole_answer(self) -> Iterator[str]:
        self._plain = self._plain or self._held.lstrip()[:1] not in ("", "{")
        if self._plain:
            yield from self._free(0)

    def _open(self, found: int) -> Iterator[str]:
        """Spaces before a call belong to it."""
        before, self._held = self._held[:found].rstrip(), self._held[found + len(self._begin) :]
        self._inside, self._searched = True, 0
        if before:
            yield before

    def _close(self, found: int) -> Iterator[str | Call]:
        inside, self._held = self._held[:found], self._held[found + len(self._end) :]
        self._inside, self._searched = False, 0
        call = self._call(inside)
        yield f"{self._begin}{inside}{self._end}" if call is None else call

    def _free(self, kept: int) -> Iterator[str]:
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._searched = 0
        if text:
            yield text

    def _undecided(self) -> int:
        """How long the end of what is held is that may belong to a call: spaces, and the beginning of a mark."""
        text = self._held
        lengths = range(min(len(self._begin) - 1, len(text)), 0, -1)
        mark = next((length for length in lengths if self._begin.startswith(text[-length:])), 0)
        before = text[: len(text) - mark]
        return len(text) - len(before.rstrip())

    def _call(self, text: str) -> Call | None:
        try:
            data = json.loads(text, parse_constant=_refused)
        except (ValueError, RecursionError):
            return None
        name = data.get("name") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = data.get(self._form.arguments)
        if not isinstance(arguments, dict):
            return None
        try:
            # 1e999 reads as an infinity, and an escape of half a surrogate pair has no bytes: no JSON can hold them.
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, RecursionError):
            return None
        self.called = True
        return Call(name, written)


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


class ToolChatFormat(ChatFormat):
    """chat.completion and chat.completion.chunk of answers that may call the functions `names`."""

    def __init__(self, codec: Codec, *, logprobs: bool, form: ToolFormat, names: Collection[str]) -> None:
        super().__init__(codec, logprobs=logprobs)
        self._form, self._names = form, names
        self._readers: dict[int, CallReader] = {}
        self._calls: dict[int, int] = {}

    def delta(self, index: int, event: Event) -> Json:
        """Text goes into `delta.content`, a call as a whole into `delta.tool_calls` once its end has come."""
        reader = self._readers.setdefault(index, CallReader(self._form, self._names))
        parts = list(reader.push(event.text))
        if event.finish_reason is not None:
            parts += reader.finish()
        delta: Json = {}
        if text := "".join(part for part in parts if isinstance(part, str)):
            delta["content"] = text
        if calls := [part for part in parts if isinstance(part, Call)]:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(calls)
            delta["tool_calls"] = [{"index": number} | call.json() for number, call in enumerate(calls, first)]
        return {"index": index, "delta": delta, **self._ending(index, event, reader)}

    def whole(self, index: int, choice: Choice) -> Json:
        """Text goes into `message.content`, null where there is none, calls into `message.tool_calls`."""
        reader = CallReader(self._form, self._names)
        parts = [*reader.push(choice.text), *reader.finish()]
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part.json() for part in parts if isinstance(part, Call)]
        message: Json = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **self._ending(index, choice, reader)}

    def _ending(self, index: int, part: Event | Choice, reader: CallReader) -> Json:
        end = self._end(index, part)
        called = reader.called and part.finish_reason is FinishReason.STOP
        return end | {"finish_reason": "tool_calls"} if called else end
