"""`tangram generate`: complete one text, or answer a file of requests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.answering import answer_prompt, describe_memory, escape_controls
from tangram.cli.checks import check_regular
from tangram.cli.console import progress, tell
from tangram.cli.options import Temperature, number, with_config
from tangram.cli.telemetry import warnings_as_text
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.limits import TOKEN_COUNT, check_size
from tangram.model.source import name_served_model
from tangram.types import SamplingParams

_STANDARD_INPUT = "-"
_MOST_PIPED_BYTES = 256 * 2**20  # more than any model takes; a pipe may never end


@with_config
def generate(
    config: EngineConfig,
    text: Annotated[
        str | None,
        typer.Argument(
            help="the text to complete; - reads standard input, as does a pipe without a text",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="the same text, as an option")
    ] = None,
    max_tokens: Annotated[
        int | None, number(TOKEN_COUNT, "maximum tokens to generate; 128 if not given")
    ] = None,
    temperature: Temperature = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            help="file of requests in OpenAI's batch format (.jsonl), instead of a prompt"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="file of the answers to --batch; requests in it are skipped"
        ),
    ] = None,
) -> None:
    """Complete one text and report what the KV cache held, or answer a file of requests."""
    if text is not None and prompt is not None:
        raise ConfigError(f"text is {text!r} and prompt is {prompt!r}: give one of them")
    prompt = text if prompt is None else prompt
    if batch is not None:
        _answer_batch(
            config,
            batch,
            output,
            {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature},
        )
        return
    if output is not None:
        raise ConfigError(
            "prompt is not set or output is without batch: give -p TEXT, or --batch IN.jsonl -o "
            "OUT.jsonl"
        )
    asked = _find_text(prompt)
    sampling = SamplingParams(
        max_tokens=128 if max_tokens is None else max_tokens, temperature=temperature
    )
    with warnings_as_text():
        _complete(config, asked, sampling)


def _find_text(prompt: str | None) -> str:
    """The text to complete: `prompt`, or standard input. Raises `ConfigError` if there is none."""
    if prompt == _STANDARD_INPUT or (prompt is None and not sys.stdin.isatty()):
        return _read_pipe()
    if prompt is None:
        raise ConfigError(
            "prompt is not set: give the text after MODEL or with -p TEXT, a text on standard "
            "input, or --batch IN.jsonl -o OUT.jsonl"
        )
    return prompt


def _read_pipe() -> str:
    """Standard input without its last line break, which `echo` adds.

    Raises `ConfigError` if it is not text.
    """
    data = sys.stdin.buffer.read(_MOST_PIPED_BYTES + 1)
    if len(data) > _MOST_PIPED_BYTES:
        raise ConfigError(
            f"prompt on standard input has more than {_MOST_PIPED_BYTES} bytes: shorten it"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt on standard input is no text in UTF-8: {error}") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(
            "prompt is not set and standard input is empty: give -p TEXT, or a text there"
        )
    return text


def _complete(config: EngineConfig, text: str, sampling: SamplingParams) -> None:
    """Stream the completion of `text` to standard output; print its figures to standard error."""
    from tangram.engine.setup.build import build_engine

    engine = build_engine(config)
    check_size([text], "prompt", engine.max_model_len, engine.codec.longest_token_bytes)
    clean = escape_controls if sys.stdout.isatty() else str

    def write(piece: str) -> None:
        sys.stdout.write(clean(piece))
        sys.stdout.flush()

    answer = answer_prompt(engine, engine.codec.encode(text), sampling, write)
    write("\n")
    if answer.usage is not None:
        default = 1.0 if engine.layout.keeps_everything else config.kv_retention
        memory = describe_memory(answer.usage, default, config.chunk_tokens)
        line = f"{answer.usage.prompt_tokens} prompt tokens · {answer.speed} · {memory}"
        tell(line, "dim")


def _answer_batch(
    config: EngineConfig, source: Path, target: Path | None, others: Mapping[str, object]
) -> None:
    """Answer the requests of `source` into `target`; exit with 1 if a line got an error.

    Raises `ConfigError` if one of the `others` is set too.
    """
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, with --batch each line has its own: leave it out"
            )
    if target is None:
        raise ConfigError("output is not set: --batch needs -o OUT.jsonl for the answers")
    check_regular("output", target)
    if not source.is_file():
        raise ConfigError(f"batch is {str(source)!r}, there is no such file")
    from tangram.engine.setup.build import build_engine
    from tangram.link.linked_engine import LinkedEngine
    from tangram.serve.batch import BatchFiles, answer_all
    from tangram.serve.service import Service

    files = BatchFiles(source, target)
    with files.output:
        engine = LinkedEngine(build_engine(config))
        service = Service(engine, name_served_model(config.model))
        with progress() as bar:
            task = bar.add_task("Answering", total=files.total, completed=files.skipped)
            # Twice as many as can run at once, so that one always waits.
            failed = answer_all(
                service, files, at_once=2 * config.max_num_seqs, on_line=lambda: bar.advance(task)
            )
    answered = files.total - files.skipped - failed
    tell(f"{target}: {answered} answered, {failed} with errors, {files.skipped} skipped")
    if failed:
        raise typer.Exit(1)
