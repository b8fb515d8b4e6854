"""The options that every command shares, and the `EngineConfig` they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from tangram.cli.checks import check_start, within
from tangram.config import BOUNDS, EngineConfig
from tangram.foreign_files import expanded
from tangram.limits import Bounds

MODEL = typer.Argument(help="smollm2 (embedded), a Hugging Face id, a folder of safetensors, or a GGUF file")


class Scope(StrEnum):
    """What competes for the kept entries."""

    layer = "layer"
    model = "model"


class Scheduling(StrEnum):
    """When waiting requests may join."""

    continuous = "continuous"
    static = "static"


class WeightType(StrEnum):
    """The dtype of weights and KV cache."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class CacheType(StrEnum):
    """The dtype of the KV cache."""

    auto = "auto"
    fp8 = "fp8"


class LoadFormat(StrEnum):
    """Where weights come from."""

    auto = "auto"
    dummy = "dummy"


class SizeType(StrEnum):
    """The dtype that `size` reckons with."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Panel(StrEnum):
    """The parts of a command's help; what a command alone has stands before them, under Options."""

    model = "Model"
    memory = "Memory"
    compression = "Compression"
    batching = "Batching"
    server = "Server"
    expert = "Expert"


def option(panel: Panel, help_text: str, *names: str, default: str | None = None, **more: Any) -> Any:
    """A `typer.Option` in a panel; `default` says what holds where nothing is given and no value stands for it."""
    shown: bool | str = True if default is None else default
    return typer.Option(*names, help=help_text, rich_help_panel=panel.value, show_default=shown, **more)


def number(bounds: Bounds, help_text: str, **more: Any) -> Any:
    """A `typer.Option` of a number that must lie there."""
    return typer.Option(help=help_text, callback=within(bounds), **more)


def engine_number(name: str, panel: Panel, help_text: str, default: str | None = None) -> Any:
    """An `option` that is a number of `EngineConfig`, and its bounds."""
    return option(panel, help_text, callback=within(*BOUNDS[name]), default=default)


_MODEL, _MEMORY, _COMPRESSION = Panel.model, Panel.memory, Panel.compression
_BATCHING, _EXPERT = Panel.batching, Panel.expert

Model = Annotated[str, MODEL]
Retention = Annotated[
    float, engine_number("kv_retention", _COMPRESSION, "fraction of KV entries kept; 1.0 keeps everything")
]
STAYS = "what decides which entries stay (docs/scorers.md)"
SERVED_SCORER = "fastkvzip where its gate is given or ships for these weights, else keydiff"
COMPETE = "heads compete within a layer or across the model"
ScorerName = Annotated[str | None, option(_COMPRESSION, STAYS, default=f"that of --profile, or {SERVED_SCORER}")]
ScopeName = Annotated[Scope | None, option(_COMPRESSION, COMPETE, default="as --profile says, or model (tova: layer)")]
Chunk = Annotated[
    int,
    engine_number("chunk_tokens", _COMPRESSION, "tokens that are computed and sealed in one piece"),
]
Page = Annotated[int, engine_number("page_tokens", _EXPERT, "tokens of a page")]
Heads = Annotated[int, engine_number("heads_per_page", _EXPERT, "KV heads that share a page table")]
Profiles = Annotated[
    list[str] | None, option(_COMPRESSION, "profile file; repeat for several kv-retentions", "--profile")
]
Gate = Annotated[
    str | None,
    option(_COMPRESSION, "gate file of the scorer fastkvzip", default="the one that ships for these weights"),
]
DecodePolicy = Annotated[
    str | None,
    option(_EXPERT, "file of `tangram bench calibrate-policy`, for a GPU", default="the one kept for this GPU"),
]
CacheGib = Annotated[
    float | None,
    engine_number(
        "kv_cache_gib",
        _MEMORY,
        "memory for KV pages in GiB",
        default="on a GPU what is left, else a share of the host's",
    ),
]
OffloadGib = Annotated[
    float,
    engine_number(
        "kv_offload_gib",
        _MEMORY,
        "host memory for sealed chunks that KV pages are taken from, in GiB",
    ),
]
Utilization = Annotated[
    float,
    engine_number(
        "gpu_memory_utilization",
        _MEMORY,
        "share of a GPU's memory to fill where --kv-cache-gib is not given",
    ),
]
MaxSeqs = Annotated[int, engine_number("max_num_seqs", _BATCHING, "most sequences in one step")]
MaxBatched = Annotated[int, engine_number("max_num_batched_tokens", _BATCHING, "most tokens in one step")]
MaxLen = Annotated[
    int | None,
    engine_number(
        "max_model_len",
        _MODEL,
        "most tokens, prompt and answer, of one sequence",
        default="the model's own limit",
    ),
]
Patience = Annotated[
    int,
    engine_number(
        "prompt_patience",
        _BATCHING,
        "a prompt lets others pass for that many times its own tokens; 0: none",
    ),
]
NoPrefix = Annotated[
    bool, option(_MEMORY, "do not reuse the KV state of prefixes seen before", "--no-enable-prefix-caching")
]
Batching = Annotated[Scheduling, option(_BATCHING, "continuous batching, or static batches for comparison")]
Dtype = Annotated[
    WeightType,
    option(_MODEL, "dtype of weights and KV cache: auto, float32, bfloat16 or float16", metavar="DTYPE"),
]
CacheDtype = Annotated[CacheType, option(_MEMORY, "dtype of the KV cache: that of the weights, or FP8 (E4M3)")]
Weights = Annotated[LoadFormat, option(_MODEL, "dummy: random weights of the model's config.json, to measure with")]
Eager = Annotated[bool, option(_EXPERT, "on a GPU, no compilation and no CUDA graphs", "--enforce-eager")]
Device = Annotated[str, option(_MODEL, "auto, cpu or cuda: the first GPU of CUDA_VISIBLE_DEVICES")]
Threads = Annotated[
    int | None,
    engine_number("threads", _EXPERT, "threads that compute on the CPU", default="one for each core"),
]
Seed = Annotated[int, engine_number("seed", _EXPERT, "seed of requests that bring none")]

