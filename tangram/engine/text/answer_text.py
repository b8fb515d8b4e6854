"""The text of answers, token by token, and the stop strings that end them.

A stream decodes a short window of tokens again at each step: the last group that gave text and the
tokens after it. Only in context are the spaces right and the characters whole that span tokens (as
in text-generation-inference). `tokenizers.decoders.DecodeStream` works alike. But it raises on
invalid UTF-8 from byte-fallback vocabularies, and cannot return its remaining text when a
completion ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Protocol

from tangram.types import Event, FinishReason, Mark, Marks, Piece, SamplingParams

_REPLACEMENT = "\ufffd"  # decoders' replacement for bytes that are not (yet) a character
_MAX_PENDING = 3  # a character has at most 4 bytes, so at most 3 replacements may still become one
_PROMPT_TAIL_TOKENS = (
    8  # enough of the prompt to decide on the first space and to finish a character
)
_MAX_WINDOW_TOKENS = 32
_NONE = Marks()


class Decoder(Protocol):
    """The part of `tangram.engine.text.codec.TextCodec` that makes text of tokens."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """The tokens that are no text."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out."""

    def verbatim(self, token_ids: Sequence[int], field: str) -> str:
        """The text of `token_ids`, special tokens by name."""


class TextStream:
    """One answer as its tokens arrive, cut before the first stop string, which is then `found`.

    Its text contains whole characters only. All pieces add up to `codec.decode` of the tokens as it
    reads after `prompt_token_ids` (a leading space stays). Known difference: where a byte-fallback
    vocabulary yields invalid UTF-8, characters sent before stay. Of special tokens only `marks` are
    in it; stop strings are not searched across one. With `skip_special` false the others are text
    too, by name. Each token costs a bounded amount of work.
    """

    def __init__(
        self,
        codec: Decoder,
        *,
        stop: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        marks: Marks = _NONE,
        skip_special: bool = True,
    ) -> None:
        self._codec, self._skip_special = codec, skip_special
        self._detokenizer = _Detokenizer(codec, prompt_token_ids[-_PROMPT_TAIL_TOKENS:])
        self._stop = _StopStrings(stop)
        self._marks, self._in_head = marks, False
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self.found is not None

    def push(self, token_ids: Sequence[int]) -> list[Piece]:
        """What is certain with these tokens too. Push nothing more once it has `stopped`."""
        if self._marks.names.keys().isdisjoint(token_ids):
            text = self._search(self._read(token_ids))
            return [text] if text else []
        pieces: list[Piece] = []
        for marked, run in groupby(token_ids, self._marks.names.__contains__):
            tokens = list(run)
            text = self._detokenizer.flush() if marked else self._read(tokens)
            pieces.append(self._search(text))
            if self.stopped:
                break
            if marked:
                pieces.append(self._stop.flush())
                pieces += [Mark(self._marks.names[token]) for token in tokens]
                self._in_head = tokens[-1] in self._marks.heads
        return [piece for piece in pieces if piece]

    def _read(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that are no marks."""
        special = () if self._skip_special else self._codec.special_token_ids
        if not special or not any(token in special for token in token_ids):
            return self._detokenizer.push(token_ids)
        return "".join(
            self._detokenizer.flush() + self._codec.verbatim([token], "skip_special_tokens")
            if token in special
            else self._detokenizer.push([token])
            for token in token_ids
        )

    def _search(self, text: str) -> str:
        """`text` as far as no stop string may begin in it."""
        if self._in_head:
            return text
        text, self.found = self._stop.push(text)
        return text

    def finish(self) -> list[Piece]:
        """The text still held back, if the answer ends for another reason than a stop string."""
        if self.stopped:
            return []
        text = self._search(self._detokenizer.flush()) + self._stop.flush()
        return [text] if text else []


class AnswerText:
    """What the events of one completion say, whose request has `sampling` and `marks`."""

    def __init__(
        self,
        codec: Decoder,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        marks: Marks = _NONE,
    ) -> None:
        self._ends = end_tokens(codec, sampling)
        self._stream = TextStream(
            codec,
            stop=sampling.stop,
            prompt_token_ids=prompt_token_ids,
            marks=marks,
            skip_special=sampling.skip_special_tokens,
        )

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the completion, if one has."""
        return self._stream.found

    def take(self, event: Event) -> list[Piece]:
        """What is certain with `event`, the next one of the completion."""
        tokens, reason = event.token_ids, event.finish_reason
        if reason is None:
            return self._stream.push(tokens)
        if reason is FinishReason.STOP and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        pieces = self._stream.push(tokens)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            pieces += self._stream.finish()
        return pieces


def end_tokens(codec: Decoder, sampling: SamplingParams) -> frozenset[int]:
    """The tokens that end an answer, and are no part of its text."""
    stated = frozenset(sampling.stop_token_ids)
    return stated if sampling.ignore_eos else stated | codec.eos_token_ids


def spell(pieces: Iterable[Piece]) -> str:
    """The pieces as one text, marks by their names."""
    return "".join([piece.name if isinstance(piece, Mark) else piece for piece in pieces])


def read_text(
    codec: Decoder,
    sampling: SamplingParams,
    prompt_token_ids: Sequence[int],
    events: Iterable[Event],
) -> str:
    """The text of a completion of which `events` are all."""
    answer = AnswerText(codec, sampling, prompt_token_ids)
    return spell(piece for event in events for piece in answer.take(event))


class _Detokenizer:
    """`_ids` is the window, of whose text `_sent` characters are sent.

    `_group` is where its newest tokens begin.
    """

    def __init__(self, codec: Decoder, context: Sequence[int]) -> None:
        self._codec, self._special = codec, codec.special_token_ids
        self._ids = list(context)
        self._group = len(self._ids)
        self._text = codec.decode(self._ids)
        self._sent = _certain(self._text)

    def push(self, token_ids: Sequence[int]) -> str:
        # As context a special token would hide that a text precedes.
        plain = [token for token in token_ids if token not in self._special]
        if not plain:
            return ""
        self._ids += plain
        self._text = text = self._codec.decode(self._ids)
        full = len(self._ids) > _MAX_WINDOW_TOKENS
        certain = max(_certain(text), len(text) - _MAX_PENDING) if full else _certain(text)
        delta = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if delta and certain == len(text):
            self._slide(self._group)
        elif full:
            self._slide(_MAX_WINDOW_TOKENS // 2)
        return delta

    def flush(self) -> str:
        delta = self._text[self._sent :]
        self._sent = len(self._text)
        return delta

    def _slide(self, tokens: int) -> None:
        """Forget the oldest tokens of the window.

        The number of unsent characters does not change.
        """
        unsent = max(0, len(self._text) - self._sent)
        self._ids = self._ids[tokens:]
        self._group = len(self._ids)
        self._text = self._codec.decode(self._ids)
        self._sent = max(0, len(self._text) - unsent)


class _StopStrings:
    """Holds back text that may be the beginning of a stop string until that is decided."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What is certain, and the first stop string."""
        if not self._stop:
            return text, None
        text = self._held + text
        starts = [(start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if starts:
            self._held = ""
            start, found = min(starts)
            return text[:start], found
        certain = len(text) - self._measure_undecided(text)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _measure_undecided(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next(
            (n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0
        )


def _certain(text: str) -> int:
    """The length of `text` without the replacement characters at its end.

    The next tokens may change these.
    """
    return len(text.rstrip(_REPLACEMENT))
