"""Every option of the engine: its default, its bounds and what it means.

The command line, `LLM` and the table of docs/options.md are derived from `EngineConfig`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from tangram.errors import ConfigError
from tangram.foreign_files import expand_home
from tangram.limits import SERVED_QUEUE, Bounds
from tangram.speculative_config import (
    CompressedKv,
    DraftModel,
    SpeculativeConfig,
    read_speculative_config,
)

ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
SmallWeights = Literal["int8", "int4", "fp8"]
LoadFormat = Literal["auto", "dummy"]
# The rows of `engine/text/formats.py`.
_Dsml = Literal["deepseek_v32", "deepseek_v4"]
_Tagged = Literal["qwen3_coder", "glm45", "glm47", "seed_oss", "minimax_m2", _Dsml]
_Marked = Literal["hermes", "llama3", "gigachat3", "gigachat31"]
_Of = Literal["nemotron_v2", "apriel"]
_Listed = Literal["mistral", "command", "phi4_mini", "granite", "functools", _Of]
_Named = Literal["mistral_named", "deepseek_v3", "deepseek_v31", "kimi_k2", "apertus", "harmony"]
_Literals = Literal["lfm2", "olmo3", "pythonic", "gemma4", "functiongemma"]
ToolFormatName = Literal["auto", _Marked, _Tagged, _Listed, _Named, _Literals]
_ModelsThoughts = Literal["ernie", "apriel", "mistral", "seed_oss", "command", "gemma4", "harmony"]
ThinkingFormatName = Literal["auto", "think", "thinking", "thought", "reasoning", _ModelsThoughts]
Scope = Literal["layer", "model"]  # whose heads compete for entries
KvCacheDtype = Literal["auto", "fp8", "int8"]

MOST_TOKENS = 2**24  # of any option: no model takes as many
_TOKENS, _COUNT, _GIB = Bounds(1, MOST_TOKENS), Bounds(1, 2**31 - 1), 2.0**20
SERVED_SCORER = "fastkvzip with a gate for these weights, given or shipped; else keydiff"


def cache_folder() -> Path:
    """The folder of converted weights and calibrated profiles.

    It is $TANGRAM_CACHE if set, else `tangram` in the user's cache folder. Raises `ConfigError` if
    no variable names the user's home.
    """
    if chosen := os.environ.get("TANGRAM_CACHE"):
        return expand_home(chosen)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or expand_home("~/.cache"))
    if not folder.is_absolute():
        raise ConfigError(
            f"the cache folder would be {str(folder)!r}, which depends on where the command runs: "
            "set TANGRAM_CACHE, XDG_CACHE_HOME or HOME to a folder that begins with /"
        )
    return folder / "tangram"


class OptionGroup(StrEnum):
    """The subject of an option."""

    model = "Model"
    memory = "Memory"
    compression = "Compression"
    batching = "Batching"
    server = "Server"
    replicas = "Replicas"
    expert = "Expert"


@dataclass(frozen=True)
class Option:
    """The description of a field of `EngineConfig`, or of `serve.options`.

    `unset` says what None means. A number lies within `bounds`; an error about it ends with `hint`.
    Of the commands only `serve` and `deploy` have an option that is `served_alone`.
    """

    group: OptionGroup
    text: str
    bounds: Bounds | None = None
    hint: str = ""
    unset: str | None = None
    served_alone: bool = False


def _option(group: OptionGroup, default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(group, text, **more)})


_model = partial(_option, OptionGroup.model)
_memory = partial(_option, OptionGroup.memory)
_compression = partial(_option, OptionGroup.compression)
_batching = partial(_option, OptionGroup.batching)
_expert = partial(_option, OptionGroup.expert)


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine; `OPTIONS` describes each field.

    The config of a running engine names its default scorer and scope. Raises `ConfigError` naming
    the field that is out of range.
    """

    model: str = _model(
        "smollm2", "smollm2 (embedded), a Hugging Face id, a folder of safetensors, or a GGUF file"
    )
    dtype: ModelDtype = _model(
        "auto",
        "dtype of weights and KV cache; auto: the checkpoint's on a GPU, on a CPU bfloat16 if it "
        "multiplies it, otherwise float32",
    )
    quantization: SmallWeights | None = _model(
        None,
        "round weights of linear maps to int8 or int4, or to fp8 on a GPU",
        unset="the weights of the model as they are",
    )
    load_format: LoadFormat = _model(
        "auto", "dummy: random weights in the shapes of config.json, for benchmarks"
    )
    generation_config: str = _model(
        "auto",
        "sampling where a request states nothing; auto: by the model's generation_config.json or "
        "GGUF file; none: temperature 1, no filters; or a folder with a generation_config.json",
    )
    chat_template: str | None = _model(None, "file with a chat template", unset="the model's own")
    tool_format: ToolFormatName = _model("auto", "of tool calls; auto: the chat template's")
    thinking_format: ThinkingFormatName = _model("auto", "of thoughts")
    device: str = _model("auto", "auto, cpu, or cuda for the first GPU of CUDA_VISIBLE_DEVICES")
    max_model_len: int | None = _model(
        None,
        "maximum tokens of one sequence, prompt and answer together",
        bounds=_TOKENS,
        unset="the model's own limit",
    )

    tensor_parallel_size: int = _model(
        1,
        "devices that share one model: each has a part of its weights, KV heads and pages, and a "
        "process of its own",
        bounds=Bounds(1, 64),
    )

    kv_cache_gib: float | None = _memory(
        None,
        "memory for KV pages in GiB, on each device",
        bounds=Bounds(0.0, _GIB, open_low=True),
        unset="on a GPU the rest of its share; on a CPU 4 GiB, at most a quarter of memory",
    )
    gpu_memory_utilization: float = _memory(
        0.9,
        "share of a GPU's memory to use if --kv-cache-gib is not given",
        bounds=Bounds(0.0, 1.0, open_low=True),
    )
    kv_offload_gib: float = _memory(
        0.0,
        "host memory for sealed chunks that the KV cache evicts, in GiB",
        bounds=Bounds(0.0, _GIB),
        hint="0 means none",
    )
    kv_offload_dtype: Literal["auto", "fp8", "int4"] = _memory(
        "auto",
        "dtype of that host memory: auto for that of the KV cache, fp8 or int4; sealed chunks are "
        "rounded to it",
    )
    kv_disk_path: str | None = _memory(
        None,
        "folder for sealed chunks, which a restart finds again; KV entries can reveal text",
        unset="none are written",
    )
    kv_disk_gib: float = _memory(
        0.0,
        "most GiB of the chunks in that folder, which come back by way of host memory",
        bounds=Bounds(0.0, 1 << 20),
        hint="0 means none",
    )
    kv_cache_dtype: KvCacheDtype = _memory(
        "auto",
        "dtype of the KV cache: auto for that of the weights, or with the scales of the profiles "
        "fp8 (E4M3) or, on a CPU, int8",
    )
    enable_prefix_caching: bool = _memory(True, "reuse the KV state of prefixes seen before")

    kv_retention: float = _compression(
        0.5,
        "fraction of KV entries kept; 1.0 keeps everything",
        bounds=Bounds(0.0, 1.0, open_low=True),
        hint="1.0 keeps everything",
    )
    profile: Sequence[str] = _compression(
        (), "profile file; repeat the option to serve several retention ratios and scorers"
    )
    scorer: str | None = _compression(
        None,
        "method that decides which KV entries stay (docs/scorers.md)",
        unset=f"that of the first --profile with --kv-retention, or {SERVED_SCORER}",
    )
    scope: Scope | None = _compression(
        None,
        "heads share one budget within a layer or across the model",
        unset="the scope of each --profile, or model (tova: layer)",
    )
    gate: str | None = _compression(
        None, "gate file of the scorer fastkvzip", unset="the shipped gate for these weights"
    )
    chunk_tokens: int = _compression(
        512, "tokens of a chunk, which is prefilled and compressed as a unit", bounds=_TOKENS
    )

    speculative_config: str | Mapping[str, Any] | None = _batching(
        None,
        """draft tokens and verify several at a time: JSON like '{"method": "ngram"}'; """
        "other methods are suffix, compressed_kv and draft_model",
        unset="one token of a sequence in a step",
    )
    max_num_seqs: int = _batching(32, "maximum sequences in one step", bounds=_TOKENS)
    max_num_batched_tokens: int = _batching(
        2048, "maximum tokens in one step", bounds=Bounds(1, 2 * MOST_TOKENS)
    )
    prompt_patience: int = _batching(
        16,
        "tokens of shorter prompts that may overtake a prompt, as a multiple of its length",
        bounds=Bounds(0, 2**31 - 1),
        hint="0 is first come, first served",
    )
    max_queue: int | None = _batching(
        None,
        "maximum completions in the queue; when it is full, requests get status 429, and `LLM` "
        "raises `OverloadError`",
        bounds=_COUNT,
        hint="None sets no limit",
        unset=f"no limit; {SERVED_QUEUE} in `serve`",
        served_alone=True,
    )

    page_tokens: int = _expert(16, "tokens of a page, for each of its KV heads", bounds=_TOKENS)
    heads_per_page: int = _expert(4, "KV heads that share a page table", bounds=Bounds(1, 2**16))
    enforce_eager: bool = _expert(False, "use no compilation and no CUDA graphs on a GPU")
    compile_decode: bool = _expert(
        False, "compile the layers that decode, on a CPU: faster steps, a slower start"
    )
    threads: int | None = _expert(
        None,
        "CPU threads for the model's computation",
        bounds=Bounds(1, 1024),
        hint="None takes as many as torch",
        unset="one per core",
    )
    seed: int = _expert(0, "seed of requests that have no seed", bounds=Bounds(-(2**63), 2**63 - 1))
    overflow_every: int | None = _expert(
        None,
        "measure entries beyond the budgets in one of so many sealed chunks",
        bounds=_COUNT,
        hint="None measures none",
        unset="not measured",
        served_alone=True,
    )
    save_failed_passes: str | None = _expert(
        None,
        "folder for passes that fail or give NaN, which `tangram replay` computes again; each step "
        "then waits for its logits",
        unset="not saved",
        served_alone=True,
    )

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(
                self, "speculative_config", json.dumps(dict(self.speculative_config))
            )
        if isinstance(self.speculation, CompressedKv):
            self._keep_everything()
        profile = (self.profile,) if isinstance(self.profile, str) else tuple(self.profile)
        object.__setattr__(self, "profile", profile)
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.bounds is not None and value is not None:
                option.bounds.check_option(name, value, option.hint)
            if (choices := CHOICES.get(name)) and value is not None and value not in choices:
                listed = " or ".join((", ".join(choices[:-1]), choices[-1]))
                raise ConfigError(f"{name} is {value!r}, it must be {listed}")
        if self.chunk_tokens % self.page_tokens:
            raise ConfigError(
                f"chunk_tokens is {self.chunk_tokens}, it must be a multiple of page_tokens "
                f"({self.page_tokens})"
            )
        smallest = self.chunk_tokens + self.max_num_seqs
        if self.max_num_batched_tokens < smallest:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least "
                f"chunk_tokens + max_num_seqs = {smallest}, so that a whole chunk always fits "
                "beside the decoding rows"
            )
        if self.overflow_every is not None and self.kv_retention == 1.0 and not self.profile:
            raise ConfigError(
                f"overflow_every is {self.overflow_every}, but at kv_retention 1.0 nothing is "
                "dropped: leave it out"
            )
        if self.kv_offload_gib and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_offload_gib is {self.kv_offload_gib}, but without enable_prefix_caching "
                "nothing is kept: enable it, or set kv_offload_gib to 0"
            )
        self._check_disk()
        if self.kv_offload_dtype != "auto" and not self.kv_offload_gib:
            raise ConfigError(
                f"kv_offload_dtype is {self.kv_offload_dtype}, but kv_offload_gib is 0: give host "
                "memory, or leave it out"
            )
        if self.kv_offload_dtype != "auto" and self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"kv_offload_dtype is {self.kv_offload_dtype}, but an {self.kv_cache_dtype} cache "
                "is offloaded as it is: leave kv_offload_dtype or kv_cache_dtype out"
            )

        if self.tensor_parallel_size > 1:
            self._check_ranks()

    def _check_disk(self) -> None:
        """Raise `ConfigError` unless the options of the disk come with what they need."""
        if self.kv_disk_path == "":
            raise ConfigError("kv_disk_path is '': name a folder, or leave it out")
        if (self.kv_disk_path is None) != (self.kv_disk_gib == 0.0):
            raise ConfigError(
                f"kv_disk_path is {self.kv_disk_path} and kv_disk_gib {self.kv_disk_gib}: give "
                "both, or neither"
            )
        if self.kv_disk_path is not None and not self.kv_offload_gib:
            raise ConfigError(
                f"kv_disk_path is {self.kv_disk_path}, but kv_offload_gib is 0: chunks come back "
                "by way of host memory, so give some, at least as much as the longest history"
            )

    def _check_ranks(self) -> None:
        """Raise `ConfigError` for an option that several devices do not serve."""
        drafts = self.speculation
        refused = {
            "quantization": (self.quantization, "rounded weights are cut for one device"),
            "compile_decode": (
                self.compile_decode or None,
                "layers that are cut for several devices are not compiled on a CPU",
            ),
            "load_format": (
                None if self.load_format == "auto" else self.load_format,
                "random weights are made on one device; save them as a checkpoint",
            ),
            "kv_disk_path": (self.kv_disk_path, "a chunk's pages lie on several devices"),
            "save_failed_passes": (
                self.save_failed_passes,
                "what a pass reads lies on several devices",
            ),
            "overflow_every": (
                self.overflow_every,
                "the demand of a chunk is counted over all heads, which lie on several devices",
            ),
            "speculative_config.method": (
                drafts.method if isinstance(drafts, DraftModel) else None,
                "a second model would lie on one device: choose another method",
            ),
        }
        for name, (value, why) in refused.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, which tensor_parallel_size "
                    f"{self.tensor_parallel_size} does not serve: {why}; leave one of them out"
                )

    @cached_property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, read."""
        given = self.speculative_config
        return None if given is None else read_speculative_config(given)

    def _keep_everything(self) -> None:
        """Set ρ = 1.0, on which drafts from a part of the entries are verified.

        Raises `ConfigError` if another ρ is configured.
        """
        if self.kv_retention not in (1.0, type(self).kv_retention):
            raise ConfigError(
                f"kv_retention is {self.kv_retention}, but with the speculative method "
                "compressed_kv every entry is kept: set speculative_config.kv_retention, which "
                "says how many of them drafts read"
            )
        object.__setattr__(self, "kv_retention", 1.0)


# In the order of the groups.
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {entry.name: entry.metadata["option"] for entry in fields(EngineConfig)}
)
TYPES: Mapping[str, Any] = MappingProxyType(get_type_hints(EngineConfig))


def _choices(kind: Any) -> tuple[str, ...]:
    """The texts that a field of type `kind` may hold; () if it may hold any."""
    parts = get_args(kind)
    nested = [choice for part in parts for choice in _choices(part)]
    return tuple(nested) if nested else tuple(part for part in parts if isinstance(part, str))


CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: choices for name, kind in TYPES.items() if (choices := _choices(kind))}
)
