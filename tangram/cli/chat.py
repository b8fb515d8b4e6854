"""`tangram chat`: talk to a model in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tangram.cli.options import shown_share, with_config
from tangram.config import EngineConfig
from tangram.types import SamplingParams

_out, _err = Console(), Console(stderr=True)


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
        held = shown_share(output.kv_bytes, output.kv_bytes_uncompressed)
        _err.print(f"[dim]{output.num_cached_tokens} tokens from the cache, KV {held}[/dim]")
