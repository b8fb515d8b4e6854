"""Chat answers of which some is thought, or calls: taken apart event by event, whole and streamed
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tangram.serve.bridge import Codec
from tangram.serve.calls import Call
from tangram.serve.replies import ChatFormat, Choice, Json
from tangram.serve.thoughts import Part, Reader, Thought
from tangram.types import Event, FinishReason


class ReadChoice(Choice):
    """One completion as far as it has come, and its `parts`, of which `reasoning_tokens` tokens
    were thoughts.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self.parts: list[Part] = []
        self.reasoning_tokens = 0

    def add(self, event: Event) -> None:
        """Append an event of this completion."""
        super().add(event)
        self.parts += self.take(event)

    def take(self, event: Event) -> list[Part]:
        """The parts that are certain with `event`."""
        thinking = self._reader.thinking
        parts = list(self._reader.push(event.text))
        if thinking or self._reader.thinking:
            self.reasoning_tokens += len(event.token_ids)
        return parts if event.finish_reason is None else [*parts, *self._reader.finish()]

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._reader.called


def text_of(parts: Iterable[Part]) -> str:
    """What is neither thought nor a call."""
    return "".join(part for part in parts if isinstance(part, str))


def join_thoughts(parts: Iterable[Part]) -> str:
    """What is thought."""
    return "".join(part.text for part in parts if isinstance(part, Thought))


class ReadChatFormat(ChatFormat):
    """chat.completion and chat.completion.chunk of answers that a `reader` takes apart."""

    def __init__(
        self, codec: Codec, *, logprobs: bool, reader: Callable[[], Reader], thinks: bool
    ) -> None:
        super().__init__(codec, logprobs=logprobs)
        self._reader, self._thinks = reader, thinks
        self._choices: dict[int, ReadChoice] = {}
        self._calls: dict[int, int] = {}

    def choice(self, index: int) -> ReadChoice:
        """Where completion `index` is gathered."""
        if index not in self._choices:
            self._choices[index] = ReadChoice(self._reader())
        return self._choices[index]

    def reasoning_tokens(self, indexes: Iterable[int]) -> int | None:
        """None for models that do not think."""
        if not self._thinks:
            return None
        return sum(self.choice(index).reasoning_tokens for index in indexes)

    def delta(self, index: int, event: Event) -> Json:
        """Thoughts go into `reasoning_content`, text into `content`, and a call as a whole into
        `tool_calls`.
        """
        choice = self.choice(index)
        parts = choice.take(event)
        delta: Json = {}
        if thought := join_thoughts(parts):
            delta["reasoning_content"] = thought
        if text := text_of(parts):
            delta["content"] = text
        if calls := [part for part in parts if isinstance(part, Call)]:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(calls)
            delta["tool_calls"] = [
                {"index": number} | call.json() for number, call in enumerate(calls, first)
            ]
        return {"index": index, "delta": delta, **self._ending(index, event, choice)}

    def whole(self, index: int, choice: Choice) -> Json:
        """As `delta`; `content` is null beside calls where there is no text."""
        gathered = self.choice(index)
        text, thought = text_of(gathered.parts), join_thoughts(gathered.parts)
        calls = [part.json() for part in gathered.parts if isinstance(part, Call)]
        content = text or None if calls else text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **self._ending(index, choice, gathered)}

    def _ending(self, index: int, part: Event | Choice, choice: ReadChoice) -> Json:
        end = self._end(index, part)
        called = choice.called and part.finish_reason is FinishReason.STOP
        return end | {"finish_reason": "tool_calls"} if called else end
