"""Tangram's attention as a backend of vLLM: classes that vLLM looks up by name and calls."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from tangram.compress.profile import ModelFingerprint
from tangram.compress.scorers import Scorer
from tangram.errors import IntegrityError
from tangram.kernels.dispatch import pool_kernels
from tangram.kernels.interface import AttentionRule, KvPool
from tangram.kernels.transfer import upload
from tangram.types import Geometry
from tangram_vllm.keeping import Keeping, NewTokens, find_note_form
from tangram_vllm.options import PluginOptions
from tangram_vllm.refusals import EngineWish, LayerWish, refuse_unserved
from tangram_vllm.slab import CHUNK_TOKENS, Slab, full_geometry
from tangram_vllm.slab_step import LayerRule, SlabStep, StepBuilder
from tangram_vllm.spec import SlabSpec
from tangram_vllm.surroundings import Surrounded


class TangramBackend(AttentionBackend):
    """Attention over blocks that hold sealed chunks, see `Slab`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name that vLLM's registry has for it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TangramAttention]:
        """See vLLM."""
        return TangramAttention

    @staticmethod
    def get_builder_cls() -> type[TangramBuilder]:
        """See vLLM."""
        return TangramBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks are chunks, which are never split; `refusals` says which sizes are served."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The chunk of the profile."""
        profile = PluginOptions.read().load_profile()
        return CHUNK_TOKENS if profile is None else profile.chunk_tokens

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks outermost: the bytes of a block over all layers are one run."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec of a layer's share of a slab."""
        options = PluginOptions.read()
        profile = options.load_profile()
        layers = 1 if profile is None else profile.model.layers
        heads = spec.num_kv_heads
        geometry = full_geometry(layers, heads, heads, spec.head_size)
        notes = find_note_form(profile, spec.dtype.itemsize)
        slab = Slab.lay_out(geometry, profile, spec.block_size, spec.block_size, notes)
        return SlabSpec.of(spec, slab, layers, publish_decoded=options.publish_decoded)


