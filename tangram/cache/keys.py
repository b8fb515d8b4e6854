"""Prefix keys: each names the KV state of a token prefix.

A chain of keys starts from (profile fingerprint, salt). Each key is SHA-256 over its parent's key
and its own tokens. By the purity law equal keys mean equal contents, whichever sequence computed
them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tangram.cache.retention import Retention
from tangram.types import Int64


def root_key(fingerprint: str, salt: str) -> bytes:
    """The start of a chain: sequences with another profile or another salt share nothing."""
    # A salt is any string a client sends, lone surrogates included.
    text = f"{len(fingerprint)}:{fingerprint}:{salt}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def chunk_key(parent: bytes, tokens: Int64) -> bytes:
    """The key of the sealed chunk of `tokens` int64 [C] after the chain that ends in `parent`."""
    return hashlib.sha256(parent + tokens.tobytes()).digest()


def raw_key(parent: bytes, tokens: Int64) -> bytes:
    """The key of the raw page of `tokens` int64 [P] after `parent`. Never equal to a chunk's key.

    This also holds with C = P.
    """
    return hashlib.sha256(parent + tokens.tobytes() + b"raw").digest()


def window_key(chunk: bytes) -> bytes:
    """The key of the sliding-window part of a sealed chunk."""
    return hashlib.sha256(chunk + b"window").digest()


def state_key(chunk: bytes) -> bytes:
    """The key of the recurrent state behind a sealed chunk."""
    return hashlib.sha256(chunk + b"state").digest()


def list_keys(fingerprint: str, salt: str, chunk_tokens: int, tokens: Int64) -> list[bytes]:
    """The keys of the chunks of the prompt `tokens` int64 [n] that a cache may have.

    At least one token is always computed, so a chunk that ends the prompt is not among them.
    """
    keys = [root_key(fingerprint, salt)]
    _extend(keys, (len(tokens) - 1) // chunk_tokens, chunk_tokens, tokens)
    return keys[1:]


def _extend(keys: list[bytes], chunks: int, chunk_tokens: int, tokens: Int64) -> None:
    """Let `keys`, a root and the chunks known after it, go on to `chunks` chunks of `tokens`."""
    while (known := len(keys) - 1) < chunks:
        chunk = tokens[known * chunk_tokens : (known + 1) * chunk_tokens]
        keys.append(chunk_key(keys[-1], chunk))


@dataclass(eq=False)
class ChunkKeys:
    """The keys of one sequence's chunks. Each is computed once, when it is first needed."""

    retention: Retention
    salt: str
    _keys: list[bytes] = field(default_factory=list)
    _windows: dict[int, bytes] = field(default_factory=dict)

    def after(self, chunks: int, tokens: Int64) -> bytes:
        """The key of the chain of the first `chunks` chunks of the sequence.

        The sequence begins with `tokens` int64 [n]. Raises `ValueError` if these do not fill the
        chunks.
        """
        size = self.retention.layout.chunk_tokens
        if chunks * size > len(tokens):
            raise ValueError(f"{len(tokens)} tokens do not fill {chunks} chunks of {size}")
        if not self._keys:
            self._keys.append(root_key(self.retention.fingerprint, self.salt))
        _extend(self._keys, chunks, size, tokens)
        return self._keys[chunks]

    def window_after(self, chunks: int, tokens: Int64) -> bytes:
        """The key of the sliding-window part of the last of the first `chunks` chunks; see `after`.

        `tokens` is int64 [n].
        """
        if chunks not in self._windows:
            self._windows[chunks] = window_key(self.after(chunks, tokens))
        return self._windows[chunks]

    def list_known(self, chunks: int) -> tuple[bytes, ...]:
        """The keys of the first `chunks` chunks, as far as they were needed before."""
        return tuple(self._keys[1 : chunks + 1])
