"""Answers of POST /v1/completions: text_completion, whole and streamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from tangram.engine.text.codec import TextCodec
from tangram.serve.body import Json
from tangram.serve.chunks import LOWEST_LOGPROB, ChunkWriter, Content
from tangram.serve.schema import StreamOptions
from tangram.types import TokenLogprob


class CompletionWriter(ChunkWriter):
    """Spells completions. `echoes` has the text of each prompt, empty where none is echoed.

    Each prompt has `n` choices.
    """

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        codec: TextCodec,
        head: Json,
        *,
        logprobs: bool,
        echoes: Sequence[str] = (),
        n: int = 1,
        options: StreamOptions | None = None,
    ) -> None:
        super().__init__(codec, head, logprobs=logprobs, options=options)
        self._echoes, self._n = echoes, n
        # By choice: characters of the tokens reported so far
        self._characters = defaultdict[int, int](int)

    def write_opening(self, index: int) -> Json | None:
        """The prompt, where it is echoed."""
        text = self._find_echo(index)
        if not text:
            return None
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def write_delta(self, index: int, content: Content) -> Json:
        """The text in `text`."""
        return {"index": index, "text": content.text, **self._write_ending(index, content)}

    def write_choice(self, index: int, content: Content) -> Json:
        """The same, after the prompt where it is echoed."""
        text = self._find_echo(index) + content.text
        return {"index": index, "text": text, **self._write_ending(index, content)}

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

    def _find_echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

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
