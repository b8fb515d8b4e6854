"""`tangram size`: what the KV cache of any model takes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tangram.cli.options import Chunk, Heads, Page, Retention, SizeType
from tangram.errors import TangramError
from tangram.size import kv_size, render

_out, _err = Console(), Console(stderr=True)


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
