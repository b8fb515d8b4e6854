"""Which chunks a replica holds, small enough to report every second.

A chunk has a key of 32 bytes (`cache/keys.py`). A digest keeps the first 8. Among a million keys a
wrong match has a chance of 1 in 10¹³, and it would cost time, never a wrong answer: the replica
compares whole keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

PREFIX_BYTES = 8


@dataclass(frozen=True)
class KeyDigest:
    """The first 8 bytes of each key in a set of chunk keys."""

    prefixes: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, keys: Iterable[bytes], limit: int) -> KeyDigest:
        """The first `limit` of `keys`, which come in the order of their worth.

        Parents come before their children. Then every chain in the digest has its beginning.
        """
        return cls(frozenset(key[:PREFIX_BYTES] for key in islice(keys, limit)))

    @classmethod
    def from_bytes(cls, data: bytes) -> KeyDigest:
        """The digest of which `data` is the `to_bytes`.

        Raises `ValueError` if `data` is no whole number of prefixes.
        """
        if len(data) % PREFIX_BYTES:
            raise ValueError(
                f"a digest has {len(data)} bytes, it must be a multiple of {PREFIX_BYTES}: "
                "pass what KeyDigest.to_bytes returned"
            )
        starts = range(0, len(data), PREFIX_BYTES)
        return cls(frozenset(data[start : start + PREFIX_BYTES] for start in starts))

    def to_bytes(self) -> bytes:
        """8 bytes a key, in no order."""
        return b"".join(self.prefixes)

    def __len__(self) -> int:
        return len(self.prefixes)

    def longest_prefix(self, chain: Sequence[bytes], coming: Container[bytes] = ()) -> int:
        """How many keys at the beginning of `chain` are here, or in `coming`, where they are cut.

        The keys of `chain` are whole or cut to 8 bytes. Who holds a chunk holds those before it, so
        that a long chain needs few comparisons.
        """

        def is_missing(index: int) -> bool:
            key = chain[index][:PREFIX_BYTES]
            return key not in self.prefixes and key not in coming

        if not chain or is_missing(0):
            return 0
        return bisect_left(range(len(chain)), True, key=is_missing)
