"""One answer, generated on the caller's thread: its text, how it ends, and what it took."""

from __future__ import annotations

import signal
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from tangram.engine.text.answer_text import AnswerText, spell
from tangram.errors import TangramError
from tangram.types import Event, FinishReason, Request, SamplingParams, Usage

if TYPE_CHECKING:
    from tangram.engine.loop import Engine

# Control characters except tabs and line breaks: they could move the cursor or change colours.
_CONTROL = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n")


def escape_controls(text: str) -> str:
    """`text` with control characters escaped, safe to print to a terminal."""
    return text.translate(_CONTROL)


class Interrupts:
    """A context that notes the first Ctrl-C; the second raises `KeyboardInterrupt`.

    An interrupted engine step caches nothing. Answers are therefore stopped between two steps.
    """

    def __init__(self) -> None:
        self.noted = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            raise KeyboardInterrupt
        self.noted = True


@dataclass
class TerminalAnswer:
    """The state of one request so far. Times are values of `time.perf_counter`."""

    begin_s: float = field(default_factory=time.perf_counter)
    text: str = ""
    usage: Usage | None = None
    reason: FinishReason | None = None
    first_s: float | None = None
    last_s: float = 0.0

    def take(self, event: Event, text: str) -> None:
        """Enter an event and the text that it adds.

        Raises `TangramError` if the engine gave the request up.
        """
        if event.error is not None:
            raise TangramError(f"the engine has given up this answer: {event.error}")
        self.text += text
        self.usage, self.reason = event.usage, event.finish_reason
        if event.token_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s

    @property
    def speed(self) -> str:
        """The time to the first token, the rate of the others, and what was drafted of them."""
        if self.first_s is None or self.usage is None:
            return "no token"
        first = f"first token after {self.first_s - self.begin_s:.1f} s"
        others, seconds = self.usage.completion_tokens - 1, self.last_s - self.first_s
        if others <= 0 or seconds <= 0:
            return first
        return f"{first}, then {others / seconds:.1f} tokens/s{_describe_drafts(self.usage)}"


def _describe_drafts(usage: Usage) -> str:
    if usage.drafted is None:
        return ""
    accepted = usage.drafted.accepted
    return f" ({accepted} of {accepted + usage.drafted.rejected} drafted tokens accepted)"


def answer_prompt(
    engine: Engine,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    write: Callable[[str], None],
    *,
    kv_retention: float | None = None,
    kv_scorer: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> TerminalAnswer:
    """Answer `prompt`, and pass each piece of text to `write`. The answer ends early if `stopped`
    is true.

    Raises `RequestError` if the request can never be served, `TangramError` if the engine gives it
    up.
    """
    events, answer = deque[Event](), TerminalAnswer()
    reader = AnswerText(engine.codec, sampling, prompt)
    request = Request(
        uuid.uuid4().hex,
        prompt,
        sampling,
        events.append,
        kv_retention=kv_retention,
        kv_scorer=kv_scorer,
    )
    engine.submit(request)
    aborted = False
    while engine.busy:
        if stopped() and not aborted:
            engine.abort(request.request_id)
            aborted = True
        engine.step()
        while events:
            event = events.popleft()
            text = spell(reader.take(event))
            answer.take(event, text)
            if text:
                write(text)
    return answer


def describe_memory(usage: Usage, kv_retention: float, chunk_tokens: int) -> str:
    """The memory that an answer's pages take, compared with full KV.

    The quotient may exceed the retention ratio. Pages hold entries of several heads and tokens, and
    the last pages are not full. Below one chunk nothing is dropped yet.
    """
    held = f"KV {usage.kv_bytes / 2**20:.1f} MiB"
    if kv_retention == 1.0:
        return f"{held}, ρ 1.0 drops nothing"
    computed = usage.prompt_tokens + usage.completion_tokens - 1
    chunks, whole = divmod(computed, chunk_tokens)
    if (
        chunks and not whole and usage.completion_tokens > 1
    ):  # decode has just filled the chunk: the next step seals it
        chunks, whole = chunks - 1, chunk_tokens
    if not chunks:
        return f"{held}, nothing to compress yet (below one chunk of {chunk_tokens} tokens)"
    share = usage.kv_bytes / usage.kv_bytes_uncompressed
    beside = f"{share:.0%} of uncompressed" if share < 1 else "no less than uncompressed"
    return (
        f"{held}, {beside} (ρ "
        f"{kv_retention:g}{f', the newest {whole} tokens are whole' if whole else ''})"
    )
