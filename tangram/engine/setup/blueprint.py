"""What is known of an engine before it takes memory for pages: on one device, on a rank, drafting.

Each of the three functions at the end loads or takes a model, and finds its retentions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tangram.compress.dealing import check_ranks
from tangram.config import EngineConfig, Scope
from tangram.engine.ranks.rank_shares import RankShares, share_retentions
from tangram.engine.setup.draft_model import (
    check_vocabulary,
    draft_config,
    limit_drafts,
    readable_tokens,
)
from tangram.engine.setup.memory import cache_dtype, check_cache_device, check_scales
from tangram.engine.setup.option_checks import check_model_len
from tangram.engine.setup.profiles import Compression
from tangram.engine.setup.served import Served, find_served
from tangram.errors import ConfigError
from tangram.kernels.cpu.threads import use_threads
from tangram.model.load import LoadedModel, load_configured, load_model
from tangram.model.prepare import Stage, Wanted, prepare
from tangram.model.shares import Share
from tangram.speculative_config import DraftModel


@dataclass(frozen=True)
class Blueprint:
    """A loaded model, and the ways to keep entries of it.

    `config` names the default scorer and its scope; `scopes` are those of all scorers. Sequences
    have up to `max_tokens`. `drafting` is a second model, which drafts. `shares` are those of one
    rank of several: then the model has that rank's heads, and `served` counts page numbers of all.
    """

    config: EngineConfig
    loaded: LoadedModel
    served: Served
    scopes: Mapping[str, Scope]
    max_tokens: int
    drafting: Blueprint | None = None
    shares: RankShares | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of its pages."""
        return cache_dtype(self.config, self.loaded)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the device."""
        return self.served.retentions[0].layout.page_bytes(self.cache_dtype.itemsize)


def for_one_device(config: EngineConfig, loaded: LoadedModel) -> Blueprint:
    """The blueprint of `loaded` on one device, and of a second model if the config names one.

    Raises `ConfigError` for several devices, and the errors of `build_engine`.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but this engine is built "
            "of a loaded model, which lies on one device: set it to 1"
        )
    compression, max_tokens = _settle(config, loaded)
    drafts = compression.config.speculation
    drafting = (
        for_drafting(compression.config, drafts, loaded, max_tokens)
        if isinstance(drafts, DraftModel)
        else None
    )
    return replace(_draw(compression, loaded, max_tokens), drafting=drafting)


def for_one_rank(config: EngineConfig, rank: int) -> Blueprint:
    """That of `rank`: all ranks call it, and get the same. The default retention deals the heads.

    Raises `ConfigError` for a model that several devices do not serve.
    """
    loaded, size = load_configured(config), config.tensor_parallel_size
    compression, max_tokens = _settle(config, loaded)
    if loaded.geometry.value_dim is not None:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {config.model} has latent attention, "
            "where all heads of a layer read the same entries: set it to 1"
        )
    check_ranks(loaded.geometry.kv_heads, size)
    whole = _draw(compression, loaded, max_tokens)
    shares = share_retentions(whole.served.retentions, loaded.geometry, rank, size)
    scorers = {name: scorer.of_heads(shares.heads) for name, scorer in whole.served.scorers.items()}
    share = Share(loaded.geometry, shares.order, rank, size)
    wanted = Wanted.of(config, loaded.device, loaded.dtype)
    prepare(loaded.model, replace(wanted, share=share), Stage.SHARE)
    return replace(
        whole,
        loaded=replace(loaded, geometry=share.geometry),
        served=Served(scorers, shares.common),
        shares=shares,
    )


def for_drafting(
    config: EngineConfig, drafts: DraftModel, served: LoadedModel, max_tokens: int
) -> Blueprint:
    """That of the model that `drafts` name, beside `served` with sequences of `max_tokens`.

    Raises `ConfigError` if its tokens are others.
    """
    loaded = load_model(
        drafts.model,
        dtype=config.dtype,
        device=served.device.type,
        load_format=config.load_format,
        quantization=config.quantization,
        max_model_len=max_tokens,
    )
    check_vocabulary(
        served.name, served.tokenizer.get_vocab(), loaded.name, loaded.tokenizer.get_vocab()
    )
    if loaded.states:
        raise ConfigError(
            f"speculative_config.model is {drafts.model}, whose recurrent layers cannot go back "
            "behind a refused draft: choose a model without such layers"
        )
    tokens = readable_tokens(loaded, served.name, max_tokens)
    drafting = draft_config(config, drafts, tokens)
    return _draw(Compression.of(drafting, loaded.fingerprint), loaded, tokens)


def _settle(config: EngineConfig, loaded: LoadedModel) -> tuple[Compression, int]:
    """The scorers and profiles of a model that serves, and the most tokens of a sequence."""
    use_threads(config.threads)
    check_states(config, loaded)
    check_heads(config, loaded)
    check_cache_device(config, loaded.device)
    limit = loaded.geometry.max_positions
    check_model_len(config, limit)
    if loaded.device.type == "cuda":
        geometry = loaded.geometry
        groups = [geometry.heads_of(layer).group_size for layer in range(geometry.layers)]
        config = limit_drafts(config, max(groups))
    return Compression.of(config, loaded.fingerprint), config.max_model_len or limit


def check_states(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raise `ConfigError` if `config` asks for what models with recurrent state do not have."""
    refused = {
        "tensor_parallel_size": (config.tensor_parallel_size > 1, "set it to 1"),
        "speculation": (config.speculation is not None, "leave it out"),
        "kv_offload_dtype": (config.kv_offload_dtype != "auto", "set it to auto"),
        "kv_disk_path": (config.kv_disk_path is not None, "leave it out"),
        "compile_decode": (config.compile_decode, "leave it out"),
        "save_failed_passes": (config.save_failed_passes is not None, "leave it out"),
    }
    for name, (asked, advice) in refused.items():
        if loaded.states and asked:
            value = getattr(config, name)
            raise ConfigError(
                f"{name} is {value}, but {config.model} has recurrent layers, with which that is "
                f"not served: {advice}"
            )


def check_heads(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raise `ConfigError` if `config` asks for what pages of several head dims do not have."""
    refused = {
        "tensor_parallel_size": (config.tensor_parallel_size > 1, "set it to 1"),
        "kv_offload_dtype": (config.kv_offload_dtype != "auto", "set it to auto"),
        "save_failed_passes": (config.save_failed_passes is not None, "leave it out"),
    }
    for name, (asked, advice) in refused.items():
        if loaded.geometry.window_heads is not None and asked:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, but layers of {config.model} differ in their "
                f"heads, with which that is not served: {advice}"
            )


def _draw(compression: Compression, loaded: LoadedModel, max_tokens: int) -> Blueprint:
    served = find_served(compression, loaded, max_tokens)
    check_scales(compression.config, served.retentions)
    return Blueprint(compression.config, loaded, served, compression.scopes, max_tokens)
