"""The disk behind an engine's host memory, and what the entries there depend on."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import torch

from tangram.cache.disk import DiskTier
from tangram.cache.disk_store import open_store
from tangram.compress.entry_scales import join_scales
from tangram.engine.setup.blueprint import Blueprint
from tangram.engine.setup.memory import GIB
from tangram.errors import ConfigError
from tangram.foreign_files import expand_home
from tangram.kernels.cpu.vectors import describe_processor

_READERS = 2  # one waits for the disk while the other computes a checksum
_COMPUTING = ("torch", "transformers", "numba", "llvmlite", "numpy")
_VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")  # by which products take other instructions
_NICE = 10  # the threads of the disk give way to those that compute


def open_disk(blueprint: Blueprint, page_bytes: int) -> DiskTier | None:
    """The disk that the options name, if they name one; pages in host memory have `page_bytes`.

    Raises `ConfigError` if it cannot be written, or holds less than a chunk.
    """
    config = blueprint.config
    if config.kv_disk_path is None:
        return None
    limit, chunk = int(config.kv_disk_gib * GIB), page_bytes * _largest_span(blueprint)
    if limit < 2 * chunk:
        raise ConfigError(
            f"kv_disk_gib is {config.kv_disk_gib}, it must be at least "
            f"{math.ceil(2e6 * chunk / GIB) / 1e6}, two chunks of the largest kv_retention"
        )
    store = open_store(expand_home(config.kv_disk_path), _dependencies(blueprint), limit)
    reader, writer = (
        ThreadPoolExecutor(threads, f"tangram-disk-{name}", initializer=partial(os.nice, _NICE))
        for name, threads in (("read", _READERS), ("write", 1))
    )
    return DiskTier(store, page_bytes, reader, writer)


def _largest_span(blueprint: Blueprint) -> int:
    return max(entry.layout.span_pages for entry in blueprint.served.retentions)


def _dependencies(blueprint: Blueprint) -> Mapping[str, str | int]:
    """What entries depend on that their prefix keys do not name, down to the last bit."""
    config, loaded, served = blueprint.config, blueprint.loaded, blueprint.served
    layout = served.retentions[0].layout
    return {
        "config": loaded.weights_digest,
        "weights": loaded.exact_digest,
        "quantization": config.quantization or "none",
        "dtype": str(loaded.dtype),
        "kv_cache_dtype": str(blueprint.cache_dtype),
        "kv_offload_dtype": config.kv_offload_dtype,
        "scales": repr(join_scales(entry.scales for entry in served.retentions)),
        "chunk_tokens": layout.chunk_tokens,
        "page_tokens": layout.page_tokens,
        "heads_per_page": layout.heads_per_page,
        "processor": describe_processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "variables": " ".join(f"{name}={os.environ.get(name, '')}" for name in _VARIABLES),
        "threads": torch.get_num_threads(),
        "software": " ".join(f"{name} {version(name)}" for name in _COMPUTING),
        "tangram": _hash_sources(),
    }


@cache
def _hash_sources() -> str:
    """Of all of Tangram's modules: releases are not the only ones that compute otherwise."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
