"""Fidelity: forced texts give what the model itself expects, and divergence is what its definition
says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from tangram.config import EngineConfig
from tangram.errors import ConfigError
from tangram.model.load import LoadedModel
from tangram_lab.accuracy.fidelity import compute_expected, fidelity
from tangram_lab.accuracy.forced import ForcedText
from tangram_lab.accuracy.passages import TAIL_TOKENS, RealText, passages
from tangram_lab.accuracy.sample_prompts import Alignment
from tangram_lab.accuracy.suites import SAMPLES
from tests.mentions import mentioning
from tests.small_engines import profile_file

Adopt = Callable[[PretrainedConfig], LoadedModel]
LLAMA = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TEXT = [3 + (i * i * 7) % 290 for i in range(2 * 256 + TAIL_TOKENS)]


@pytest.fixture(scope="module")
def loaded(adopt_tiny: Adopt) -> LoadedModel:
    return adopt_tiny(LLAMA)


def config(**options: Any) -> EngineConfig:
    defaults = {"kv_retention": 1.0, "chunk_tokens": 256, "kv_cache_gib": 0.02, "max_num_seqs": 1}
    return EngineConfig(**(defaults | options))


def test_without_compression_a_forced_text_is_what_transformers_says(loaded: LoadedModel) -> None:
    plain = LlamaForCausalLM(LlamaConfig.from_dict(LLAMA.to_dict())).eval()
    plain.set_attn_implementation("eager")
    plain.load_state_dict(loaded.model.state_dict())
    with torch.inference_mode():
        whole = plain(torch.tensor([TEXT])).logits[0, -TAIL_TOKENS:]
    (found,) = compute_expected(config(), loaded, [TEXT])
    assert torch.allclose(found, whole, atol=1e-4)
    same = fidelity(whole, found, TEXT)
    assert same.divergence == pytest.approx(0.0, abs=1e-6) and same.agreement == 1.0
    loss = torch.nn.functional.cross_entropy(whole[:-1], torch.tensor(TEXT[1 - TAIL_TOKENS :]))
    assert same.full_surprise == pytest.approx(float(loss), rel=1e-5)


def test_the_less_is_kept_the_further_it_goes(loaded: LoadedModel, tmp_path: Path) -> None:
    """And one text does not see what another has left."""
    (full,) = compute_expected(config(), loaded, [TEXT])
    found = []
    for retention in (0.75, 0.25):
        file = profile_file(loaded, tmp_path, retention=retention, chunk_tokens=64)
        kept = config(
            kv_retention=retention,
            chunk_tokens=64,
            page_tokens=8,
            heads_per_page=2,
            profile=(file,),
        )
        forced = ForcedText(kept, loaded)
        odd = TEXT[:-64]  # 64 of the tail are left behind whole chunks
        first, again = forced.logits(odd[:-1]), forced.logits(odd[:-1])
        assert torch.equal(first, again) and len(first) == 63
        reference = ForcedText(config(chunk_tokens=64), loaded).logits(odd[:-1])
        found.append(fidelity(reference, first, odd[:-1]))
    assert 0 < found[0].divergence < found[1].divergence and len(full) == TAIL_TOKENS


def test_lossless_diverges_by_rounding_only(loaded: LoadedModel, tmp_path: Path) -> None:
    """Chunks are stored in the order of their scores, and all of their entries count."""
    pages: dict[str, Any] = {"chunk_tokens": 64, "page_tokens": 8, "heads_per_page": 2}
    file, text = profile_file(loaded, tmp_path, retention=0.25, chunk_tokens=64), TEXT[:-65]
    reference, lossless, static = (
        ForcedText(config(**pages, **options), loaded).logits(text)
        for options in (
            {},
            {
                "profile": (file,),
                "scorer": "keydiff",
                "speculative_config": {"method": "compressed_kv", "kv_retention": 0.25},
            },
            {"profile": (file,), "kv_retention": 0.25},
        )
    )
    same, less = fidelity(reference, lossless, text), fidelity(reference, static, text)
    assert same.divergence == pytest.approx(0.0, abs=1e-6) and same.agreement == 1.0
    assert not torch.equal(reference, lossless), "its entries have another order"
    assert less.divergence > 1e-3


def test_divergence_and_surprise_are_those_of_the_definition() -> None:
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]).log()
    found = torch.tensor([[0.25, 0.75], [0.4, 0.6], [0.5, 0.5]]).log()
    seen = fidelity(full, found, [7, 0, 1, 0])
    terms = [
        0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75),
        0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6),
        0.0,
    ]
    assert seen.divergence == pytest.approx(sum(terms) / 3)
    assert seen.agreement == pytest.approx(1 / 3)
    assert seen.surprise == pytest.approx(-(math.log(0.75) + math.log(0.4)) / 2)
    assert seen.full_surprise == pytest.approx(-(math.log(0.5) + math.log(0.9)) / 2)


class LetterTokenizer:
    """A tokenizer of letters."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in text)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.encode(str(messages))


def cut(samples: int | None, seed: int = 0, **options: Any) -> list[tuple[int, ...]]:
    return list(
        RealText(samples, 512, seed, **options)
        .prompts(LetterTokenizer(), Alignment(128, 10))
        .pieces
    )


def test_passages_are_cut_from_real_text_one_after_the_other() -> None:
    encode = LetterTokenizer().encode
    pieces = cut(3, seed=1)
    assert [len(piece) for piece in pieces] == [512 + TAIL_TOKENS] * 3
    assert pieces == cut(3, seed=1) != cut(3, seed=2)
    assert cut(2, seed=1) == pieces[:2] and len(cut(None, seed=1)) == SAMPLES
    assert "".join(map(chr, pieces[0])).isprintable() is False, "lines of text"
    own = passages(encode, 512, 2, texts=["a" * 700, "b" * 600])
    assert own[1] == [97] * 60 + [98] * 580
    assert len(passages(encode, 512, None, texts=["a" * 700, "b" * 600])) == 2, (
        "what the texts give"
    )
    with pytest.raises(ConfigError, match=mentioning("samples 3 2")):
        passages(encode, 512, 3, texts=["a" * 700, "b" * 600])


def test_what_cannot_be_compared_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=mentioning("tokens 512 256")):
        ForcedText(config(), loaded).logits(TEXT[:512])
    with pytest.raises(ConfigError, match=mentioning("1025 1024")):
        ForcedText(config(), loaded).logits([3] * 1025)
    with pytest.raises(ConfigError, match=mentioning("28 chunk_tokens 100")):
        list(compute_expected(config(chunk_tokens=100, page_tokens=10), loaded, [TEXT[:628]]))


def test_a_text_of_ones_own_is_read_and_named_where_it_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("ä" * 1300)
    assert cut(None, path=file) == [(228,) * (512 + TAIL_TOKENS)] * 2
    with pytest.raises(ConfigError, match=mentioning("samples 3 2 512")):
        cut(3, path=file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=mentioning(f"{file} UTF-8")):
        cut(1, path=file)
    with pytest.raises(ConfigError, match=mentioning("context_tokens 512 500")):
        RealText(1, 512).prompts(LetterTokenizer(), Alignment(500, 10))
    with pytest.raises(ConfigError, match=mentioning("suites fidelity align")):
        RealText(1, 512).prompts(LetterTokenizer(), None)
