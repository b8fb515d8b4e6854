"""`tangram size`: the memory that the weights and the KV cache of a model take."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tangram.cli.console import output, tell
from tangram.cli.options import (
    CacheDtype,
    Chunk,
    Heads,
    Page,
    Panel,
    Quantization,
    Retention,
    number,
    option,
)
from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.limits import Bounds
from tangram.model.config_json import ModelConfig, read_config
from tangram.sizing.cache_size import as_json, kv_size, render
from tangram.sizing.weight_size import Weights, read_weights, weights_dtype

# The dtypes of `serve`, and the short names that this command took before.
_SHORT: dict[str, Any] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG = {short: long for long, short in _SHORT.items()}

Named = Annotated[
    str,
    typer.Argument(
        help="a preset such as llama-3.1-8b, a Hugging Face id, a config.json, or its folder"
    ),
]
Dtype = Annotated[
    str,
    option(
        Panel.model,
        "dtype of weights and KV cache: auto, float32, bfloat16 or float16",
        metavar="DTYPE",
    ),
]
MemoryGib = Annotated[
    float | None,
    number(
        Bounds(0.0, 2.0**40, open_low=True),
        "print how many such sequences fit into this memory beside the weights, and how many "
        "tokens, counted as serve does",
    ),
]


def size(
    model: Named,
    context_tokens: Annotated[int, number(Bounds(1, 10**12), "tokens of a context")] = 32_000,
    memory_gib: MemoryGib = None,
    as_object: Annotated[
        bool, typer.Option("--json", help="print a JSON object, in bytes")
    ] = False,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: CacheDtype = "auto",
    kv_retention: Retention = EngineConfig.kv_retention,
    chunk_tokens: Chunk = 512,
    page_tokens: Page = 16,
    heads_per_page: Heads = 4,
) -> None:
    """Print the size of weights and KV cache, and how many sequences fit (GQA, MHA, MLA)."""
    config = read_config(model)
    computed = weights_dtype(config, "auto" if dtype == "fp8" else _LONG.get(dtype, dtype))
    if dtype == "fp8" and kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError(
            f"dtype is fp8, which is that of the KV cache, but kv_cache_dtype is {kv_cache_dtype}: "
            "give one of them"
        )
    cached = "fp8" if dtype == "fp8" else kv_cache_dtype
    weights, missing = _weights(config, computed, quantization)
    found = kv_size(
        config,
        context_tokens,
        dtype=_SHORT[computed] if cached == "auto" else cached,
        retention=kv_retention,
        page_tokens=page_tokens,
        heads_per_page=heads_per_page,
        chunk_tokens=chunk_tokens,
    )
    if weights is None and memory_gib is not None:
        raise ConfigError(
            f"memory_gib is {memory_gib}, but the size of the weights is not known: {missing}"
        )
    if as_object:
        typer.echo(json.dumps(as_json(found, weights, memory_gib), indent=1))
        return
    output().print(render(found, memory_gib, weights))
    if weights is None:
        tell(f"The size of the weights is not known: {missing}")


def _weights(
    config: ModelConfig, dtype: str, quantization: str | None
) -> tuple[Weights | None, str]:
    """The model's weights, or why their size is not known."""
    try:
        return read_weights(config, dtype, quantization), ""
    except ConfigError as error:
        return None, str(error)
