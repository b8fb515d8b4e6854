"""Answers of POST /v1/chat/completions: chat.completion and chat.completion.chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from tangram.serve.answers.answer import AnswerUsage
from tangram.serve.bodies.body import Json
from tangram.serve.chat.chunks import LOWEST_LOGPROB, ChunkWriter, Content
from tangram.types import TokenLogprob

_THOUGHT = ("reasoning_content", "reasoning")  # two names, of two kinds of clients


class ChatWriter(ChunkWriter):
    """Spells chats."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @cached_property
    def _calls_written(self) -> defaultdict[int, int]:
        return defaultdict(int)

    def write_opening(self, index: int) -> Json:
        """The role, before any text."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def write_delta(self, index: int, content: Content) -> Json:
        """Thoughts under two names, text in `content`, calls and their pieces in `tool_calls`."""
        delta: Json = {}
        if content.thought:
            delta |= dict.fromkeys(_THOUGHT, content.thought)
        if content.text:
            delta["content"] = content.text
        if content.calls:
            first = self._calls_written[index] - (content.calls[0].begun is None)
            self._calls_written[index] = first + len(content.calls)
            delta["tool_calls"] = [
                {"index": number} | call.json() for number, call in enumerate(content.calls, first)
            ]
        return {"index": index, "delta": delta, **self._write_ending(index, content)}

    def write_choice(self, index: int, content: Content) -> Json:
        """The same in `message`; `content` is null beside calls where there is no text."""
        text = content.text or None if content.calls else content.text
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if content.thought:
            message |= dict.fromkeys(_THOUGHT, content.thought)
        if content.calls:
            message["tool_calls"] = [call.json() for call in content.calls]
        return {"index": index, "message": message, **self._write_ending(index, content)}

    def write_whole(self, usage: AnswerUsage) -> Json:
        """As of every answer, and the log-probabilities of the prompt."""
        return super().write_whole(usage) | self._write_prompt(0)

    def _write_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        content = [
            self._write_entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._write_entry(*pair) for pair in token.top]}
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def _write_entry(self, token_id: int, logprob: float) -> Json:
        token = self._codec.token_text(token_id)
        return {
            "token": token.text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(token.raw),
        }
