"""Every option of the engine, validated once. The command line, the server and `LLM` all build this."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tangram.errors import ConfigError
from tangram.foreign_files import expanded
from tangram.limits import Bounds

MOST_TOKENS = 2**24  # of anything: no model was made for so many
_TOKENS, _COUNT, _GIB = Bounds(1, MOST_TOKENS), Bounds(1, 2**31 - 1), 2.0**20
# Where every number of an `EngineConfig` must lie that is given, and what else there is.
BOUNDS: Mapping[str, tuple[Bounds, str]] = {
    "kv_retention": (Bounds(0.0, 1.0, open_low=True), "1.0 keeps everything"),
    "page_tokens": (_TOKENS, ""),
    "heads_per_page": (Bounds(1, 2**16), ""),
    "chunk_tokens": (_TOKENS, ""),
    "max_num_seqs": (_TOKENS, ""),
    "max_num_batched_tokens": (Bounds(1, 2 * MOST_TOKENS), ""),
    "max_model_len": (_TOKENS, ""),
    "prompt_patience": (Bounds(0, 2**31 - 1), "0 is first come, first served"),
    "threads": (Bounds(1, 1024), "None takes as many as torch"),
    "max_queue": (_COUNT, "None lets everybody wait"),
    "overflow_every": (_COUNT, "None measures none"),
    "seed": (Bounds(-(2**63), 2**63 - 1), ""),
    "gpu_memory_utilization": (Bounds(0.0, 1.0, open_low=True), ""),
    "kv_cache_gib": (Bounds(0.0, _GIB, open_low=True), ""),
    "kv_offload_gib": (Bounds(0.0, _GIB), "0 means none"),
}


def cache_folder() -> Path:
    """Where converted weights and calibrated profiles are kept: $TANGRAM_CACHE, else the user's cache folder.

    Raises `ConfigError` where nothing says where the user's home is.
    """
    if own := os.environ.get("TANGRAM_CACHE"):
        return expanded(own)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache"))
    if not folder.is_absolute():
        raise ConfigError(
            f"the cache folder would be {str(folder)!r}, which depends on where the command runs: "
            "set TANGRAM_CACHE, XDG_CACHE_HOME or HOME to a folder that begins with /"
        )
    return folder / "tangram"


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of.

    `model` is `smollm2` (the embedded model), a Hugging Face id, a folder of safetensors or a GGUF file.
    `kv_retention` is ρ, the fraction of a sealed chunk's KV entries that is kept; 1.0 drops nothing.
    `profile` lists profile files; without one that fits, a shipped or cached one is used, or a short calibration runs.
    `scorer` None is that of the profiles given; without any, fastkvzip where its gate is given or ships for exactly
    these weights, and keydiff elsewhere. `scope` None is that of the profiles given; without any, heads of the whole
    model compete, for tova those of a layer. The config of a running engine names both.
    `gate` is the gate file of scorer fastkvzip; None takes the one that ships for exactly these weights, if any does.
    `kv_cache_gib` None fills a GPU up to `gpu_memory_utilization` of its memory (on a CPU, a share of the host's is
    taken). `max_model_len` None means the model's own limit.
    `kv_offload_gib` is host memory for sealed chunks that the pool has no room for any more; 0 means none.
    `prompt_patience`: a prompt lets others by until as many tokens were computed as that many times its own new ones;
    0 is first come, first served.
    `max_queue`: while so many completions (`n` of a request) wait for a place in the batch, requests are refused. None
    takes them all.
    `kv_cache_dtype` auto is the model's own dtype; fp8 is E4M3, half of bfloat16, with all scales 1.
    `load_format` dummy makes random weights of the model's config.json alone, to measure with.
    `threads` compute on the CPU, in torch and in the compiled kernels, for the whole process; None leaves what torch
    has, to begin with as many as there are cores.
    `enforce_eager` runs a GPU's model operation by operation, without compilation and CUDA graphs.
    `overflow_every`: of every so many sealed chunks, one is asked what its own scores would have kept, for the metrics;
    None asks none.
    `decode_policy` is a file of `tangram bench calibrate-policy`; None takes the one kept for this GPU, if any.

    Three fields are there to measure what the engine's parts are worth; nothing serves with them. `head_groups` says
    which heads share a page table: those of like budgets, neighbours, or all of a layer (in pages of a layer's heads);
    what each head is promised stays the same. `decode_schedule` (`plan/schedule.py`) plans every decode step.
    `reclamation` dynamic allocates a chunk whole and gives back what it did not keep, after the forward pass; by-input
    lets each chunk's own scores decide how much each head keeps, as the methods do that budgets stand in for: every
    head has pages for everything, and no prefix is shared.
    """

    model: str = "smollm2"
    kv_retention: float = 0.5
    scorer: str | None = None
    scope: Literal["layer", "model"] | None = None
    chunk_tokens: int = 512
    page_tokens: int = 16
    heads_per_page: int = 4
    profile: tuple[str, ...] = ()
    gate: str | None = None
    decode_policy: str | None = None
    kv_cache_gib: float | None = None
    kv_offload_gib: float = 0.0
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    prompt_patience: int = 16
    max_queue: int | None = None
    enable_prefix_caching: bool = True
    scheduling: Literal["continuous", "static"] = "continuous"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    overflow_every: int | None = None
    head_groups: Literal["clustered", "adjacent", "monolithic"] = "clustered"
    decode_schedule: str | None = None
    reclamation: Literal["reserved", "dynamic", "by-input"] = "reserved"

    def __post_init__(self) -> None:
        for name, (bounds, hint) in BOUNDS.items():
            if (value := getattr(self, name)) is not None:
                bounds.check_option(name, value, hint)
        if self.scope not in ("layer", "model", None):
            raise ConfigError(f"scope is {self.scope!r}, it must be 'layer' or 'model'")
        if self.scheduling not in ("continuous", "static"):
            raise ConfigError(f"scheduling is {self.scheduling!r}, it must be 'continuous' or 'static'")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}, it must be auto, float32, bfloat16 or float16")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}, it must be 'auto' or 'fp8'")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format is {self.load_format!r}, it must be 'auto' or 'dummy'")
        if self.head_groups not in ("clustered", "adjacent", "monolithic"):
            raise ConfigError(f"head_groups is {self.head_groups!r}, it must be clustered, adjacent or monolithic")
        if self.reclamation not in ("reserved", "dynamic", "by-input"):
            raise ConfigError(f"reclamation is {self.reclamation!r}, it must be reserved, dynamic or by-input")
        if self.reclamation == "by-input" and (self.enable_prefix_caching or self.profile or self.kv_retention == 1.0):
            raise ConfigError(
                f"reclamation is 'by-input' with enable_prefix_caching {self.enable_prefix_caching}, profile "
                f"{self.profile} and kv_retention {self.kv_retention}: it needs False, no profile and less than 1.0"
            )
        if self.decode_schedule is not None and self.decode_policy is not None:
            raise ConfigError(
                f"decode_schedule is {self.decode_schedule!r} and decode_policy {self.decode_policy!r}: give one of "
                f"them, a policy chooses a schedule for each batch"
            )
        if self.chunk_tokens % self.page_tokens:
            raise ConfigError(
                f"chunk_tokens is {self.chunk_tokens}, it must be a multiple of page_tokens ({self.page_tokens})"
            )
        smallest = self.chunk_tokens + self.max_num_seqs
        if self.max_num_batched_tokens < smallest:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least chunk_tokens + "
                f"max_num_seqs = {smallest}, so that a whole chunk always fits beside the decoding rows"
            )
        if self.overflow_every is not None and self.kv_retention == 1.0 and not self.profile:
            raise ConfigError(
                f"overflow_every is {self.overflow_every}, but at kv_retention 1.0 nothing is dropped: leave it out"
            )
        if self.kv_offload_gib and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_offload_gib is {self.kv_offload_gib}, but without enable_prefix_caching nothing is kept: "
                "enable it, or set kv_offload_gib to 0"
            )
