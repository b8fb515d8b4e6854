"""What vLLM is told of the cache: blocks of opaque bytes, and how many a request may take."""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Self

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from tangram.errors import IntegrityError
from tangram_vllm.slab import Slab


@dataclass(frozen=True, kw_only=True)
class SlabSpec(FullAttentionSpec):
    """The spec of each layer. A block of `block_size` tokens holds one sealed chunk, see `Slab`.

    Of `raw_ends` and `columns`, its cells in a block table, see `Slab`, too. The manager publishes
    chunks that decode filled if `publish_decoded` is set.
    """

    raw_ends: tuple[int, ...]
    columns: int
    publish_decoded: bool

    @classmethod
    def of(cls, spec: AttentionSpec, slab: Slab, layers: int, *, publish_decoded: bool) -> SlabSpec:
        """`spec` of one of so many layers, which share the bytes of `slab`.

        Blocks begin at pages, so a layer's share is rounded down.
        """
        known = {field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec)}
        item = spec.dtype.itemsize
        page_bytes = slab.layout.page_bytes(item)
        changed = {
            "num_head_slots": 1,
            "tokens_per_state": spec.block_size,
            "state_content_bytes": slab.pages * page_bytes // layers // item * item,
            "block_stride_alignment": page_bytes,
        }
        return cls(
            **known | changed,
            raw_ends=slab.raw_ends,
            columns=slab.columns,
            publish_decoded=publish_decoded,
        )

    @property
    def raw_blocks(self) -> int:
        """Blocks that hold a whole raw chunk."""
        return len(self.raw_ends) - 1

    def count_raw_blocks(self, tokens: int) -> int:
        """Blocks that hold so many raw tokens of a chunk."""
        return bisect_left(self.raw_ends, tokens)

    @property
    def kept_share(self) -> float:
        """See `Slab`."""
        head_bytes = (self.head_size + self.head_size_v) * self.dtype.itemsize
        plain_bytes: int = self.block_size * self.num_kv_heads * head_bytes
        page_bytes: int = self.page_size_bytes
        return page_bytes / plain_bytes

    @property
    def uses_slot_mapping(self) -> bool:
        """False: the backend finds pages in the block table itself."""
        return False

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """The cells of a row of the block table."""
        chunks: int = -(-max_len // self.block_size)
        return chunks * self.columns

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """A layer's bytes of the most blocks that a request holds in a step.

        A step may end one chunk, whose raw blocks it still reads, and begin another.
        """
        chunks: int = -(-vllm_config.model_config.max_model_len // self.block_size)
        raw = 0 if self.columns == 1 else 2 * self.raw_blocks
        page_bytes: int = self.page_size_bytes
        return (chunks + raw) * page_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One of the specs of a group, which must be equal; else `IntegrityError`."""
        if any(spec != specs[0] for spec in specs):
            raise IntegrityError("layers of one group have several forms of blocks")
        return copy.deepcopy(specs[0])
