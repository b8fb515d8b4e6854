"""Which recurrent states are kept. A snapshot costs as much as many chunks of KV entries.

A prompt can begin behind a cached chunk only if the state at the end of this chunk is known. The
choice decides how much is computed again, never what is answered. `bench/kept_states.py` compares
it with others over a trace of conversations.
"""

from __future__ import annotations


def keeps_snapshot(chunks: int, tokens: int, chunk_tokens: int, left: int) -> bool:
    """Whether the state behind the first `chunks` chunks of a sequence of `tokens` is kept.

    It is kept behind the last chunk that the known tokens fill, and behind the last one with which
    the same tokens could begin again. So is a state where an earlier sequence went on with other
    tokens, behind its first `left` chunks.
    """
    return chunks in (tokens // chunk_tokens, (tokens - 1) // chunk_tokens, left)
