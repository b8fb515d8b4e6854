"""`tangram generate`: complete one text, or answer a file of requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tangram.cli.answering import answer_prompt, describe_memory, escape_controls
from tangram.cli.batch import answer_batch
from tangram.cli.console import tell
from tangram.cli.options import number, with_config
from tangram.cli.telemetry import warnings_as_text
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.limits import TEMPERATURE, TOKEN_COUNT, check_size
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
    temperature: Annotated[
        float | None,
        number(
            TEMPERATURE,
            "temperature of sampling; 0 takes the likeliest token",
            show_default="the model's own",
        ),
    ] = None,
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
        answer_batch(
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
    from tangram.engine.build import build_engine

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
