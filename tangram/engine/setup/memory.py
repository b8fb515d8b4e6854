"""The memory for KV pages: a run of the largest step measures what the model needs besides."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.kernels.interface import MOST_BYTES
from tangram.kernels.narrow import NARROW
from tangram.kernels.offload.host_forms import HOST_FORMS, HostForm
from tangram.kernels.offload.host_memory import STAGING_BYTES
from tangram.model.latent import latent_heads, output_like
from tangram.model.load import LoadedModel, memory_ran_out
from tangram.model.recurrent import JOINED_TOKENS, PassStates, continue_row

GIB = 1 << 30
_DEFAULT_CPU_BYTES = 4 * GIB
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MOST_ENTRIES = (1 << 31) - 1  # of all block tables: kernels address them by int32
GRAPH_BYTES = GIB  # captured graphs, plans, sampling and what the allocator cannot use


class _NoAttention:
    """Replaces a step's attention."""

    decodes_only = False

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Zeros, as large as the output of attention."""
        return output_like(module, q).zero_()


def cache_dtype(config: EngineConfig, loaded: LoadedModel) -> torch.dtype:
    """The dtype of the KV cache."""
    return NARROW.get(config.kv_cache_dtype, loaded.dtype)


def check_cache_device(config: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if `device` does not serve the configured KV cache."""
    if config.kv_cache_dtype == "int8" and device.type != "cpu":
        raise ConfigError(
            f"kv_cache_dtype is int8, for which {device.type} has no kernels: use fp8, which has "
            "as many bits"
        )
    if config.kv_disk_path is not None and device.type != "cpu":
        raise ConfigError(
            f"kv_disk_path is {config.kv_disk_path}, but the KV entries of {device.type} are not "
            "written to disk: leave kv_disk_path and kv_disk_gib out"
        )


def check_scales(config: EngineConfig, retentions: Sequence[Retention]) -> None:
    """Raise `ConfigError` if the KV cache needs scales and none of `retentions` has them."""
    if config.kv_cache_dtype != "int8" or any(entry.scales is not None for entry in retentions):
        return
    if not retentions[0].layout.geometry.takes_scales:
        raise ConfigError(
            f"kv_cache_dtype is int8, but {config.model} has latent attention or heads of several "
            "dimensions, for which profiles have no scales: use fp8"
        )
    raise ConfigError(
        "kv_cache_dtype is int8, but no profile gives the scales, without which most entries would "
        "be rounded to 0: give --profile a file that `tangram calibrate` has made, or use fp8"
    )


def host_form(config: EngineConfig) -> HostForm | None:
    """The form of entries in host memory; None leaves them as they are."""
    return None if config.kv_offload_dtype == "auto" else HOST_FORMS[config.kv_offload_dtype]


def host_page_bytes(config: EngineConfig, loaded: LoadedModel, layout: Layout) -> int:
    """Bytes of a page of `layout` in host memory."""
    form = host_form(config)
    if form is None:
        return layout.page_bytes(cache_dtype(config, loaded).itemsize)
    geometry = layout.geometry
    return form.page_bytes(geometry.entry_vectors * layout.page_slots, geometry.head_dim)


def table_bytes(config: EngineConfig, layouts: Sequence[Layout]) -> int:
    """Bytes of the block tables on the pool's device.

    Raises `ConfigError` if they have more entries than kernels can address.
    """
    entries = config.max_num_seqs * max(int(layout.group_offset[-1]) for layout in layouts)
    if entries > _MOST_ENTRIES:
        raise ConfigError(
            f"max_num_seqs is {config.max_num_seqs} and a sequence may have "
            f"{layouts[0].max_tokens} tokens: block tables would have {entries} entries, at most "
            f"{_MOST_ENTRIES} can be addressed: lower max_num_seqs or max_model_len"
        )
    return entries * np.dtype(np.int32).itemsize


def kv_bytes(config: EngineConfig, loaded: LoadedModel, beside: int = 0) -> int:
    """Bytes for KV pages: the configured size, or a share of the GPU's or of the host's memory.

    These are bytes of a rank. The default on a host is 4 GiB for all ranks together, and at most a
    quarter of its memory. A GPU's share also holds
    `beside` bytes, besides the model, its steps and the pages. Raises `ConfigError` if the share
    leaves nothing for pages, or if a host has less memory.
    """
    ranks = config.tensor_parallel_size
    if config.kv_cache_gib is not None:
        check_host_memory(config, loaded.device)
        return int(config.kv_cache_gib * GIB)
    if loaded.device.type != "cuda":
        return min(_DEFAULT_CPU_BYTES, _host_bytes() // 4) // ranks
    needed = (
        _activation_bytes(config, loaded)
        + _count_gathered_bytes(config, loaded)
        + _count_expanded_bytes(config, loaded)
        + GRAPH_BYTES
        + beside
    )
    needed += STAGING_BYTES if config.kv_offload_gib else 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(loaded.device)
    left = int(total * config.gpu_memory_utilization) - (total - free) - needed
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization} of {total / GIB:.1f} GiB; "
            f"weights and others take {(total - free) / GIB:.1f} GiB, a step of "
            f"{config.max_num_batched_tokens} tokens and graphs {needed / GIB:.1f} GiB, which "
            "leaves nothing for KV pages: raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return left


