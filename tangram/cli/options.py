"""The options that every command shares, and the `EngineConfig` they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tangram.config import EngineConfig
from tangram.errors import EngineError, TangramError

_err = Console(stderr=True)

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


Model = Annotated[str, MODEL]
Retention = Annotated[float, typer.Option("--kv-retention", help="fraction of KV entries kept; 1.0 keeps everything")]
_STAYS = "what decides which entries stay (docs/scorers.md); if not given,"
_SCORER = "fastkvzip where its gate is given or ships for these weights, or keydiff"
_COMPETE = "heads compete within a layer or across the model; if not given,"
_SCOPE = "model (tova: layer)"
ScorerName = Annotated[str | None, typer.Option(help=f"{_STAYS} that of --profile, or {_SCORER}")]
ScopeName = Annotated[Scope | None, typer.Option(help=f"{_COMPETE} as --profile says, or {_SCOPE}")]
Chunk = Annotated[int, typer.Option(help="tokens that are computed and sealed in one piece")]
Page = Annotated[int, typer.Option(help="tokens of a page")]
Heads = Annotated[int, typer.Option(help="KV heads that share a page table")]
Profiles = Annotated[list[str] | None, typer.Option("--profile", help="profile file; repeat for several kv-retentions")]
Gate = Annotated[
    str | None, typer.Option(help="gate file of the scorer fastkvzip; without it the one that ships for these weights")
]
DecodePolicy = Annotated[str | None, typer.Option(help="file of `tangram bench calibrate-policy`, for a GPU")]
CacheGib = Annotated[float | None, typer.Option(help="memory for KV pages in GiB")]
OffloadGib = Annotated[float, typer.Option(help="host memory for sealed chunks that KV pages are taken from, in GiB")]
Utilization = Annotated[float, typer.Option(help="share of a GPU's memory to fill where --kv-cache-gib is not given")]
MaxSeqs = Annotated[int, typer.Option(help="most sequences in one step")]
MaxBatched = Annotated[int, typer.Option(help="most tokens in one step")]
MaxLen = Annotated[int | None, typer.Option(help="most tokens, prompt and answer, of one sequence")]
Patience = Annotated[int, typer.Option(help="a prompt lets others pass for that many times its own tokens; 0: none")]
Prefix = Annotated[bool, typer.Option(help="reuse the KV state of prefixes seen before")]
Batching = Annotated[Scheduling, typer.Option(help="continuous batching, or static batches for comparison")]
Dtype = Annotated[WeightType, typer.Option(help="dtype of weights and KV cache")]
CacheDtype = Annotated[CacheType, typer.Option(help="dtype of the KV cache: that of the weights, or FP8 (E4M3)")]
Weights = Annotated[LoadFormat, typer.Option(help="dummy: random weights of the model's config.json, to measure with")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="on a GPU, no compilation and no CUDA graphs")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda: the first GPU of CUDA_VISIBLE_DEVICES")]
Seed = Annotated[int, typer.Option(help="seed of requests that bring none")]

CalibratedScorer = Annotated[str | None, typer.Option(help=f"{_STAYS} {_SCORER}")]
CalibratedScope = Annotated[Scope | None, typer.Option(help=f"{_COMPETE} {_SCOPE}")]
PilotSeed = Annotated[int, typer.Option(help="seed of the pilot texts, and of a gate's training")]


def _config(
    model: Model = "smollm2", kv_retention: Retention = 0.5, scorer: ScorerName = None,
    scope: ScopeName = None, chunk_tokens: Chunk = 512, page_tokens: Page = 16, heads_per_page: Heads = 4,
    profile: Profiles = None, gate: Gate = None, decode_policy: DecodePolicy = None, kv_cache_gib: CacheGib = None,
    kv_offload_gib: OffloadGib = 0.0, gpu_memory_utilization: Utilization = 0.9, max_num_seqs: MaxSeqs = 32,
    max_num_batched_tokens: MaxBatched = 2048, max_model_len: MaxLen = None, prompt_patience: Patience = 16,
    enable_prefix_caching: Prefix = True, scheduling: Batching = Scheduling.continuous, dtype: Dtype = WeightType.auto,
    kv_cache_dtype: CacheDtype = CacheType.auto,
    load_format: Weights = LoadFormat.auto, enforce_eager: Eager = False, device: Device = "auto",
    seed: Seed = 0,
) -> EngineConfig:  # fmt: skip
    return EngineConfig(
        model=model, kv_retention=kv_retention, scorer=scorer, scope=None if scope is None else scope.value,
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens, heads_per_page=heads_per_page, profile=tuple(profile or ()), gate=gate,
        decode_policy=decode_policy, kv_cache_gib=kv_cache_gib, kv_offload_gib=kv_offload_gib,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, prompt_patience=prompt_patience, enable_prefix_caching=enable_prefix_caching,
        scheduling=scheduling.value, dtype=dtype.value, kv_cache_dtype=kv_cache_dtype.value,
        load_format=load_format.value, enforce_eager=enforce_eager, device=device, seed=seed,
    )  # fmt: skip


def calibration_config(
    model: Model = "smollm2", kv_retention: Retention = 0.5, scorer: CalibratedScorer = None,
    scope: CalibratedScope = None, chunk_tokens: Chunk = 512, page_tokens: Page = 16, heads_per_page: Heads = 4,
    gate: Gate = None, dtype: Dtype = WeightType.auto, load_format: Weights = LoadFormat.auto,
    device: Device = "auto", seed: PilotSeed = 0,
) -> EngineConfig:  # fmt: skip
    """What a calibration looks at, for `configured_by`; no engine is built, so the rest is as by default."""
    # A config must have room for a chunk in one step, whether or not there are any steps.
    step_tokens = max(EngineConfig.max_num_batched_tokens, chunk_tokens + EngineConfig.max_num_seqs)
    return _config(
        model=model, kv_retention=kv_retention, scorer=scorer, scope=scope, chunk_tokens=chunk_tokens,
        page_tokens=page_tokens, heads_per_page=heads_per_page, gate=gate, max_num_batched_tokens=step_tokens,
        dtype=dtype, load_format=load_format, device=device, seed=seed,
    )  # fmt: skip


def changed(config: EngineConfig, *names: str) -> dict[str, object]:
    """Of the fields called `names`, those that are not as by default."""
    return {name: value for name in names if (value := getattr(config, name)) != getattr(EngineConfig, name)}


def served_name(config: EngineConfig) -> str:
    """The model's name in the API: what was given, but of a local folder its last part, of a file that without suffix.

    Whoever asks is told it in every answer, and where a model lies is not theirs to know.
    """
    path = Path(config.model).expanduser()
    if not path.exists():
        return config.model
    named = path if path.name.strip(".") else path.resolve()  # "." and ".." have no name; a link keeps its own
    return named.name if path.is_dir() else named.stem


def shown_share(held: int, uncompressed: int) -> str:
    """What a sequence holds of what it would hold uncompressed, both in bytes."""
    return f"{held / 2**20:.1f} MiB of {uncompressed / 2**20:.1f} uncompressed"


def exit_code(error: TangramError) -> int:
    """1 where starting again may help, 2 where it does not."""
    return 1 if isinstance(error, EngineError) else 2


Command = Callable[..., None]


def configured_by(make: Callable[..., EngineConfig]) -> Callable[[Command], Command]:
    """A decorator: the command takes the options of `make`, whose `EngineConfig` becomes its first argument.

    Errors become exit code 2. An engine that has died while serving is exit code 1: starting it again may help.
    """
    shared = list(inspect.signature(make, eval_str=True).parameters.values())

    def decorated(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(**options: Any) -> None:
            try:
                config = make(**{parameter.name: options.pop(parameter.name) for parameter in shared})
                command(config, **options)
            except TangramError as error:
                _err.print(f"[red]error:[/red] {error}", highlight=False)
                raise typer.Exit(exit_code(error)) from error

        keyword = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature([entry.replace(kind=keyword) for entry in (*shared, *own)])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorated


with_config = configured_by(_config)  # for commands that build an engine
