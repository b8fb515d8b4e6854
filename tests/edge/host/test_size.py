"""The exact sizes of known models, the promise of ρ, and the refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tangram.cache.layout import Layout
from tangram.errors import ConfigError
from tangram.sizing.cache_size import kv_size, render
from tangram.sizing.kv_shape import presets, read_shape
from tangram.types import Geometry
from tests.mentions import mentioning

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "gib", "bytes_per_token"),
    [
        ("llama-3.1-8b", 3.91, 131_072),
        ("llama-3.1-70b", 9.77, 327_680),
        ("llama-3.1-405b", 15.38, 516_096),
        ("qwen3-32b", 7.81, 262_144),
        ("mistral-large-2", 10.74, 360_448),
        ("deepseek-v3", 2.09, 70_272),
        ("kimi-k2", 2.09, 70_272),
    ],
)
def test_known_models_at_32000_tokens(model: str, gib: float, bytes_per_token: int) -> None:
    size = kv_size(model, 32_000)
    assert size.bytes_per_token == bytes_per_token
    assert size.uncompressed_bytes == 32_000 * bytes_per_token
    assert round(size.uncompressed_bytes / GIB, 2) == gib


def test_sliding_window_layers_hold_at_most_their_window() -> None:
    gemma, oss = kv_size("gemma-3-12b", 100_000), kv_size("gpt-oss-20b", 100_000)
    assert gemma.uncompressed_bytes == (8 * 100_000 + 40 * 1024) * 2 * 8 * 256 * 2
    assert oss.uncompressed_bytes == (12 * 100_000 + 12 * 128) * 2 * 8 * 64 * 2
    short = kv_size("gemma-3-12b", 500)
    assert short.uncompressed_bytes == 500 * short.bytes_per_token


@pytest.mark.parametrize("name", list(presets()))
def test_the_presets_agree_with_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    entry = json.loads(
        (Path(__file__).parents[3] / "tangram" / "model" / "size_presets.json").read_text("utf-8")
    )[name]["config"]
    family = {"kimi_k2": "deepseek_v3"}.get(entry["model_type"], entry["model_type"])
    fields = {key: value for key, value in entry.items() if key != "model_type"}
    theirs = transformers.CONFIG_MAPPING[family](**fields).get_text_config()
    ours = read_shape(name)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    assert ours.windows == tuple(
        None if kind == "full_attention" else theirs.sliding_window for kind in kinds
    )
    if ours.latent:
        assert ours.layer_elements == theirs.kv_lora_rank + theirs.qk_rope_head_dim
    else:
        assert ours.layer_elements == 2 * theirs.num_key_value_heads * theirs.head_dim


@pytest.mark.parametrize(
    ("dtype", "factor"), [("fp32", 2.0), ("bf16", 1.0), ("fp16", 1.0), ("fp8", 0.5), ("int8", 0.5)]
)
def test_bytes_follow_the_dtype(dtype: Any, factor: float) -> None:
    for model in ("qwen3-4b", "deepseek-v3"):
        size, reference = kv_size(model, 10_000, dtype=dtype), kv_size(model, 10_000)
        assert size.uncompressed_bytes == factor * reference.uncompressed_bytes
        assert size.fp8_bytes * 2 == reference.uncompressed_bytes


def test_only_sealed_chunks_shrink_and_the_tail_counts_whole() -> None:
    token = kv_size("qwen3-4b", 1).bytes_per_token
    assert kv_size("qwen3-4b", 511, retention=0.3).compressed_bytes == 511 * token
    assert kv_size("qwen3-4b", 512, retention=0.5).compressed_bytes == 256 * token
    assert kv_size("qwen3-4b", 1024 + 100, retention=0.25).compressed_bytes == (256 + 100) * token
    assert (
        kv_size("gemma-3-12b", 2048, retention=0.5).compressed_bytes
        == (8 * 1024 + 40 * 1024) * 2 * 8 * 256 * 2
    )


shapes = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 9),
        "num_attention_heads": st.just(8),
        "num_key_value_heads": st.sampled_from([1, 2, 3, 8]),
        "head_dim": st.sampled_from([16, 64]),
        "sliding_window": st.sampled_from([None, 20, 64]),
        "sliding_window_pattern": st.sampled_from([1, 2, 3]),
    }
)
latent_shapes = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 9),
        "kv_lora_rank": st.sampled_from([16, 512]),
        "qk_rope_head_dim": st.just(8),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    config=shapes | latent_shapes,
    tokens=st.integers(1, 700),
    retention=st.floats(0.25, 1.0),
    heads_per_page=st.integers(1, 5),
)
def test_pages_hold_the_promise(
    config: dict[str, Any], tokens: int, retention: float, heads_per_page: int
) -> None:
    def size(kept: float) -> Any:
        return kv_size(
            config,
            tokens,
            retention=kept,
            page_tokens=8,
            heads_per_page=heads_per_page,
            chunk_tokens=32,
        )

    shape = read_shape(config)
    geometry = Geometry(
        len(shape.windows),
        shape.kv_heads,
        8,
        shape.head_dim,
        100,
        1000,
        shape.windows,
        shape.value_dim,
    )
    whole = Layout.lay_out_uncompressed(
        geometry, chunk_tokens=32, page_tokens=8, heads_per_page=heads_per_page, max_tokens=tokens
    )
    assert size(1.0).pages == whole.count_held_pages(*divmod(tokens, 32))
    assert (
        size(1.0).pages * size(1.0).page_bytes
        >= size(1.0).uncompressed_bytes
        == size(1.0).compressed_bytes
    )
    # Window layers keep the chunks they still see whole.
    window_pages = min(tokens // 32, whole.window_chunks) * whole.window_span_pages
    raw_pages = -(-(tokens % 32) // 8) * len(whole.groups)
    kept = size(retention)
    assert (
        kept.pages - window_pages - raw_pages
        <= retention * (tokens // 32) * whole.full_groups * 4 + 1e-6
    )
    assert kept.pages <= kept.most_pages
    assert kept.compressed_bytes <= kept.uncompressed_bytes


def test_how_many_fit_leaves_space_for_the_peak() -> None:
    size = kv_size("llama-3.1-8b", 32_000)
    assert size.pages == size.most_pages and size.how_many_fit(80) == 20
    latent = kv_size("deepseek-v3", 32_000)  # in groups of 4 of its 61 layers
    assert latent.pages * latent.page_bytes == latent.uncompressed_bytes * 64 // 61
    assert latent.how_many_fit(80) == 36
    compressed = kv_size("llama-3.1-8b", 32_000, retention=0.25)
    whole_chunk_bytes = 512 * compressed.bytes_per_token
    at_least = int(80 * GIB / (compressed.compressed_bytes + whole_chunk_bytes))
    assert at_least <= compressed.how_many_fit(80) <= 80 * GIB / compressed.compressed_bytes
    chunk = kv_size("llama-3.1-8b", 512, retention=0.5)
    raw_gib = chunk.uncompressed_bytes / GIB
    assert chunk.how_many_fit(raw_gib) == 1  # half of it stays, but the raw chunk comes first
    assert chunk.how_many_fit(raw_gib * 0.999) == 0
    with pytest.raises(ConfigError, match=mentioning("memory_gib 0")):
        chunk.how_many_fit(0)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 4096}, (4096,) * 4),  # Mistral 7B v0.1
        ({"sliding_window": 4096, "use_sliding_window": False}, (None,) * 4),  # Qwen2
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 4096),
        ),
        ({"model_type": "gemma2"}, (4096, None, 4096, None)),
        ({"sliding_window": None}, (None,) * 4),
        (
            {
                "num_kv_shared_layers": 2,  # Gemma 3n
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 512,
            },
            (512, None),
        ),
        # Llama 4 as it is published.
        ({"attention_chunk_size": 512, "no_rope_layers": []}, (512, 512, 512, None)),
        ({"attention_chunk_size": 512, "no_rope_layer_interval": 2}, (512, None) * 2),
    ],
)
def test_the_several_ways_to_declare_windows(
    config: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    base = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    assert read_shape({**base, **config}).windows == windows


def test_a_local_folder_is_read_and_heads_default_to_the_query_heads(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert kv_size(model, 10).bytes_per_token == 3 * 2 * 4 * 24 * 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=mentioning("config.json JSON")):
        kv_size(tmp_path, 10)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(missing: str) -> None:
    config = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4}
    del config[missing]
    with pytest.raises(ConfigError, match=mentioning(f"{missing}")):
        kv_size(config, 10)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"per_layer_config": {"1": {"head_dim": 512}}}, "layers differ"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 num_hidden_layers 2"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads '8'"),
        ({"head_dim": 24, "v_head_dim": 16}, "v_head_dim 16 head_dim 24"),
    ],
)
def test_what_would_come_out_wrong_is_refused(config: dict[str, Any], words: str) -> None:
    base = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 4}
    with pytest.raises(ConfigError, match=mentioning(words)):
        kv_size({**base, **config}, 10)


def test_a_gguf_file_is_told_what_to_give_instead(tmp_path: Path) -> None:
    path = tmp_path / "model.Q4_K.GGUF"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=mentioning(f"{path} GGUF config.json")):
        kv_size(str(path), 1000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_tokens": 0}, "context_tokens 0"),
        ({"dtype": "int4"}, "dtype 'int4' fp8"),
        ({"retention": 0.0}, "retention 0.0"),
        ({"retention": float("nan")}, "retention nan"),
        ({"chunk_tokens": 100}, "chunk_tokens 100 page_tokens"),
        ({"chunk_tokens": 16, "retention": 0.5}, "retention 0.5 chunk_tokens page_tokens"),
        ({"heads_per_page": 0}, "heads_per_page 0"),
        ({"model": "llama-9"}, "'llama-9' llama-3.1-8b"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=mentioning(words)):
        kv_size(**{"model": "qwen3-4b", "context_tokens": 1000, **options})


def test_the_table_says_what_matters() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(kv_size("llama-3.1-8b", 32_000, retention=0.5), memory_gib=80))
    text = console.export_text()
    for words in (
        "llama-3.1-8b",
        "32,000",
        "3.91 GiB",
        "ρ = 0.5",
        "FP8",
        "pages of 32,768 bytes",
        "80 GiB",
    ):
        assert words in text
