"""Layers with heads of two shapes (Gemma 4): answers are Transformers', and pages of fixed bytes
hold the entries of both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tangram.errors import ConfigError, ModelError
from tangram.model.load import LoadedModel, load_model
from tangram.sizing.cache_size import kv_size
from tangram.types import LayerHeads, SamplingParams
from tests.families import check_answers
from tests.mentions import mentioning
from tests.small_engines import profile_file, run, small_engine
from tests.tiny_configs import WINDOW, tiny_config

Adopt = Callable[[PretrainedConfig], LoadedModel]
PROMPTS = [
    [(7 * place + place * place // 5 + length) % 93 + 3 for place in range(length)]
    for length in (3, 17, 64, 200, 333, 700, 1100, 1500)
]
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "kv_cache_gib": 0.02}
MIXED: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
    "num_global_key_value_heads": 2,
}


def make_config(**changes: Any) -> PretrainedConfig:
    return tiny_config("gemma4_text", max_position_embeddings=2048, **changes)


@pytest.fixture(scope="module")
def loaded(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(make_config())


def test_the_geometry_has_both_shapes(loaded: LoadedModel) -> None:
    geometry = loaded.geometry
    assert geometry.windows == (WINDOW, None) * 2
    assert geometry.kv_layers == (0, 1, 2, 3, 2, 3)
    assert geometry.heads_of(0) == LayerHeads(kv_heads=3, query_heads=6, head_dim=8)
    assert geometry.heads_of(1) == LayerHeads(kv_heads=1, query_heads=6, head_dim=16)


@pytest.mark.parametrize("changes", [{}, MIXED], ids=["shared layers", "experts"])
def test_answers_are_those_of_transformers(changes: dict[str, Any], adopt_tiny: Adopt) -> None:
    loaded = adopt_tiny(make_config(**changes))
    check_answers(loaded, PROMPTS, **OPTIONS)


@pytest.mark.parametrize("scorer", ["expected_attention", "kvzip", "keydiff"])
def test_the_wide_heads_are_compressed(scorer: str, adopt_tiny: Adopt, tmp_path: Path) -> None:
    # KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there.
    words = {"vocab_size": 49152, "vocab_size_per_layer_input": 49152}
    loaded = adopt_tiny(make_config(**words if scorer == "kvzip" else {}))
    profile = profile_file(loaded, tmp_path, scorer=scorer)
    options = OPTIONS | {"kv_retention": 0.5, "profile": (profile,), "scorer": scorer}
    prompts = PROMPTS[:6]
    engine = small_engine(loaded, **options)
    together = run(engine, prompts, ANSWER)
    assert run(engine, prompts, ANSWER) == together, "prefix hits change answers"
    alone = [run(small_engine(loaded, **options), [prompt], ANSWER)[0] for prompt in prompts[::2]]
    assert together[::2] == alone
    assert together != run(small_engine(loaded, **OPTIONS), prompts, ANSWER)


def test_pages_of_one_size_hold_heads_of_both(loaded: LoadedModel) -> None:
    """A page has a column for each of two wide heads, or for each of four narrow ones."""
    layout = small_engine(loaded, **OPTIONS).layout
    assert [len(group) for group in layout.groups] == [2, 4, 2]
    assert layout.page_bytes(4) == 2 * 8 * 2 * 16 * 4
    # Six narrow heads take as much as three wide ones.
    assert layout.count_uncompressed_entries(WINDOW + 10) == 2 * (WINDOW + 10) + 3 * WINDOW
    assert layout.count_held_entries(0, 8) == (2 + 3) * 8
    assert layout.count_held_pages(0, 8) == 3


def test_wide_heads_of_windows_need_as_many_columns(adopt_tiny: Adopt) -> None:
    config = make_config(global_head_dim=8, head_dim=16, num_global_key_value_heads=3)
    loaded = adopt_tiny(config)
    assert [len(group) for group in small_engine(loaded).layout.groups] == [2, 2, 2, *[1] * 6]
    with pytest.raises(ConfigError, match=mentioning("heads_per_page 1 16 8 multiple 2")):
        small_engine(loaded, heads_per_page=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 fp8"),
        ({"kv_offload_dtype": "int8", "kv_offload_gib": 0.01}, "kv_offload_dtype int8 auto"),
        ({"save_failed_passes": Path("failed")}, "save_failed_passes"),
    ],
)
def test_what_needs_heads_of_one_shape_is_refused(
    options: dict[str, Any], words: str, loaded: LoadedModel
) -> None:
    with pytest.raises(ConfigError, match=mentioning(words)):
        small_engine(loaded, **options)


def test_layers_of_one_kind_that_differ_are_refused(adopt_tiny: Adopt) -> None:
    """A window of all positions is none."""
    with pytest.raises(ModelError, match=mentioning("gemma4_text one kind differ head dims")):
        adopt_tiny(make_config(sliding_window=2048))


def test_the_size_of_a_cache_follows_from_the_config(loaded: LoadedModel) -> None:
    """By the fields of published files, and by those that Transformers saves."""
    config = loaded.model.config.to_dict()
    published = {name: value for name, value in config.items() if name != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    for form in (config, published):
        size = kv_size(form, 1024, dtype="fp32", chunk_tokens=32, page_tokens=8, heads_per_page=2)
        assert size.page_bytes == 2048
        assert size.pages == 128 + 2 * 2 * 4  # two chunks of each of two groups of windows
        assert size.bytes_per_token == 4 * 2 * (2 * 16 + 2 * 3 * 8)
        assert size.uncompressed_bytes == 4 * 2 * (2 * 16 * 1024 + 2 * 3 * 8 * WINDOW)


def test_the_text_part_is_read_from_the_files_of_a_whole_model(
    adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    made = adopt_tiny(make_config())
    tokenizer.save_pretrained(tmp_path)
    tiny_config("gemma4", text_config=made.model.config.to_dict()).save_pretrained(tmp_path)
    weights = {f"model.{part}.stem": torch.zeros(8) for part in ("vision_tower", "embed_audio")}
    for name, tensor in made.model.get_decoder().state_dict().items():  # type: ignore[no-untyped-call]
        weights[f"model.language_model.{name}"] = tensor
    save_file(weights, tmp_path / "model.safetensors")
    read = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert (read.geometry, read.weights_digest) == (made.geometry, made.weights_digest)