def check_host_memory(config: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if the KV pages of a CPU are to take more than the machine's memory."""
    if config.kv_cache_gib is None or device.type == "cuda":
        return
    ranks = config.tensor_parallel_size
    host = _host_bytes() // ranks
    if int(config.kv_cache_gib * GIB) > host:
        of_each = "the process" if ranks == 1 else f"each of {ranks} processes"
        raise ConfigError(
            f"kv_cache_gib is {config.kv_cache_gib}, this machine allows {of_each} "
            f"{host / GIB:.1f} GiB: lower kv_cache_gib"
        )


def offload_bytes(config: EngineConfig, chunk_bytes: int) -> int:
    """Bytes of a rank's host memory for links that the pool evicts; a chunk takes `chunk_bytes`.

    Raises `ConfigError` if that is less than a chunk or more than the machine has.
    """
    wanted, most, ranks = (
        int(config.kv_offload_gib * GIB),
        _host_bytes(),
        config.tensor_parallel_size,
    )
    chunk_bytes *= ranks
    if wanted and not chunk_bytes <= wanted <= most:
        raise ConfigError(
            f"kv_offload_gib is {config.kv_offload_gib}, it must be 0 or lie between "
            f"{math.ceil(1e6 * chunk_bytes / GIB) / 1e6}, one chunk at kv_retention "
            f"{config.kv_retention}, and {most / GIB:.1f}, the memory of this machine"
        )
    return wanted // ranks


@contextmanager
def explain_exhaustion(config: EngineConfig) -> Iterator[None]:
    """If memory runs out inside, raise a `ConfigError` that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not memory_ran_out(error):
            raise
        raise ConfigError(
            f"memory has run out at the start, with kv_cache_gib {config.kv_cache_gib}, "
            f"kv_offload_gib {config.kv_offload_gib}, gpu_memory_utilization "
            f"{config.gpu_memory_utilization}, max_num_batched_tokens "
            f"{config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}: lower one of "
            "them"
        ) from error


def _host_bytes() -> int:
    """The machine's memory, or a container's limit."""
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, int(limit)) if limit.isdigit() else physical


def _count_gathered_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of the buffers into which prefill copies entries out of pages.

    The usual ones stay beside those for one layer of a longer sequence, which are a multiple.
    """
    shape = loaded.geometry
    longest = config.max_model_len or shape.max_positions
    entry_bytes = shape.entry_elements * loaded.dtype.itemsize
    largest = -(-shape.kv_heads * longest * entry_bytes // MOST_BYTES)
    kinds = 1 if shape.window_heads is None else 2  # a window gathers no more than the usual ones
    return MOST_BYTES * (kinds if largest <= 1 else kinds + largest)


def _count_expanded_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of keys, values and partial results of a step (`kernels/triton/expanded.py`)."""
    heads = next(filter(None, map(latent_heads, loaded.model.modules())), None)
    if heads is None:
        return 0
    expanded = heads.up[:, :, 0].numel() * loaded.dtype.itemsize
    results = 4 * len(heads.up) * heads.value_dim  # float32
    return config.max_num_batched_tokens * (expanded + 3 * results)


def _states_of_step(config: EngineConfig, loaded: LoadedModel) -> PassStates | None:
    """The states of a step of as many tokens as it may have, as many together as may be."""
    if not loaded.states:
        return None
    most = max(config.chunk_tokens, JOINED_TOKENS)
    whole, rest = divmod(config.max_num_batched_tokens, most)
    counts = [most] * whole + [rest] * (rest > 0)
    return continue_row(loaded.states, counts, loaded.device)


def _activation_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """The largest memory use of a forward pass over the largest step."""
    tokens = torch.zeros(1, config.max_num_batched_tokens, dtype=torch.int64, device=loaded.device)
    positions = (
        torch.arange(tokens.shape[1], device=loaded.device)[None] % loaded.geometry.max_positions
    )
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    with torch.inference_mode():
        output = loaded.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=_states_of_step(config, loaded),
            use_cache=False,
            logits_to_keep=config.max_num_seqs + config.chunk_tokens,  # of prompts, if asked for
            tangram=_NoAttention(),
        )
        output.logits[:, : config.max_num_seqs].float()
    return torch.cuda.max_memory_allocated(loaded.device) - before
