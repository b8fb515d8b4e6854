"""Thoughts of bounded length: after a number of tokens only the mark that ends one may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tangram.engine.text.codec import TextCodec
from tangram.errors import RequestError
from tangram.types import Matcher, ThinkingFormat, UInt8

_WINDOW_TOKENS = 24  # more than a mark has, and the spaces around it


class ThoughtBudget:
    """`types.Matcher` of a completion of `prompt` whose thought has at most `most` tokens.

    `form` says how `codec`'s model marks thoughts: not on channels. `inner` is the matcher of the
    answer's grammar; None allows any token.
    """

    def __init__(
        self,
        codec: TextCodec,
        form: ThinkingFormat,
        prompt: Sequence[int],
        most: int,
        vocab_size: int,
        inner: Matcher | None,
    ) -> None:
        self._codec, self._form, self._inner = codec, form, inner
        self._left, self._bytes = most, -(-vocab_size // 8)
        self._thinks = self._read(prompt[-_WINDOW_TOKENS:]).rstrip().endswith(form.begin)
        self._window, self._over = deque[int](maxlen=_WINDOW_TOKENS), False
        self._forced = deque[int]()
        self.error: RequestError | None = None
        self._end_in_time()

    def mask_tokens(self) -> UInt8:
        """See `types.Matcher`."""
        if self._forced:
            mask = np.zeros(self._bytes, np.uint8)
            mask[self._forced[0] // 8] = 1 << self._forced[0] % 8
            return mask
        if self._inner is None:
            return np.full(self._bytes, 255, np.uint8)
        return self._inner.mask_tokens()

    def take(self, token: int) -> None:
        """See `types.Matcher`."""
        if self._inner is not None:
            self._inner.take(token)
            self.error = self._inner.error
        if self._forced:
            self._forced.popleft()
            self._over = not self._forced
        elif not self._over:
            self._window.append(token)
            self._note(self._read(list(self._window)))

    def _note(self, text: str) -> None:
        """Find out where the thought begins and ends; `text` is that of the last tokens."""
        if self._thinks:
            self._over = self._form.end in text
            self._left -= 1
        else:
            start = text.lstrip()
            self._thinks = start.startswith(self._form.begin)
            self._over = not self._thinks and not self._form.begin.startswith(start)
        self._end_in_time()

    def _end_in_time(self) -> None:
        if self._thinks and not self._over and self._left <= 0:
            self._forced.extend(self._codec.encode_mark(self._form.end))

    def _read(self, tokens: Sequence[int]) -> str:
        return self._codec.read_known(tokens)
