"""KV events as vLLM 0.24 writes them, encoded with msgspec.

A batch is an array, its events are maps that have their name under `type`. Fields and their order
are vLLM's.
"""

from __future__ import annotations

import msgspec

GPU, CPU = "GPU", "CPU"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks have come to `medium`, after the block `parent_block_hash`.

    `token_ids` are those of all blocks, `block_size` to each. Where blocks that are known are only
    copied to another medium, `token_ids` is empty.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are gone from `medium`."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing is cached."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that became known together, at `ts` seconds since 1970."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def hash_of(key: bytes) -> int:
    """The hash of a block, by its chunk's key: the last 8 bytes, as vLLM cuts its own."""
    return int.from_bytes(key[-8:], "big")
