"""The exact size of a KV cache for any model with a config.json, and how many caches fit.

It gives the size with ρ, pages and FP8, and the number of such caches beside the weights. A layer
of grouped-query attention stores 2 · H · D elements a token (keys and values). A layer of
multi-head latent attention stores one latent vector and one rotary key (DeepSeek-V2, section 2.1).
A sliding-window layer holds at most its window. Compressed sizes are the promise of Tangram's
profiles: at most ρ of every sealed chunk of the full-attention layers, and the raw tail whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tangram.cache.layout import Layout, adjacent_groups
from tangram.errors import ConfigError
from tangram.model.config_json import ModelConfig
from tangram.sizing.kv_shape import KVShape, read_shape
from tangram.sizing.weight_size import Weights
from tangram.types import Geometry

if TYPE_CHECKING:
    from rich.table import Table

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "int8"]
ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
_GIB = 2**30


@dataclass(frozen=True)
class KVSize:
    """The KV cache of one sequence of `context_tokens` tokens."""

    shape: KVShape
    context_tokens: int
    dtype: str
    retention: float
    page_tokens: int
    heads_per_page: int
    chunk_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds with nothing dropped, while no sliding window is full."""
        full = self.shape.full_layers
        windows = (len(self.shape.windows) - full) * self.shape.window_elements
        return (full * self.shape.layer_elements + windows) * ELEMENT_BYTES[self.dtype]

    @property
    def uncompressed_bytes(self) -> int:
        """The whole context with nothing dropped, unpaged."""
        whole = self.shape.full_layers * self.context_tokens * self.shape.layer_elements
        return (whole + self._window_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def compressed_bytes(self) -> int:
        """At most this much stays at retention ρ.

        It is ρ of the sealed chunks, and the raw tail and the windows whole.
        """
        return self._compressed_elements * ELEMENT_BYTES[self.dtype]

    @property
    def fp8_bytes(self) -> int:
        """`compressed_bytes` if each element were one byte (scales not counted)."""
        return self._compressed_elements * ELEMENT_BYTES["fp8"]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: Hp · 2 · P · D elements, half of it for MLA."""
        return self._layout.page_bytes(ELEMENT_BYTES[self.dtype])

    @property
    def pages(self) -> int:
        """Pages the sequence holds, at most; a window layer holds whole chunks."""
        return self._layout.count_held_pages(*divmod(self.context_tokens, self.chunk_tokens))

    @property
    def most_pages(self) -> int:
        """The most pages it is promised on its way there: a chunk is whole before it is sealed."""
        return self._layout.most_pages(self.context_tokens)

    def how_many_fit(self, memory_gib: float) -> int:
        """How many such sequences, sharing nothing, fit to their end into `memory_gib` GiB.

        Raises `ConfigError` unless it is positive.
        """
        return self._pages_in(memory_gib) // self.most_pages

    def capacity_tokens(self, memory_gib: float) -> int:
        """The tokens that fit into `memory_gib` GiB of KV pages, as the engine counts them.

        Its max_model_len is `context_tokens`; see `Layout.tokens_in`. Raises `ConfigError` unless
        the memory is positive.
        """
        return self._layout.tokens_in(self._pages_in(memory_gib), self.context_tokens)

    def _pages_in(self, memory_gib: float) -> int:
        if not (math.isfinite(memory_gib) and memory_gib > 0):
            raise ConfigError(f"memory_gib is {memory_gib}, it must be positive")
        return int(memory_gib * _GIB) // self.page_bytes

    @property
    def _window_elements(self) -> int:
        return self.shape.window_tokens(self.context_tokens) * self.shape.window_elements

    @property
    def _compressed_elements(self) -> int:
        chunks, tail_tokens = divmod(self.context_tokens, self.chunk_tokens)
        sealed_elements = (
            chunks * self.chunk_tokens * self.shape.full_layers * self.shape.layer_elements
        )
        raw_elements = tail_tokens * self.shape.full_layers * self.shape.layer_elements
        return math.floor(self.retention * sealed_elements) + raw_elements + self._window_elements

    @cached_property
    def _layout(self) -> Layout:
        """A layout that keeps ρ in total. A profile decides how many pages each group gets."""
        heads = self.shape.kv_heads
        full_layers = [layer for layer, window in enumerate(self.shape.windows) if window is None]
        groups = adjacent_groups(full_layers, heads, self.heads_per_page)
        chunk_pages = len(groups) * (self.chunk_tokens // self.page_tokens)
        budget = max(len(groups), math.floor(self.retention * chunk_pages))
        windows = self.shape.windows
        return Layout.build(
            # Neither the query heads nor the vocabulary affects the cache.
            Geometry(
                len(windows),
                heads,
                heads,
                self.shape.head_dim,
                1,
                self.context_tokens,
                windows,
                self.shape.value_dim,
                chunked=self.shape.chunked,
                window_heads=self.shape.window_heads,
            ),
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            heads_per_page=self.heads_per_page,
            max_tokens=self.context_tokens,
            groups=groups,
            sealed_pages=_spread(budget, len(groups)),
        )


def kv_size(
    model: str | Path | Mapping[str, Any] | ModelConfig,
    context_tokens: int,
    *,
    dtype: Dtype = "bf16",
    retention: float = 1.0,
    page_tokens: int = 16,
    heads_per_page: int = 4,
    chunk_tokens: int = 512,
) -> KVSize:
    """The size of one sequence. `model` is any argument of `read_config`, or its result.

    Raises `ConfigError` for an unknown model, a missing config field, and an option out of range.
    """
    options = {
        "context_tokens": context_tokens,
        "page_tokens": page_tokens,
        "heads_per_page": heads_per_page,
    }
    for name, value in {**options, "chunk_tokens": chunk_tokens}.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype is {dtype!r}, it must be one of {', '.join(ELEMENT_BYTES)}")
    if chunk_tokens % page_tokens:
        raise ConfigError(
            f"chunk_tokens is {chunk_tokens}, it must be a multiple of page_tokens ({page_tokens})"
        )
    shape = read_shape(model)
    _check_retention(retention, chunk_tokens // page_tokens)
    return KVSize(
        shape, context_tokens, dtype, retention, page_tokens, heads_per_page, chunk_tokens
    )


@dataclass(frozen=True)
class Fit:
    """How many sequences of one size fit into a memory beside the weights.

    The memory of steps is not counted.
    """

    size: KVSize
    weights: Weights
    memory_gib: float

    @property
    def cache_gib(self) -> float:
        """What the weights leave; negative if they do not fit themselves."""
        return self.memory_gib - self.weights.bytes / _GIB

    @property
    def sequences(self) -> int:
        """How many sequences, sharing nothing, fit into the rest to their end."""
        return self.size.how_many_fit(self.cache_gib) if self.cache_gib > 0 else 0

    @property
    def tokens(self) -> int:
        """The tokens of those sequences."""
        return self.sequences * self.size.context_tokens

    @property
    def capacity_tokens(self) -> int:
        """The tokens that fit, counted as `tangram serve` does with a max_model_len of this length.

        It has fewer pages: activations and CUDA graphs need memory, too.
        """
        return self.size.capacity_tokens(self.cache_gib) if self.cache_gib > 0 else 0


def fit(size: KVSize, weights: Weights, memory_gib: float) -> Fit:
    """The `Fit` of a size. Raises `ConfigError` unless the memory is positive."""
    if not (math.isfinite(memory_gib) and memory_gib > 0):
        raise ConfigError(f"memory_gib is {memory_gib}, it must be positive")
    return Fit(size, weights, memory_gib)


def render(size: KVSize, memory_gib: float | None = None, weights: Weights | None = None) -> Table:
    """A table for the terminal.

    With `memory_gib` it also says how many such sequences fit, `weights` subtracted.
    """
    from rich.table import Table

    table = Table(
        title=(
            f"KV cache of {size.shape.model}, {size.context_tokens:,} tokens, {size.dtype}, "
            f"kv_retention {size.retention:g}"
        )
    )
    table.add_column("what")
    table.add_column("size", justify="right")
    if weights is not None:
        form = weights.dtype if weights.quantization is None else weights.quantization
        said = f"weights, {_billions(weights.parameters)} parameters in {form} ({weights.source})"
        table.add_row(said, _gib(weights.bytes))
    table.add_row("per token", f"{size.bytes_per_token:,} bytes")
    table.add_row("nothing dropped", _gib(size.uncompressed_bytes))
    if size.retention < 1:
        table.add_row(f"kept at ρ = {size.retention:g}, at most", _gib(size.compressed_bytes))
    if ELEMENT_BYTES[size.dtype] > 1:
        table.add_row("the same in FP8", _gib(size.fp8_bytes))
    table.add_row(
        f"pages of {size.page_bytes:,} bytes",
        f"{size.pages:,} = {_gib(size.pages * size.page_bytes)}",
    )
    if memory_gib is not None and weights is None:
        table.add_row(
            f"sequences that fit into {memory_gib:g} GiB", f"{size.how_many_fit(memory_gib):,}"
        )
    elif memory_gib is not None and weights is not None:
        found = fit(size, weights, memory_gib)
        table.add_row(
            f"left of {memory_gib:g} GiB beside the weights",
            f"{max(0.0, found.cache_gib):,.2f} GiB",
        )
        table.add_row("sequences of this length that fit there", f"{found.sequences:,}")
        table.add_row("their tokens", f"{found.tokens:,}")
        table.add_row("tokens that fit, counted as `serve` does", f"{found.capacity_tokens:,}")
    return table


def as_json(size: KVSize, weights: Weights | None, memory_gib: float | None) -> dict[str, Any]:
    """The same figures as a JSON object; null where there is none."""
    found = None if memory_gib is None or weights is None else fit(size, weights, memory_gib)
    return {
        "model": size.shape.model,
        "context_tokens": size.context_tokens,
        "kv_cache_dtype": size.dtype,
        "kv_retention": size.retention,
        "parameters": None if weights is None else weights.parameters,
        "weights_dtype": None if weights is None else weights.dtype,
        "weights_quantization": None if weights is None else weights.quantization,
        "weights_source": None if weights is None else weights.source,
        "weights_bytes": None if weights is None else weights.bytes,
        "bytes_per_token": size.bytes_per_token,
        "uncompressed_bytes": size.uncompressed_bytes,
        "kept_bytes": size.compressed_bytes,
        "page_bytes": size.page_bytes,
        "pages": size.pages,
        "memory_gib": memory_gib,
        "sequences": None if found is None else found.sequences,
        "tokens": None if found is None else found.tokens,
        "capacity_tokens": None if found is None else found.capacity_tokens,
    }


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.0f} M"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:,.2f} GiB"


def _spread(budget: int, groups: int) -> list[int]:
    if not groups:
        return []
    pages, extra = divmod(budget, groups)
    return [pages + (group < extra) for group in range(groups)]


def _check_retention(retention: float, chunk_pages: int) -> None:
    if not (math.isfinite(retention) and 0 < retention <= 1):
        raise ConfigError(f"retention is {retention}, it must lie in (0, 1]: 1.0 keeps everything")
    if retention * chunk_pages < 1:
        raise ConfigError(
            f"retention is {retention}, but a chunk has {chunk_pages} pages and every head keeps "
            f"at least one: use at least {1 / chunk_pages:g}, a larger chunk_tokens or a smaller "
            "page_tokens"
        )