class TangramAttention(Surrounded, AttentionImpl[SlabStep]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        """Raises `ConfigError` for what is not served, `ProfileError` for another profile."""
        layer = LayerWish(
            sliding_window,
            alibi_slopes is not None,
            attn_type,
            kv_sharing_target_layer_name is not None,
            tuple(sorted(name for name, value in others.items() if value is not None)),
        )
        config, options = get_current_vllm_config(), PluginOptions.read()
        profile = options.load_profile()
        refuse_unserved(EngineWish(config, layer, profile, options.untested_vllm))
        if profile is not None:
            profile.check_model(_fingerprint(config))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self._known = LayerRule(AttentionRule(scale, None, logits_soft_cap or None, sinks))
        self._reads_hidden = False

    def prepare(self, wish: EngineWish, scorer: Scorer) -> None:
        """Look around for what `scorer` needs; the model is complete.

        Raises `ConfigError` if it cannot be seen.
        """
        around = self.surroundings
        rotary = None if around is None else around.find_rotary()
        layer = LayerWish(
            rotates_halves=rotary is not None, has_hidden=around is not None and around.has_hidden
        )
        refuse_unserved(replace(wish, layer=layer))
        if "rotary" in scorer.needs:
            self._known = self._known._replace(rotary=rotary)
        if "hidden" in scorer.needs and around is not None and not self._reads_hidden:
            self._reads_hidden = True
            around.watch()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TangramMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See vLLM: query [T, Q, D], key and value [T, H, D] → output [T, Q, D]."""
        if attn_metadata is not None:
            number = attn_metadata.layers[layer.layer_name]
            new = NewTokens(query, key, value, self._take_hidden())
            attn_metadata.step.attend(number, new, output, self._known)
        return output

    def _take_hidden(self) -> Tensor | None:
        if self.surroundings is None or not self._reads_hidden:
            return None
        return self.surroundings.take_hidden()


class TangramMetadata(NamedTuple):
    """A step, and the numbers of layers by vLLM's names for them."""

    step: SlabStep
    layers: dict[str, int]


class TangramBuilder(AttentionMetadataBuilder[TangramMetadata]):
    """Makes a step of what vLLM schedules."""

    reorder_batch_threshold = 1

    def __init__(
        self,
        kv_cache_spec: SlabSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._numbers = {name: number for number, name in enumerate(layer_names)}
        options = PluginOptions.read()
        self._profile = options.load_profile()
        self._keeping = None
        if self._profile is not None:
            self._keeping = Keeping.of(self._profile, options.gate)
            wish = EngineWish(vllm_config, LayerWish(), self._profile, options.untested_vllm)
            for layer in self._layers.values():
                layer.impl.prepare(wish, self._keeping.scorer)
        # Compiles, before the first request, what its step would compile.
        like = torch.zeros(1, 1, 2, 16, 16, dtype=kv_cache_spec.dtype, device=device)
        pool_kernels(KvPool(like, 1, 1, 1))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TangramMetadata:
        """See vLLM."""
        return self._build(common_attn_metadata)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TangramMetadata:
        """See vLLM: a step in which every row decodes a token."""
        return self._build(common_attn_metadata, reserves=True)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """See vLLM: graphs of whole decode steps, whose rows share nothing.

        A scorer that reads more than entries is asked within a step, which no graph can do.
        """
        options = PluginOptions.read()
        profile = options.load_profile()
        reads = profile is None or Keeping.of(profile, options.gate).reads_entries
        if reads and vllm_config.scheduler_config.async_scheduling:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def _build(self, common: CommonAttentionMetadata, *, reserves: bool = False) -> TangramMetadata:
        first = common.query_start_loc_cpu.numpy()
        # Exact: only where drafts are verified before the host knows which were refused is it not.
        end = common.seq_lens_cpu_upper_bound.numpy()
        begin = end - (first[1:] - first[:-1])
        rows = np.flatnonzero(end > begin)
        cells = common.block_table_tensor
        if len(rows) < len(cells):
            cells = cells[upload(rows, cells.device)]
        spans = begin[rows].tolist(), end[rows].tolist()
        step = self._steps.build(cells, *spans, padded=common.num_reqs, reserves=reserves)
        return TangramMetadata(step, self._numbers)

    @cached_property
    def _steps(self) -> StepBuilder:
        """Made at the first step, when the cache is there."""
        config, geometry = self.vllm_config, self._geometry
        longest = config.model_config.max_model_len
        notes = find_note_form(self._profile, self.kv_cache_spec.dtype.itemsize)
        slab = Slab.lay_out(geometry, self._profile, self.kv_cache_spec.block_size, longest, notes)
        pool = self._view_pool(slab)
        return StepBuilder(
            slab,
            pool,
            pool_kernels(pool),
            self._keeping,
            most_rows=config.scheduler_config.max_num_seqs,
            most_queries=self.reorder_batch_threshold or 1,
            shares=not config.scheduler_config.async_scheduling,
        )

    @cached_property
    def _layers(self) -> dict[str, Attention]:
        return dict(get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names))

    @cached_property
    def _geometry(self) -> Geometry:
        layer = self._layers[self.layer_names[0]]
        heads = layer.num_kv_heads, layer.num_heads
        return full_geometry(len(self.layer_names), *heads, layer.head_size)

    def _view_pool(self, slab: Slab) -> KvPool:
        """The bytes of vLLM's cache as the pool of Tangram's kernels."""
        layout, geometry = slab.layout, self._geometry
        cache: Tensor = self._layers[self.layer_names[0]].kv_cache
        shape = layout.heads_per_page, 2, layout.page_tokens, geometry.head_dim
        apart = torch.Size(shape).numel() * slab.pages
        if cache.stride(0) != apart or cache.storage_offset():
            raise IntegrityError(
                f"blocks lie {cache.stride(0)} elements apart from {cache.storage_offset()} on, "
                f"they must lie {apart} apart from 0 on"
            )
        whole = cache.as_strided((cache.shape[0] * apart,), (1,))
        pool = whole.view(-1, *shape)
        return KvPool(pool, geometry.group_size, geometry.layers, geometry.kv_heads)


def _fingerprint(config: VllmConfig) -> ModelFingerprint:
    """What vLLM knows of its model; it does not know the digest of its weights."""
    model, parallel = config.model_config, config.parallel_config
    return ModelFingerprint(
        name=model.model,
        architecture=model.hf_text_config.model_type,
        layers=model.get_num_layers(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        query_heads=model.get_num_attention_heads(parallel),
        head_dim=model.get_head_size(),
        vocab_size=model.get_vocab_size(),
    )
