"""One completion and its chunks in detail."""

from __future__ import annotations

import codecs
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tangram.engine.text.codec import TextCodec
from tangram.serve.bodies.body import Json
from tangram.serve.observability.reuse import describe_loss
from tangram.serve.transport.api_errors import ApiError
from tangram.watch import ChunkPlace, ChunkUse, KeptPositions, RetentionShape, Watched
from tangram.web.requests import ShownCompletion

MOST_BYTES = 4  # of a character in UTF-8, each of which may be a token


class Details:
    """Describes completions of the engine that `watched` answers for, in the words of `codec`."""

    def __init__(self, watched: Watched, codec: TextCodec, begin_s: float) -> None:
        self._watched, self._codec, self._begin_s = watched, codec, begin_s
        self._text: Any = lru_cache(maxsize=1 << 16)(codec.token_text)

    def describe(self, shown: ShownCompletion, tokens_from: int) -> Json:
        """All of a completion, with its tokens from `tokens_from` on."""
        reading, usage = shown.reading, shown.reading.usage
        admitted = reading.admitted_s is not None
        tokens = reading.tokens.tolist()
        prompt = tokens[: usage.prompt_tokens]
        return {
            "id": shown.announcement.answer_id,
            "request_id": shown.announcement.request_id,
            "index": shown.choice,
            "state": shown.state.value,
            "conversation": shown.conversation,
            "kv_retention": reading.kv_retention,
            "scorer": reading.scorer,
            "tokens": list(self._spell(tokens, tokens_from)),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "reuse": describe_loss(reading.lost, prompt, self._codec),
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens if admitted else 0,
            "output_tokens": usage.completion_tokens,
            "sealed_chunks": reading.sealed_chunks,
            "chunks": self._describe_chunks(shown),
            "raw": {
                "begin": reading.sealed_chunks * reading.chunk_tokens,
                "end": reading.computed_tokens,
            },
            "kv_bytes": usage.kv_bytes,
            "kv_bytes_uncompressed": usage.kv_bytes_uncompressed,
            "drafted": None
            if usage.drafted is None
            else {"accepted": usage.drafted.accepted, "rejected": usage.drafted.rejected},
            "times": {
                "queued": self._since_begin(shown.announcement.queued_s),
                "admitted": self._since_begin(reading.admitted_s),
                "first_token": self._since_begin(shown.first_token_s),
                "ended": self._since_begin(shown.ended_s),
            },
        }

    def describe_kept(self, shown: ShownCompletion, chunk: int) -> Json:
        """Which entries each head kept of sealed chunk `chunk`.

        Raises `ApiError` 404 if the chunk is not sealed or nothing is known of it.
        """
        reading, shape = shown.reading, self._watched.shape
        if not 0 <= chunk < reading.sealed_chunks:
            raise ApiError(
                404,
                f"chunk is {chunk}, the request has {reading.sealed_chunks} sealed chunks: choose "
                "one of them, counted from 0",
                param="chunk",
                code="no_such_chunk",
            )
        kept = self._find_kept(shown, chunk)
        everything = self._keeps_everything(shown)
        if kept is None and not everything:
            raise ApiError(
                404,
                f"the kept positions of chunk {chunk} are not recorded, or were forgotten since",
                param="chunk",
                code="not_recorded",
            )
        size = shape.layers, shape.kv_heads, reading.chunk_tokens
        whole = np.packbits(np.ones(size, np.bool_), bitorder="little")
        return {
            "chunk": chunk,
            "begin": chunk * reading.chunk_tokens,
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "tokens": reading.chunk_tokens,
            "bits": encode(whole if everything or kept is None else kept.bits),
            "draft_bits": encode(kept.bits) if everything and kept is not None else None,
        }

    def _describe_chunks(self, shown: ShownCompletion) -> list[Json]:
        reading, everything = shown.reading, self._keeps_everything(shown)
        sealed = range(reading.sealed_chunks)
        noted = [self._find_kept(shown, chunk) is not None for chunk in sealed]
        return [
            {
                "index": chunk,
                "begin": chunk * reading.chunk_tokens,
                "end": (chunk + 1) * reading.chunk_tokens,
                "recorded": everything or noted[chunk],
                "drafts_recorded": everything and noted[chunk],
                "shared_by": use.users,
                "in": use.place.value,
            }
            for chunk, use in enumerate(self._uses(shown))
        ]

    def _uses(self, shown: ShownCompletion) -> list[ChunkUse]:
        """Where each sealed chunk is. What only its sequence knows is where that is."""
        reading = shown.reading
        known = ChunkUse(ChunkPlace.DEVICE, 1) if shown.running else ChunkUse(ChunkPlace.GONE, 0)
        found = [
            known if use.place is ChunkPlace.GONE else use
            for use in self._watched.uses(reading.chunk_keys)
        ]
        return found + [known] * (reading.sealed_chunks - len(found))

    def _find_kept(self, shown: ShownCompletion, chunk: int) -> KeptPositions | None:
        keys = shown.reading.chunk_keys
        return self._watched.find_kept(keys[chunk]) if chunk < len(keys) else None

    def _keeps_everything(self, shown: ShownCompletion) -> bool:
        return keeps_everything(self._retention(shown), shown.reading.chunk_tokens)

    def _retention(self, shown: ShownCompletion) -> RetentionShape:
        wanted, shapes = shown.reading, self._watched.shape.retentions
        return next(
            shape
            for shape in shapes
            if (shape.kv_retention, shape.scorer) == (wanted.kv_retention, wanted.scorer)
        )

    def _spell(self, tokens: Sequence[int], begin: int) -> Iterator[Json]:
        """Tokens from `begin` on. A character of several tokens stands at the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = max(0, begin - MOST_BYTES)
        for at, token in enumerate(tokens[first:], first):
            text = decoder.decode(self._text(token).raw)
            if at >= begin:
                yield {"id": token, "text": text}

    def _since_begin(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else round(moment_s - self._begin_s, 6)


def keeps_everything(shape: RetentionShape, chunk_tokens: int) -> bool:
    """Whether sealing drops nothing."""
    return bool((shape.budgets == chunk_tokens).all())


def encode(array: npt.NDArray[Any]) -> str:
    """The bytes of `array`, little-endian, in base64."""
    return b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
