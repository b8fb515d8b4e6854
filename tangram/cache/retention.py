"""How a sequence keeps its KV entries, as the host knows it."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.cache.layout import Layout
from tangram.types import HeadScales, Int32


@dataclass(frozen=True, eq=False)
class Retention:
    """One way to keep KV entries: the retention ratio ρ, and where the entries lie.

    Each sequence, and each row of its steps, carries one. It is compared by identity. Prefix keys
    begin with `fingerprint`. `scorer` is the name of what scores chunks when they are sealed, None
    if nothing does. Scored chunks keep the first `sink_tokens` of the sequence and the last
    `window_tokens` of the chunk whatever their scores.
    With `one_chunk_a_step` a step takes at most one chunk of a sequence. With `draft` a sealed
    chunk keeps all its entries, the best in its first pages: draft passes read only these, as
    `draft` says. `scales` are the profile's for a pool
    of 8 bits; it takes the largest of all its retentions.
    """

    kv_retention: float
    layout: Layout
    fingerprint: str
    scorer: str | None = None
    sink_tokens: int = 0
    window_tokens: int = 0
    one_chunk_a_step: bool = False
    draft: Retention | None = None
    scales: HeadScales | None = None

    @property
    def orders(self) -> bool:
        """Whether sealing moves entries: it drops some, or stores the best first."""
        return self.draft is not None or not self.layout.keeps_everything

    @property
    def keeps_whole_chunks(self) -> bool:
        """Whether a sealed chunk has as many pages as the raw one, and nothing leaves it.

        A window's chunks leave it, so they do not count.
        """
        return self.layout.keeps_everything and not self.layout.window_chunks

    @property
    def head_first_tokens(self) -> Int32:
        """[L, H]: how many of a sealed chunk's entries a head stores in the order of scores."""
        return (self if self.draft is None else self.draft).layout.head_kept_tokens
