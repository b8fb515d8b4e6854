"""Events as the JSON of the OpenAI API: whole answers and stream chunks, for chat and for
completions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from tangram.errors import RequestError
from tangram.serve.bridge import Codec, Job
from tangram.types import Event, FinishReason, TokenLogprob, Usage

Json = dict[str, Any]

# JSON has no -inf; OpenAI's API and vLLM write this instead.
LOWEST_LOGPROB = -9999.0
# Each takes up to 1.5 KB until a whole answer is written, as objects and as JSON: together 256 MiB.
MAX_WHOLE_LOGPROBS = 175_000


def refuse_huge(job: Job, max_model_len: int) -> None:
    """Raise `RequestError` (`logprobs`) if the whole answer to `job` could have more than
    `MAX_WHOLE_LOGPROBS`.

    Of what is sampled and of each alternative there is one. Without `max_tokens` an answer may fill
    the context.
    """
    alternatives = job.sampling.logprobs
    if job.stream or alternatives is None:
        return
    limit = max_model_len if job.sampling.max_tokens is None else job.sampling.max_tokens
    tokens = job.sampling.n * sum(
        max(0, min(limit, max_model_len - len(prompt))) for prompt in job.prompts
    )
    asked = tokens * (alternatives + 1)
    if asked > MAX_WHOLE_LOGPROBS:
        # A file of requests, whose jobs have no record, cannot stream.
        way_out = "" if job.record is None else ", or stream the answer"
        raise RequestError(
            f"logprobs asks for up to {asked} log-probabilities ({job.choices} choices, together "
            f"of {tokens} tokens, {alternatives} alternatives beside each), an answer in one piece "
            f"has at most {MAX_WHOLE_LOGPROBS}: ask for fewer choices, tokens or "
            f"alternatives{way_out}",
            "logprobs",
        )


@dataclass
class Choice:
    """One completion as far as it has come."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Append an event of this completion."""
        self.text += event.text
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason


def usage_json(usages: Sequence[Usage], n: int, reasoning_tokens: int | None = None) -> Json:
    """The usage of a whole request, from that of its choices in order.

    A prompt counts once however many completions it has; completion tokens and KV bytes count for
    each. `reasoning_tokens` are those of thoughts, None where they cannot be told.
    """
    prompts = usages[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    thoughts = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        **({} if reasoning_tokens is None else thoughts),
        "kv_bytes": sum(usage.kv_bytes for usage in usages),
        "kv_bytes_uncompressed": sum(usage.kv_bytes_uncompressed for usage in usages),
    }


class Format(ABC):
    """How one endpoint spells the answer to one request. `logprobs` says whether the client asked
    for them.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, codec: Codec, *, logprobs: bool) -> None:
        self._codec, self._wants_logprobs = codec, logprobs

    def choice(self, index: int) -> Choice:
        """Where completion `index` is gathered for a whole answer."""
        return Choice()

    def reasoning_tokens(self, indexes: Iterable[int]) -> int | None:
        """How many tokens of these completions were thoughts; None where that cannot be told."""
        return None

    def opening(self, index: int) -> list[Json]:
        """The chunk choices that come before the first token of completion `index`."""
        return []

    @abstractmethod
    def delta(self, index: int, event: Event) -> Json:
        """The chunk choice of one event."""

    @abstractmethod
    def whole(self, index: int, choice: Choice) -> Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json: ...

    def _end(self, index: int, part: Event | Choice) -> Json:
        return {
            "logprobs": self._logprobs(index, part.logprobs) if self._wants_logprobs else None,
            "finish_reason": None if part.finish_reason is None else part.finish_reason.value,
        }


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[Json]:
        """The role, before any text."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, event: Event) -> Json:
        """The text goes into `delta.content`."""
        delta = {"content": event.text} if event.text else {}
        return {"index": index, "delta": delta, **self._end(index, event)}

    def whole(self, index: int, choice: Choice) -> Json:
        """The text goes into `message.content`."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, **self._end(index, choice)}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in token.top]}
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        token = self._codec.token_text(token_id)
        return {
            "token": token.text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(token.raw),
        }


class CompletionFormat(Format):
    """text_completion, whole and streamed."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, codec: Codec, *, logprobs: bool, echoes: Sequence[str] = (), n: int = 1
    ) -> None:
        """`echoes` are texts to begin with, one for each prompt, of which each has `n` choices;
        none for no echo.
        """
        super().__init__(codec, logprobs=logprobs)
        self._echoes, self._n = echoes, n
        # By choice: characters of the tokens reported so far
        self._chars: defaultdict[int, int] = defaultdict(int)

    def opening(self, index: int) -> list[Json]:
        """The prompt, where it is to be echoed."""
        text = self._echo(index)
        return (
            [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]
            if text
            else []
        )

    def delta(self, index: int, event: Event) -> Json:
        """The text goes into `text`."""
        return {"index": index, "text": event.text, **self._end(index, event)}

    def whole(self, index: int, choice: Choice) -> Json:
        """The text goes into `text`."""
        return {"index": index, "text": self._echo(index) + choice.text, **self._end(index, choice)}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        texts = [self._codec.token_text(token.token_id).text for token in logprobs]
        *offsets, self._chars[index] = accumulate(map(len, texts), initial=self._chars[index])
        return {
            "tokens": texts,
            "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token in logprobs],
            "top_logprobs": [self._by_text(token.top, token) for token in logprobs],
            "text_offset": offsets,
        }

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def _by_text(self, top: Iterable[tuple[int, float]], sampled: TokenLogprob) -> dict[str, float]:
        """The alternatives by their text, with the sampled token always among them.

        Of tokens with the same text, parts of characters above all, the likeliest goes by it, and
        the others as "token_id:7": the name that vLLM's `return_tokens_as_token_ids` gives them.
        """
        named: dict[str, float] = {}
        for token_id, logprob in dict([*top, (sampled.token_id, sampled.logprob)]).items():
            text = self._codec.token_text(token_id).text
            named[f"token_id:{token_id}" if text in named else text] = max(logprob, LOWEST_LOGPROB)
        return named
