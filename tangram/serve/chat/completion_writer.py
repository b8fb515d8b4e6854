"""Answers of POST /v1/completions: text_completion, whole and streamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec.structs import replace

from tangram.engine.text.codec import TextCodec
from tangram.serve.bodies.body import Json
from tangram.serve.chat.chunks import LOWEST_LOGPROB, ChunkWriter, Content
from tangram.serve.chat.schema import StreamOptions
from tangram.types import TokenLogprob


@dataclass(frozen=True)
class EchoedPrompt:
    """The text of a prompt that is echoed, and its first token, which has no log-probability."""

    text: str
    first_token: int


class CompletionWriter(ChunkWriter):
    """Spells completions. `echoes` has one for each prompt, or is empty where none is echoed.

    Each prompt has `n` choices. `logprobs` is the number of alternatives for each token.
    """

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        codec: TextCodec,
        head: Json,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        echoes: Sequence[EchoedPrompt] = (),
        n: int = 1,
        options: StreamOptions | None = None,
    ) -> None:
        wants = logprobs is not None
        super().__init__(
            codec, head, logprobs=wants, prompt_logprobs=prompt_logprobs, options=options
        )
        self._echoes, self._n, self._alternatives = echoes, n, logprobs
        # By choice: characters of the tokens reported so far
        self._characters = defaultdict[int, int](int)

    def write_opening(self, index: int) -> Json | None:
        """The prompt, where it is echoed."""
        if not self._echoes:
            return None
        echo = self._echoes[index // self._n]
        logprobs = self._write_echoed(index, echo)
        return {"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": None}

    def write_delta(self, index: int, content: Content) -> Json:
        """The text in `text`."""
        return {"index": index, "text": content.text, **self._write_ending(index, content)}

    def write_choice(self, index: int, content: Content) -> Json:
        """The same, after the prompt where it is echoed."""
        opening = self.write_opening(index)
        choice = self.write_delta(index, content) | self._write_prompt(index - index % self._n)
        if opening is not None:
            choice["text"] = opening["text"] + content.text
            for name, echoed in (opening["logprobs"] or {}).items():
                choice["logprobs"][name] = echoed + choice["logprobs"][name]
        return choice

    def _write_echoed(self, index: int, echo: EchoedPrompt) -> Json | None:
        """The log-probabilities of an echoed prompt, if the client wants some."""
        if self._alternatives is None:
            return None
        tokens = [TokenLogprob(echo.first_token, 0.0)]
        for token, _ in self._read_prompt(index - index % self._n):
            tokens.append(replace(token, top=token.top[: self._alternatives]))
        written = self._write_logprobs(index, tokens)
        written["token_logprobs"][0] = written["top_logprobs"][0] = None
        return written

    def _write_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        texts = [self._codec.token_text(token.token_id).text for token in logprobs]
        lengths = accumulate(map(len, texts), initial=self._characters[index])
        *offsets, self._characters[index] = lengths
        return {
            "tokens": texts,
            "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token in logprobs],
            "top_logprobs": [self._name_alternatives(token.top, token) for token in logprobs],
            "text_offset": offsets,
        }

    def _name_alternatives(
        self, top: Iterable[tuple[int, float]], sampled: TokenLogprob
    ) -> dict[str, float]:
        """The alternatives by their text; the sampled token is always among them.

        Tokens can have the same text, parts of characters above all. Then the likeliest has the
        text as its name. The others are named like "token_id:7", as vLLM's
        `return_tokens_as_token_ids` does.
        """
        named: dict[str, float] = {}
        for token_id, logprob in dict([*top, (sampled.token_id, sampled.logprob)]).items():
            text = self._codec.token_text(token_id).text
            named[f"token_id:{token_id}" if text in named else text] = max(logprob, LOWEST_LOGPROB)
        return named
