"""What chat completions and completions share: an answer of choices, streamed in chunks."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tangram.engine.text.codec import TextCodec
from tangram.serve.answers.answer import (
    AnswerEvent,
    AnswerUsage,
    Delta,
    End,
    Failure,
    Finish,
    Writer,
    write_line,
)
from tangram.serve.bodies.body import Json
from tangram.serve.chat.schema import StreamOptions
from tangram.serve.formats.calls import ArgumentText, Call
from tangram.serve.formats.thoughts import Part, Thought
from tangram.types import PromptLogprobs, TokenLogprob

# JSON has no -inf. The OpenAI API and vLLM write this number.
LOWEST_LOGPROB = -9999.0
_DONE = "data: [DONE]\n\n"


@dataclass
class WrittenCall:
    """A call with pieces of its arguments; None for one that an earlier event has begun."""

    begun: Call | None
    custom: bool
    pieces: list[str] = field(default_factory=list)

    def json(self) -> Json:
        """It as it is in an answer."""
        kind, given = ("custom", "input") if self.custom else ("function", "arguments")
        said: Json = {given: "".join(self.pieces)}
        if self.begun is None:
            return {kind: said}
        return {"id": self.begun.id, "type": kind, kind: {"name": self.begun.name, **said}}


@dataclass
class Content:
    """Parts of one completion by kind: its text, its thoughts, its calls."""

    text: str = ""
    thought: str = ""
    calls: list[WrittenCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @classmethod
    def of(cls, delta: Delta) -> Content:
        """What `delta` adds."""
        content = cls()
        content.add(delta)
        return content

    def add(self, delta: Delta) -> None:
        """Append `delta`."""
        for part in delta.parts:
            self._add_part(part)
        self.logprobs += delta.logprobs
        self.finish = delta.finish

    def _add_part(self, part: Part) -> None:
        if isinstance(part, Call):
            self.calls.append(WrittenCall(part, part.custom))
        elif isinstance(part, ArgumentText):
            if not self.calls:
                self.calls.append(WrittenCall(None, part.custom))
            self.calls[-1].pieces.append(part.text)
        elif isinstance(part, Thought):
            self.thought += part.text
        else:
            self.text += part


class ChunkWriter(Writer):
    """Spells answers whose `head` (id, time, model) is in every chunk.

    With `logprobs` the client wants log-probabilities, and of prompts if `prompt_logprobs` says how
    many; `options` are those of its stream. The model `marks_thoughts` if they can be counted. The
    whole answer has `warnings`, and of a stream the first chunk.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        codec: TextCodec,
        head: Json,
        *,
        logprobs: bool,
        prompt_logprobs: int | None = None,
        marks_thoughts: bool = False,
        options: StreamOptions | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._codec, self._head, self._wants_logprobs = codec, head, logprobs
        self._marks_thoughts = marks_thoughts
        self._options = StreamOptions() if options is None else options
        # Whether chunks of a text differ in that text alone.
        self._has_constant_frames = not (logprobs or self._options.continuous_usage_stats)
        self._choices = defaultdict[int, Content](Content)
        self._prompt_logprobs = prompt_logprobs
        # By choice: of its prompt, the first of each prompt alone has some.
        self._prompts: dict[int, Sequence[PromptLogprobs]] = {}
        self._frames: dict[int, tuple[str, str]] = {}
        self._warnings: Json = {"warnings": list(warnings)} if warnings else {}

    def begin(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def write(self, event: AnswerEvent) -> Iterable[str]:
        """A chunk for each delta, the usage if the client asked for it, [DONE]."""
        if isinstance(event, Delta) and self._has_constant_frames and (text := event.plain_text):
            before, after = self._frame_around(event.choice)
            return (f"{before}{write_line(text)}{after}",)
        return self._write_frames(event)

    def _write_frames(self, event: AnswerEvent) -> Iterator[str]:
        match event:
            case Delta():
                if event.prompt_logprobs:
                    self._prompts[event.choice] = event.prompt_logprobs
                opening = self.write_opening(event.choice) if event.is_first else None
                for choice in (opening, self.write_delta(event.choice, Content.of(event))):
                    if choice is not None:
                        yield self._write_chunk([choice], self._write_running_usage(event.usage))
            case Failure(error):
                yield _write_frame(error.body())
                yield _DONE
            case End(usage):
                if self._options.include_usage:
                    yield self._write_chunk([], {"usage": self._write_usage(usage)})
                yield _DONE

    def gather(self, delta: Delta) -> None:
        """Add it to its choice."""
        self._choices[delta.choice].add(delta)
        if delta.prompt_logprobs:
            self._prompts[delta.choice] = delta.prompt_logprobs

    def write_whole(self, usage: AnswerUsage) -> Json:
        """The choices in order, and the usage."""
        choices = [
            self.write_choice(index, self._choices[index]) for index in sorted(self._choices)
        ]
        head = self._head | {"object": self.whole_object}
        return head | {"choices": choices, "usage": self._write_usage(usage)} | self._warnings

    def _frame_around(self, index: int) -> tuple[str, str]:
        """What stands before and after the text in a chunk of completion `index`."""
        if index not in self._frames:
            mark = uuid.uuid4().hex
            usage = {"usage": None} if self._options.include_usage else {}
            frame = self._write_chunk([self.write_delta(index, Content(mark))], usage)
            before, _, after = frame.partition(write_line(mark))
            self._frames[index] = before, after
        return self._frames[index]

    @abstractmethod
    def write_opening(self, index: int) -> Json | None:
        """The chunk choice before the first token of completion `index`; None for none."""

    @abstractmethod
    def write_delta(self, index: int, content: Content) -> Json:
        """The chunk choice of what one event adds."""

    @abstractmethod
    def write_choice(self, index: int, content: Content) -> Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _write_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json: ...

    def _write_ending(self, index: int, content: Content) -> Json:
        """The fields that end a choice."""
        logprobs = self._write_logprobs(index, content.logprobs) if self._wants_logprobs else None
        return {"logprobs": logprobs, "finish_reason": content.finish}

    def _read_prompt(self, choice: int) -> Iterator[tuple[TokenLogprob, int]]:
        """The tokens of the prompt of `choice`, the first of its completions, and their ranks."""
        for part in self._prompts.get(choice, ()):
            yield from part.read()

    def _write_prompt(self, choice: int) -> Json:
        """Their log-probabilities as vLLM writes them, if the client wants these."""
        if self._prompt_logprobs is None:
            return {}
        entries = [self._write_ranked(*entry) for entry in self._read_prompt(choice)]
        return {"prompt_logprobs": [None, *entries]}

    def _write_ranked(self, token: TokenLogprob, rank: int) -> Json:
        top = [(*pair, place) for place, pair in enumerate(token.top[: self._prompt_logprobs], 1)]
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": place,
                "decoded_token": self._codec.token_text(token_id).text,
            }
            for token_id, logprob, place in [(token.token_id, token.logprob, rank), *top]
        }

    def _write_chunk(self, choices: list[Json], tail: Json) -> str:
        head = self._head | {"object": self.chunk_object}
        warnings, self._warnings = self._warnings, {}
        return _write_frame(head | {"choices": choices} | tail | warnings)

    def _write_running_usage(self, usage: AnswerUsage) -> Json:
        if not self._options.include_usage:
            return {}
        return {"usage": self._write_usage(usage) if self._options.continuous_usage_stats else None}

    def _write_usage(self, usage: AnswerUsage) -> Json:
        counted, details = usage.engine, self._write_details(usage)
        return {
            "prompt_tokens": counted.prompt_tokens,
            "completion_tokens": counted.completion_tokens,
            "total_tokens": counted.prompt_tokens + counted.completion_tokens,
            "prompt_tokens_details": usage.prompt_details,
            **({"completion_tokens_details": details} if details else {}),
            "kv_bytes": counted.kv_bytes,
            "kv_bytes_uncompressed": counted.kv_bytes_uncompressed,
        }

    def _write_details(self, usage: AnswerUsage) -> Json:
        """Kinds of completion tokens, as far as the server knows them."""
        details: Json = {}
        if self._marks_thoughts:
            details["reasoning_tokens"] = usage.reasoning_tokens
        if (drafted := usage.engine.drafted) is not None:
            details["accepted_prediction_tokens"] = drafted.accepted
            details["rejected_prediction_tokens"] = drafted.rejected
        return details


def _write_frame(data: Json) -> str:
    return f"data: {write_line(data)}\n\n"
