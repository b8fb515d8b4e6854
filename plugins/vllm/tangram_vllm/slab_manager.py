"""Which blocks a request holds: vLLM's manager for `SlabSpec`.

A request's list of blocks has `columns` cells a chunk: raw ones, then the sealed one. The lists of
workers only grow, so a cell that is not needed is vLLM's null block, and a raw block that is freed
becomes one in the scheduler's list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from tangram_vllm.spec import SlabSpec

_log = init_logger("vllm.tangram")


class SlabManager(FullAttentionManager):
    """Takes a sealed block for each full chunk, and raw blocks for the chunk that is open.

    Prefix hits are sealed blocks, one a chunk, as `FullAttentionManager` finds them.
    """

    supports_fine_grained_hash_lookup = False

    def __init__(self, kv_cache_spec: SlabSpec, **known: Any) -> None:
        super().__init__(kv_cache_spec, **known)
        self._form = kv_cache_spec
        # By request: the chunks whose raw blocks are freed, from the first on.
        self._freed_chunks: dict[str, int] = {}
        tokens = (self.block_pool.num_gpu_blocks - 1) * self.block_size
        _log.info(
            "Tangram: %s tokens fit into %s blocks of %s tokens as sealed chunks, %s without "
            "compression; a chunk that is open takes up to %s blocks",
            f"{tokens:,}",
            f"{self.block_pool.num_gpu_blocks - 1:,}",
            self.block_size,
            f"{int(tokens * kv_cache_spec.kept_share):,}",
            kv_cache_spec.raw_blocks,
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """See vLLM: what `allocate_new_blocks` will take, and hits that nobody holds."""
        held = self.req_to_blocks.get(request_id, ()) or self._cells_of(new_computed_blocks)
        hits: int = self._get_num_evictable_blocks(new_computed_blocks)
        return sum(self._missing_cells(held, num_tokens)) + hits

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """See vLLM: hits are sealed, so their raw cells stay empty."""
        if self.enable_caching:
            self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id].extend(self._cells_of(new_computed_blocks))
        self.num_cached_block[request_id] = len(new_computed_blocks)
        self._freed_chunks[request_id] = len(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """See vLLM: the new cells, some of which may be null."""
        cells = self.req_to_blocks[request_id]
        taken = self._missing_cells(cells, num_tokens)
        blocks = iter(self.block_pool.get_new_blocks(sum(taken)))
        new = [next(blocks) if real else self._null_block for real in taken]
        cells.extend(new)
        return new

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See vLLM: frees the raw blocks of chunks that are sealed for good."""
        cells, columns = self.req_to_blocks.get(request_id), self._form.columns
        if not cells or columns == 1:
            return
        sealed = processed_computed_tokens // self.block_size
        freed = []
        for chunk in range(self._freed_chunks.get(request_id, 0), sealed):
            for place in range(chunk * columns, (chunk + 1) * columns - 1):
                if not cells[place].is_null:
                    freed.append(cells[place])
                    cells[place] = self._null_block
        self._freed_chunks[request_id] = max(sealed, self._freed_chunks.get(request_id, 0))
        self.block_pool.free_blocks(freed)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """See vLLM: publishes sealed chunks; those that decode filled only if that is asked for."""
        limit = num_tokens
        if not self._form.publish_decoded:
            limit = min(limit, request.num_prompt_tokens)
        known, full = self.num_cached_block.get(request.request_id, 0), limit // self.block_size
        if known >= full:
            return
        columns = self._form.columns
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id][columns - 1 :: columns],
            num_cached_blocks=known,
            num_full_blocks=full,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_block[request.request_id] = full

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """See vLLM; null blocks are nobody's."""
        self._freed_chunks.pop(request_id, None)
        return [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]

    def _cells_of(self, sealed: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        empty = [self._null_block] * (self._form.columns - 1)
        return [cell for block in sealed for cell in (*empty, block)]

    def _missing_cells(self, held: Sequence[KVCacheBlock], num_tokens: int) -> list[bool]:
        """For each cell to add until `num_tokens` fit: whether it takes a block.

        A chunk that a step fills from its beginning needs no raw blocks. One that was begun before
        takes all of them: drafts may fill it and be refused.
        """
        form = self._form
        full, open_tokens = divmod(num_tokens, self.block_size)
        wanted = full * form.columns + form.count_raw_blocks(open_tokens)
        missing = []
        for place in range(len(held), wanted):
            chunk, column = divmod(place, form.columns)
            first = chunk * form.columns
            begun = first < len(held) and not held[first].is_null
            missing.append(begun or chunk == full or column == form.columns - 1)
        return missing
