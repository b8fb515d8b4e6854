"""Layers that read the keys and values of another layer: answers are Transformers', and the cache
is that of the layers that have some of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tangram.errors import ModelError
from tangram.kernels.cpu.cpu_kernels import CpuLaunch
from tangram.kernels.interface import AttentionRule
from tangram.model.load import LoadedModel, load_model
from tangram.model.servable import probe_model
from tangram.model.shares import Share, take_share
from tangram.types import SamplingParams
from tests.families import check_answers
from tests.mentions import mentioning
from tests.small_engines import profile_file, run, small_engine
from tests.tiny_configs import WINDOW, tiny_config

Adopt = Callable[[PretrainedConfig], LoadedModel]
LONGEST = 1500
PROMPTS = [
    [(7 * place + place * place // 5 + length) % 93 + 3 for place in range(length)]
    for length in (3, 17, 64, 200, 333, 700, 1100, LONGEST)
]
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "kv_cache_gib": 0.02}


def make_config(**changes: Any) -> PretrainedConfig:
    return tiny_config("gemma3n_text", max_position_embeddings=2048, **changes)


@pytest.fixture(scope="module")
def loaded(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(make_config())


def test_the_cache_is_that_of_the_layers_with_keys_of_their_own(loaded: LoadedModel) -> None:
    geometry = loaded.geometry
    assert (geometry.layers, geometry.windows) == (4, (WINDOW, None) * 2)
    assert geometry.kv_layers == (0, 1, 2, 3, 2, 3)
    assert loaded.fingerprint.layers == 4
    engine = small_engine(loaded, **OPTIONS)
    heads = {head for group in engine.layout.groups for head in group}
    assert heads == {(layer, head) for layer in range(4) for head in range(3)}


def test_readers_between_other_layers_are_counted_out(adopt_tiny: Adopt) -> None:
    """The model's layer 4 has the fourth part of the cache: a reader comes before it."""
    model = adopt_tiny(make_config()).model
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    decoder.layers = torch.nn.ModuleList([decoder.layers[at] for at in (0, 1, 2, 4, 3, 5)])
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = number
    model.config.layer_types = [layer.self_attn.layer_type for layer in decoder.layers]
    geometry = probe_model(model)[0]
    assert geometry.windows == (WINDOW, None) * 2
    found = [geometry.find_layer(number) for number in range(6)]
    assert found == [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True)]


def test_answers_are_those_of_transformers(loaded: LoadedModel) -> None:
    check_answers(loaded, PROMPTS, **OPTIONS)


@pytest.mark.parametrize("scorer", ["expected_attention", "kvzip", "snapkv"])
def test_scorers_are_asked_of_the_layers_with_keys_of_their_own(
    scorer: str, adopt_tiny: Adopt, tmp_path: Path
) -> None:
    # KVzip's repeat prompt comes from the tokenizer, so the whole vocabulary must be there.
    words = {"vocab_size": 49152, "vocab_size_per_layer_input": 49152}
    loaded = adopt_tiny(make_config(**words if scorer == "kvzip" else {}))
    profile = profile_file(loaded, tmp_path, scorer=scorer, chunk_tokens=48)
    options = OPTIONS | {"kv_retention": 0.5, "profile": (profile,), "chunk_tokens": 48}
    options["scorer"] = scorer
    prompts = PROMPTS[:5]
    together = run(small_engine(loaded, **options), prompts, ANSWER)
    alone = [run(small_engine(loaded, **options), [prompt], ANSWER)[0] for prompt in prompts]
    assert together == alone
    assert together != run(small_engine(loaded, **OPTIONS), prompts, ANSWER)


def test_entries_are_stored_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reader decodes what is stored already, and stores and seals nothing of prompts."""
    profile = profile_file(loaded, tmp_path, scorer="snapkv", chunk_tokens=48)
    compressed = {"kv_retention": 0.5, "profile": (profile,), "scorer": "snapkv"}
    forms = [OPTIONS, OPTIONS | compressed | {"chunk_tokens": 48}]
    expected = [run(small_engine(loaded, **form), PROMPTS[:5], ANSWER) for form in forms]
    stored, decode, store = list[tuple[Any, int, int]](), CpuLaunch.decode, CpuLaunch._store

    def decode_nothing_new(
        launch: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rule: AttentionRule
    ) -> None:
        if rule.shared:
            k, v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
        decode(launch, layer, q, k, v, out, rule)

    def note_stored(launch: Any, layer: int, row: int, *entries: Any) -> None:
        stored.append((launch, layer, row))
        store(launch, layer, row, *entries)

    monkeypatch.setattr(CpuLaunch, "decode", decode_nothing_new)
    monkeypatch.setattr(CpuLaunch, "_store", note_stored)
    assert [run(small_engine(loaded, **form), PROMPTS[:5], ANSWER) for form in forms] == expected
    assert len(stored) == len(set(stored)) > 0


def test_two_windows_over_the_same_keys_are_refused(adopt_tiny: Adopt) -> None:
    loaded = adopt_tiny(make_config())
    sliding, full = (loaded.model.get_decoder().layers[at].self_attn for at in (4, 5))  # type: ignore[no-untyped-call]
    full.layer_type = sliding.layer_type
    with pytest.raises(ModelError, match=mentioning(f"layer 5 None 2 {WINDOW}")):
        probe_model(loaded.model)


def test_the_text_part_is_read_from_the_files_of_a_whole_model(
    adopt_tiny: Adopt, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Published files have towers for pictures and sound, and keys of layers that use none."""
    made = adopt_tiny(make_config())
    tokenizer.save_pretrained(tmp_path)
    tiny_config("gemma3n", text_config=made.model.config.to_dict()).save_pretrained(tmp_path)
    unused = (
        "vision_tower.stem",
        "embed_audio.norm",
        "language_model.layers.5.self_attn.k_norm.weight",
    )
    weights = {f"model.{name}": torch.zeros(8) for name in unused}
    for name, tensor in made.model.get_decoder().state_dict().items():  # type: ignore[no-untyped-call]
        weights[f"model.language_model.{name}"] = tensor
    save_file(weights, tmp_path / "model.safetensors")
    read = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert (read.geometry, read.weights_digest) == (made.geometry, made.weights_digest)
    weights["model.unknown"] = torch.zeros(8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=mentioning("model.unknown")):
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_heads_of_such_layers_are_not_dealt_to_ranks(adopt_tiny: Adopt) -> None:
    loaded = adopt_tiny(make_config())
    order = torch.arange(3).expand(4, -1).numpy()
    with pytest.raises(ModelError, match=mentioning("tensor_parallel_size 3 keys another layer")):
        take_share(loaded.model, Share(loaded.geometry, order, 0, 3))
