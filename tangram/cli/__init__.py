"""The `tangram` command: serve, chat, generate, calibrate, eval, size, bench."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tangram.cli import ablation, bench, calibration, evaluate, serving
from tangram.cli.batch import answer_batch
from tangram.cli.gate import refuse_with_gate, train_and_report
from tangram.cli.options import (
    Chunk,
    Heads,
    Page,
    Retention,
    SizeType,
    calibration_config,
    changed,
    configured_by,
    served_name,
    with_config,
)
from tangram.cli.telemetry import LogForm, LogFormat, MetricsAliases, OtlpEndpoint, OverflowEvery, logging_as
from tangram.compress.profile import Profile
from tangram.config import EngineConfig
from tangram.errors import ConfigError, TangramError
from tangram.size import kv_size, render
from tangram.types import SamplingParams

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
serving.commands.command()(ablation.ablation)
bench.commands.add_typer(serving.commands, name="serving")
app.command("eval")(evaluate.evaluate)
app.add_typer(bench.commands, name="bench")
_out, _err = Console(), Console(stderr=True)


@app.command()
@with_config
def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="name of the model in the API; MODEL if not given, of a path its last part")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="a key that requests may carry, again for more; in the variable with spaces between",
            envvar="TANGRAM_API_KEY",
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(help="most megabytes of a request's body")] = 16.0,
    max_queue: Annotated[
        int, typer.Option(help="while so many completions wait, new requests are told to come back later")
    ] = 1024,
    request_timeout_s: Annotated[
        float, typer.Option(help="most seconds from a request to the end of its answer")
    ] = 3600,
    shutdown_grace_s: Annotated[float, typer.Option(help="seconds that running answers get to end at SIGTERM")] = 20,
    log_format: LogFormat = LogForm.text,
    metrics_aliases: MetricsAliases = None,
    otlp_endpoint: OtlpEndpoint = None,
    overflow_every: OverflowEvery = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    # Imports and weights live as long as the process: collecting among them costs half a second now and a pause later.
    gc.disable()
    from tangram.engine.setup import build_engine
    from tangram.serve.bridge import Limits
    from tangram.serve.guard import Protection
    from tangram.serve.http import Telemetry, serve_forever
    from tangram.serve.tracing import traces_to

    name = served_model_name or served_name(config)
    with logging_as(log_format):
        protection = Protection(tuple(api_key or ()), max_body_mb)
        limits = Limits(request_timeout_s, max_queue=max_queue)
        telemetry = Telemetry(metrics_aliases is not None, traces_to(otlp_endpoint, name))
        engine = build_engine(replace(config, max_queue=max_queue, overflow_every=overflow_every))
        gc.freeze()
        gc.enable()
        serve_forever(
            engine, host=host, port=port, served_model_name=name, protection=protection, limits=limits,
            telemetry=telemetry, shutdown_grace_s=shutdown_grace_s,
        )  # fmt: skip


@app.command()
@with_config
def generate(
    config: EngineConfig,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="the text to complete")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens to generate; 128 if not given")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token, which is what happens if not given")
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(help="instead of a prompt, a file of requests in OpenAI's batch format (.jsonl)")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where the answers to --batch go; what is there is skipped")
    ] = None,
) -> None:
    """Complete one text and say what the KV cache held; or answer a file of requests."""
    if batch is not None:
        answer_batch(config, batch, output, {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature})
        return
    if prompt is None or output is not None:
        raise ConfigError(
            "prompt is not set or output is without batch: give -p TEXT, or --batch IN.jsonl -o OUT.jsonl"
        )
    from tangram.engine.llm import LLM

    sampling = SamplingParams(max_tokens=128 if max_tokens is None else max_tokens, temperature=temperature or 0.0)
    answer = LLM.from_config(config).generate(prompt, sampling)[0]
    _out.print(answer.outputs[0].text, highlight=False, markup=False)
    _err.print(
        f"{len(answer.prompt_token_ids)} prompt tokens, KV {_share(answer.kv_bytes, answer.kv_bytes_uncompressed)}"
    )


@app.command()
@with_config
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
@configured_by(calibration_config)
def calibrate(
    config: EngineConfig,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="where the profile goes")] = None,
    samples: Annotated[int | None, typer.Option(help="pilot samples; 50 if not given")] = None,
    data: Annotated[Path | None, typer.Option(help="calibrate on these texts instead (.jsonl, or plain text)")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", help="published budgets (.npz) to convert")] = None,
    train_gate: Annotated[
        Path | None, typer.Option(help="instead of a profile, train a gate for the scorer fastkvzip, and write it here")
    ] = None,
    plot: calibration.Plot = None,
    report: calibration.ReportFile = None,
    also_at: calibration.AlsoAt = None,
) -> None:
    """Measure how much each head of MODEL needs, and write the profile; or train a gate."""
    _refuse_ignored(config, samples, data, import_from, train_gate)
    samples = 50 if samples is None else samples
    if train_gate is not None:
        others = {"--output": output, "--import": import_from, "--plot": plot, "--report": report, "--also-at": also_at}
        refuse_with_gate(config, others)
        train_and_report(config, train_gate, _texts(config, samples, data), _source(config, data))
        return
    if output is None:
        raise ConfigError("output is not set: give -o PROFILE.json, or --train-gate GATE.safetensors")
    study = calibration.Study.asked(plot, report, also_at, import_from)
    profile = _import(config, import_from) if import_from else _measure(config, samples, data, study)
    profile.save(output)
    stability = profile.calibration.rank_stability
    agreement = f", rank stability {stability.mean:.3f} (lowest {stability.min:.3f})" if stability else ""
    _err.print(f"{output}: realised retention {profile.realised_retention:.4f} of {profile.kv_retention}{agreement}")


def _refuse_ignored(
    config: EngineConfig, samples: int | None, data: Path | None, import_from: Path | None, train_gate: Path | None
) -> None:
    """Raise `ConfigError` for what would not be looked at beside other options; `refuse_with_gate` knows more."""
    if samples is not None and data is not None:
        raise ConfigError(
            f"samples is {samples} and data {str(data)!r}: give one of them, samples counts the built-in pilot texts"
        )
    if data is not None and train_gate is None and config.seed != EngineConfig.seed:
        raise ConfigError(f"seed is {config.seed}, with --data there are no pilot texts to draw: leave it out")
    if import_from is not None and train_gate is None:
        texts = {name: value for name, value in (("samples", samples), ("data", data)) if value is not None}
        for name, value in (texts | changed(config, "dtype", "load_format", "device", "seed")).items():
            raise ConfigError(f"{name} is {value}, with --import no text is read and no model loaded: leave it out")


def _import(config: EngineConfig, path: Path) -> Profile:
    from tangram.compress.scorers import choose, make_scorer
    from tangram.engine.setup import scorer_spec
    from tangram.import_profiles import import_published

    chosen = choose(config, None)
    scorer = make_scorer(chosen.scorer, gate=Path(config.gate) if config.gate else None)
    return import_published(
        path, config.model, scorer_spec(scorer), chosen.scope, config.kv_retention,
        chunk_tokens=config.chunk_tokens, page_tokens=config.page_tokens, heads_per_page=config.heads_per_page,
    )  # fmt: skip


def _measure(config: EngineConfig, samples: int, data: Path | None, study: calibration.Study) -> Profile:
    from tangram.calibrate import read_kinds
    from tangram.compress.scorers import choose, make_scorer
    from tangram.engine.setup import calibrate_model
    from tangram.model.load import load_model
    from tangram.pilots import pilot_kinds

    texts, source = _texts(config, samples, data), _source(config, data)
    study.check(texts)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, load_format=config.load_format)
    config = replace(config, **(chosen := choose(config, loaded.fingerprint))._asdict())
    gate = Path(config.gate) if config.gate else None
    scorer = make_scorer(chosen.scorer, gate=gate, model=loaded.fingerprint)
    profiles = calibrate_model(
        loaded, scorer, chosen.scope, config, retentions=study.retentions(config.kv_retention), texts=texts,
        source=source, observe=study.observe,
    )  # fmt: skip
    study.publish(profiles, read_kinds(data) if data else pilot_kinds(samples), source, config)
    return profiles[0]


def _texts(config: EngineConfig, samples: int, data: Path | None) -> list[str]:
    from tangram.calibrate import read_texts
    from tangram.pilots import pilot_texts

    if data:
        return read_texts(data)
    return pilot_texts(samples, config.seed, min_characters=max(8_000, 6 * config.chunk_tokens))


def _source(config: EngineConfig, data: Path | None) -> str:
    return str(data) if data else f"built-in pilot texts, seed {config.seed}"


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
