"""The `tangram` command: serve, chat, generate, calibrate, size, bench."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from tangram.cli import bench
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.errors import TangramError
from tangram.size import kv_size, render
from tangram.types import SamplingParams

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(bench.commands, name="bench")
_out, _err = Console(), Console(stderr=True)

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


class SizeType(StrEnum):
    """The dtype that `size` reckons with."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


Model = Annotated[str, MODEL]
Retention = Annotated[float, typer.Option("--kv-retention", help="fraction of KV entries kept; 1.0 keeps everything")]
ScorerName = Annotated[str, typer.Option(help="what decides which entries stay; see docs/scorers.md")]
ScopeName = Annotated[Scope, typer.Option(help="heads compete within a layer or across the model")]
Chunk = Annotated[int, typer.Option(help="tokens that are computed and sealed in one piece")]
Page = Annotated[int, typer.Option(help="tokens of a page")]
Heads = Annotated[int, typer.Option(help="KV heads that share a page table")]
Profiles = Annotated[list[str] | None, typer.Option("--profile", help="profile file; repeat for several kv-retentions")]
Gate = Annotated[str | None, typer.Option(help="gate file of the scorer fastkvzip")]
DecodePolicy = Annotated[str | None, typer.Option(help="file of `tangram bench calibrate-policy`, for a GPU")]
CacheGib = Annotated[float | None, typer.Option(help="memory for KV pages in GiB")]
MaxSeqs = Annotated[int, typer.Option(help="most sequences in one step")]
MaxBatched = Annotated[int, typer.Option(help="most tokens in one step")]
MaxLen = Annotated[int | None, typer.Option(help="most tokens, prompt and answer, of one sequence")]
Prefix = Annotated[bool, typer.Option(help="reuse the KV state of prefixes seen before")]
Batching = Annotated[Scheduling, typer.Option(help="continuous batching, or static batches for comparison")]
Dtype = Annotated[WeightType, typer.Option(help="dtype of weights and KV cache")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Seed = Annotated[int, typer.Option(help="seed of requests that bring none")]


def _config(
    model: Model = "smollm2", kv_retention: Retention = 0.5, scorer: ScorerName = "keydiff",
    scope: ScopeName = Scope.model, chunk_tokens: Chunk = 512, page_tokens: Page = 16, heads_per_page: Heads = 4,
    profile: Profiles = None, gate: Gate = None, decode_policy: DecodePolicy = None, kv_cache_gib: CacheGib = None,
    max_num_seqs: MaxSeqs = 32,
    max_num_batched_tokens: MaxBatched = 2048, max_model_len: MaxLen = None, enable_prefix_caching: Prefix = True,
    scheduling: Batching = Scheduling.continuous, dtype: Dtype = WeightType.auto, device: Device = "auto",
    seed: Seed = 0,
) -> EngineConfig:  # fmt: skip
    return EngineConfig(
        model=model, kv_retention=kv_retention, scorer=scorer, scope=scope.value, chunk_tokens=chunk_tokens,
        page_tokens=page_tokens, heads_per_page=heads_per_page, profile=tuple(profile or ()), gate=gate,
        decode_policy=decode_policy,
        kv_cache_gib=kv_cache_gib, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, enable_prefix_caching=enable_prefix_caching, scheduling=scheduling.value,
        dtype=dtype.value, device=device, seed=seed,
    )  # fmt: skip


def _with_config(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is the `EngineConfig` made of the shared options; errors become exit code 2."""
    shared = list(inspect.signature(_config, eval_str=True).parameters.values())
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    def run(**options: Any) -> None:
        try:
            config = _config(**{parameter.name: options.pop(parameter.name) for parameter in shared})
            command(config, **options)
        except TangramError as error:
            _err.print(f"[red]error:[/red] {error}", highlight=False)
            raise typer.Exit(2) from error

    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature([entry.replace(kind=keyword) for entry in (*shared, *own)])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _log_to_terminal() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=_err, show_path=False)], force=True
    )
    # Conversion and weight loading have progress bars of their own; requests are in the metrics.
    for name in ("httpx", "transformers", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


@app.command()
@_with_config
def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="name of the model in the API; MODEL if not given")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="key that requests must carry", envvar="TANGRAM_API_KEY")] = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    # Imports and weights live as long as the process: collecting among them costs half a second now and a pause later.
    gc.disable()
    from tangram.engine.setup import build_engine
    from tangram.serve.http import serve_forever

    _log_to_terminal()
    engine = build_engine(config)
    gc.freeze()
    gc.enable()
    serve_forever(engine, host=host, port=port, served_model_name=served_model_name or config.model, api_key=api_key)


@app.command()
@_with_config
def generate(
    config: EngineConfig,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="the text to complete")],
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
) -> None:
    """Complete one text and say what the KV cache held."""
    from tangram.engine.llm import LLM

    output = LLM.from_config(config).generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature))[0]
    _out.print(output.outputs[0].text, highlight=False, markup=False)
    _err.print(
        f"{len(output.prompt_token_ids)} prompt tokens, KV {_share(output.kv_bytes, output.kv_bytes_uncompressed)}"
    )


@app.command()
@_with_config
def chat(
    config: EngineConfig,
    max_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
) -> None:
    """Talk to MODEL in the terminal; an empty line ends the conversation."""
    from tangram.engine.llm import LLM

    llm = LLM.from_config(config)
    messages: list[dict[str, str]] = []
    while question := _out.input("[bold]you[/bold]  ").strip():
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, SamplingParams(max_tokens=max_tokens, temperature=temperature))[0]
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        _out.print(answer, highlight=False, markup=False)
        held = _share(output.kv_bytes, output.kv_bytes_uncompressed)
        _err.print(f"[dim]{output.num_cached_tokens} tokens from the cache, KV {held}[/dim]")


def _share(held: int, uncompressed: int) -> str:
    return f"{held / 2**20:.1f} MiB of {uncompressed / 2**20:.1f} uncompressed"


@app.command()
@_with_config
def calibrate(
    config: EngineConfig,
    output: Annotated[Path, typer.Option("--output", "-o", help="where the profile goes")],
    samples: Annotated[int, typer.Option(help="pilot samples")] = 50,
    data: Annotated[Path | None, typer.Option(help="calibrate on these texts instead (.jsonl, or plain text)")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", help="published budgets (.npz) to convert")] = None,
) -> None:
    """Measure how much each head of MODEL needs, and write the profile."""
    profile = _import(config, import_from) if import_from else _measure(config, samples, data)
    profile.save(output)
    stability = profile.calibration.rank_stability
    agreement = f", rank stability {stability.mean:.3f} (lowest {stability.min:.3f})" if stability else ""
    _err.print(f"{output}: realised retention {profile.realised_retention:.4f} of {profile.kv_retention}{agreement}")


def _import(config: EngineConfig, path: Path) -> Profile:
    from tangram.compress.scorers import make_scorer
    from tangram.engine.setup import scorer_spec
    from tangram.import_profiles import import_published

    return import_published(
        path, config.model, scorer_spec(make_scorer(config.scorer)), config.scope, config.kv_retention,
        chunk_tokens=config.chunk_tokens, page_tokens=config.page_tokens, heads_per_page=config.heads_per_page,
    )  # fmt: skip


def _measure(config: EngineConfig, samples: int, data: Path | None) -> Profile:
    from tangram.calibrate import read_texts
    from tangram.compress.scorers import make_scorer
    from tangram.engine.setup import calibrate_model
    from tangram.model.load import load_model
    from tangram.pilots import pilot_texts

    texts = (
        read_texts(data)
        if data
        else pilot_texts(samples, config.seed, min_characters=max(8_000, 6 * config.chunk_tokens))
    )
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    scorer = make_scorer(config.scorer, gate=Path(config.gate) if config.gate else None)
    source = str(data) if data else f"built-in pilot texts, seed {config.seed}"
    return calibrate_model(loaded, scorer, config, retentions=[config.kv_retention], texts=texts, source=source)[0]


@app.command()
def size(
    model: Annotated[
        str, typer.Argument(help="a preset such as llama-3.1-8b, a folder with config.json, or such a file")
    ],
    context: Annotated[int, typer.Option(help="tokens of one sequence")] = 32_000,
    dtype: Annotated[SizeType, typer.Option(help="dtype of the cache")] = SizeType.bf16,
    kv_retention: Retention = 1.0,
    memory_gib: Annotated[
        float | None, typer.Option(help="also say how many sequences fit in this much memory")
    ] = None,
    chunk_tokens: Chunk = 512,
    page_tokens: Page = 16,
    heads_per_page: Heads = 4,
) -> None:
    """Print the exact size of a KV cache (GQA, MHA and MLA models)."""
    try:
        result = kv_size(
            model, context, dtype=dtype.value, retention=kv_retention, page_tokens=page_tokens,
            heads_per_page=heads_per_page, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        _out.print(render(result, memory_gib))
    except TangramError as error:
        _err.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(2) from error


def main() -> None:
    """The entry point of the `tangram` command."""
    app()
