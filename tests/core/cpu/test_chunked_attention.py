"""Layers whose tokens attend within chunks (Llama 4): answers are Transformers', and the chunks
before the newest token's own leave the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tangram.errors import ConfigError
from tangram.model.load import LoadedModel, load_model
from tangram.sizing.cache_size import kv_size
from tangram.types import SamplingParams
from tests.families import check_answers
from tests.mentions import mentioning
from tests.small_engines import profile_file, run, small_engine
from tests.tiny_configs import tiny_config

Adopt = Callable[[PretrainedConfig], LoadedModel]
CHUNK = 96  # of the model: three of the engine's
PROMPTS = [
    [(7 * place + place * place // 5 + length) % 93 + 3 for place in range(length)]
    for length in (3, 95, 96, 97, 333, 700, 1151, 1500)
]
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "kv_cache_gib": 0.02}


def make_config(**changes: Any) -> PretrainedConfig:
    sizes = {"max_position_embeddings": 2048, "attention_chunk_size": CHUNK, "attn_scale": 0.5}
    return tiny_config("llama4_text", **(sizes | changes))


@pytest.fixture(scope="module")
def loaded(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(make_config())


def test_chunks_are_seen_as_they_are(loaded: LoadedModel, adopt_tiny: Adopt) -> None:
    geometry = loaded.geometry
    assert geometry.chunked and geometry.windows == (CHUNK, CHUNK, CHUNK, None)
    longest = adopt_tiny(make_config(attention_chunk_size=2048)).geometry
    assert not longest.chunked and longest.windows == (None,) * 4


def test_answers_are_those_of_transformers(loaded: LoadedModel) -> None:
    check_answers(loaded, PROMPTS, **OPTIONS)


@pytest.mark.parametrize("scorer", ["expected_attention", "kvzip", "keydiff"])
def test_the_other_layers_are_compressed(scorer: str, adopt_tiny: Adopt, tmp_path: Path) -> None:
    # KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there.
    # The other one looks at queries up to position 1,000, and refuses to undo their temperature.
    changes = {"vocab_size": 49152} if scorer == "kvzip" else {"floor_scale": 1024}
    loaded = adopt_tiny(make_config(**changes))
    profile = profile_file(loaded, tmp_path, scorer=scorer)
    options = OPTIONS | {"kv_retention": 0.5, "profile": (profile,), "scorer": scorer}
    together = small_engine(loaded, **options)
    answers = run(together, PROMPTS, ANSWER)
    assert run(together, PROMPTS, ANSWER) == answers, "prefix hits change answers"
    alone = [run(small_engine(loaded, **options), [prompt], ANSWER)[0] for prompt in PROMPTS[::2]]
    assert answers[::2] == alone
    assert answers != run(small_engine(loaded, **OPTIONS), PROMPTS, ANSWER)


def test_a_chunk_that_is_left_goes_out_of_the_cache(loaded: LoadedModel) -> None:
    """Three heads of three layers keep 96 tokens at most, and those of the last one all."""
    layout = small_engine(loaded, **OPTIONS).layout
    assert (layout.window_chunks, layout.full_groups, len(layout.groups)) == (2, 2, 7)
    assert layout.lengths(5, 3).tolist() == [163, 163, *[2 * 32 + 3] * 5]
    assert layout.lengths(6, 0).tolist() == [192, 192, *[0] * 5]
    assert layout.passed_pages(7).tolist() == [0, 0, *[24] * 5]
    assert layout.count_held_pages(40, 3) == 40 * 2 * 4 + 2 * 5 * 4 + 7


def test_what_is_not_served_with_chunks_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=mentioning("compile_decode positions")):
        small_engine(loaded, **OPTIONS, compile_decode=True)
    with pytest.raises(ConfigError, match=mentioning(f"chunk_tokens 64 {CHUNK}")):
        small_engine(loaded, **OPTIONS, chunk_tokens=64)


def test_the_size_of_a_cache_follows_from_the_config() -> None:
    published = make_config(
        max_position_embeddings=2**18, attention_chunk_size=8192, num_hidden_layers=48
    )
    size = kv_size(published.to_dict(), 2**16)
    assert size.shape.windows == ((8192,) * 3 + (None,)) * 12
    assert size.pages == 9 * 4096 + 27 * 15 * 32  # the newest 15 of a chunk's 16 stay


def test_the_text_part_is_read_from_the_files_of_a_whole_model(
    adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    made = adopt_tiny(make_config())
    tokenizer.save_pretrained(tmp_path)
    tiny_config("llama4", text_config=made.model.config.to_dict()).save_pretrained(tmp_path)
    weights = {f"language_model.{at}": part for at, part in made.model.state_dict().items()}
    beside = {at: torch.zeros(8) for at in ("vision_model.stem", "multi_modal_projector.bias")}
    save_file(weights | beside, tmp_path / "model.safetensors")
    read = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert (read.geometry, read.weights_digest) == (made.geometry, made.weights_digest)
