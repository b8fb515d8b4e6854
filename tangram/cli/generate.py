"""`tangram generate`: complete one text, or answer a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tangram.cli.batch import answer_batch
from tangram.cli.options import shown_share, with_config
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.types import SamplingParams

_out, _err = Console(), Console(stderr=True)


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
        f"{len(answer.prompt_token_ids)} prompt tokens, KV {shown_share(answer.kv_bytes, answer.kv_bytes_uncompressed)}"
    )