CalibratedScorer = Annotated[str | None, option(_COMPRESSION, STAYS, default=SERVED_SCORER)]
CalibratedScope = Annotated[Scope | None, option(_COMPRESSION, COMPETE, default="model (tova: layer)")]
PilotSeed = Annotated[int, engine_number("seed", _EXPERT, "seed of the pilot texts, and of a gate's training")]
PILOT_SAMPLES = Bounds(1, 10_000)
PilotSamples = Annotated[int | None, number(PILOT_SAMPLES, "built-in pilot texts to calibrate on", show_default="50")]


def _config(
    model: Model = "smollm2", kv_retention: Retention = 0.5, scorer: ScorerName = None,
    scope: ScopeName = None, chunk_tokens: Chunk = 512, page_tokens: Page = 16, heads_per_page: Heads = 4,
    profile: Profiles = None, gate: Gate = None, decode_policy: DecodePolicy = None, kv_cache_gib: CacheGib = None,
    kv_offload_gib: OffloadGib = 0.0, gpu_memory_utilization: Utilization = 0.9, max_num_seqs: MaxSeqs = 32,
    max_num_batched_tokens: MaxBatched = 2048, max_model_len: MaxLen = None, prompt_patience: Patience = 16,
    no_enable_prefix_caching: NoPrefix = False, scheduling: Batching = Scheduling.continuous,
    dtype: Dtype = WeightType.auto, kv_cache_dtype: CacheDtype = CacheType.auto,
    load_format: Weights = LoadFormat.auto, enforce_eager: Eager = False, device: Device = "auto",
    threads: Threads = None, seed: Seed = 0,
) -> EngineConfig:  # fmt: skip
    return EngineConfig(
        model=model, kv_retention=kv_retention, scorer=scorer, scope=None if scope is None else scope.value,
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens, heads_per_page=heads_per_page, profile=tuple(profile or ()), gate=gate,
        decode_policy=decode_policy, kv_cache_gib=kv_cache_gib, kv_offload_gib=kv_offload_gib,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, prompt_patience=prompt_patience,
        enable_prefix_caching=not no_enable_prefix_caching, scheduling=scheduling.value,
        dtype=dtype.value, kv_cache_dtype=kv_cache_dtype.value,
        load_format=load_format.value, enforce_eager=enforce_eager, device=device,
        threads=threads, seed=seed,
    )  # fmt: skip


def calibration_config(
    model: Model = "smollm2", kv_retention: Retention = 0.5, scorer: CalibratedScorer = None,
    scope: CalibratedScope = None, chunk_tokens: Chunk = 512, page_tokens: Page = 16, heads_per_page: Heads = 4,
    gate: Gate = None, dtype: Dtype = WeightType.auto, load_format: Weights = LoadFormat.auto,
    device: Device = "auto", threads: Threads = None, seed: PilotSeed = 0,
) -> EngineConfig:  # fmt: skip
    """What a calibration looks at, for `configured_by`; no engine is built, so the rest is as by default."""
    # A config must have room for a chunk in one step, whether or not there are any steps.
    step_tokens = max(EngineConfig.max_num_batched_tokens, chunk_tokens + EngineConfig.max_num_seqs)
    return _config(
        model=model, kv_retention=kv_retention, scorer=scorer, scope=scope, chunk_tokens=chunk_tokens,
        page_tokens=page_tokens, heads_per_page=heads_per_page, gate=gate, max_num_batched_tokens=step_tokens,
        dtype=dtype, load_format=load_format, device=device, threads=threads, seed=seed,
    )  # fmt: skip


def changed(config: EngineConfig, *names: str) -> dict[str, object]:
    """Of the fields called `names`, those that are not as by default."""
    return {name: value for name in names if (value := getattr(config, name)) != getattr(EngineConfig, name)}


def served_name(config: EngineConfig) -> str:
    """The model's name in the API: what was given, but of a local folder its last part, of a file that without suffix.

    Whoever asks is told it in every answer, and where a model lies is not theirs to know.
    """
    path = expanded(config.model)
    if not path.exists():
        return config.model
    named = path if path.name.strip(".") else path.resolve()  # "." and ".." have no name; a link keeps its own
    return named.name if path.is_dir() else named.stem


Command = Callable[..., None]


def configured_by(
    make: Callable[..., EngineConfig], check: Callable[[EngineConfig], None] | None = None
) -> Callable[[Command], Command]:
    """A decorator: the command takes the options of `make`, whose `EngineConfig` becomes its first argument.

    `check` raises what stands in the way of the command, whatever its own options are.
    """
    shared = list(inspect.signature(make, eval_str=True).parameters.values())

    def decorated(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(**options: Any) -> None:
            config = make(**{parameter.name: options.pop(parameter.name) for parameter in shared})
            if check is not None:
                check(config)
            command(config, **options)

        keyword = inspect.Parameter.KEYWORD_ONLY
        entries = sorted((entry.replace(kind=keyword) for entry in (*shared, *own)), key=_place)
        run.__signature__ = inspect.Signature(entries)  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorated


def _place(parameter: inspect.Parameter) -> int:
    """Where help shows a parameter: what is in no panel first, then panel by panel."""
    (info, *_) = parameter.annotation.__metadata__
    return -1 if info.rich_help_panel is None else list(Panel).index(Panel(info.rich_help_panel))


with_config = configured_by(_config, check_start)  # for commands that build an engine
