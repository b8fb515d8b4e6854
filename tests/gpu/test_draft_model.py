"""A second model drafts on the Triton kernels: answers are those without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bench.bare_tokenizer import load_tokenizer
from tangram.types import SamplingParams
from tests.gpu.test_engine import on_torch, on_triton
from tests.small_engines import count_plans, run, small_engine, tiny_model
from tests.speculation import draft_always

PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PROMPTS = [[5, 9, 17, 3], list(range(3, 23))]


def test_answers_are_those_without_drafts(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a batch is planned once, although each step has other drafts and another width."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    tokenizer = load_tokenizer("smollm2")
    loaded = tiny_model(config, tokenizer, device)
    loaded.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    expected = run(small_engine(loaded, on_torch), PROMPTS, PARAMS)
    drafting = small_engine(loaded, on_triton, speculative_config=drafts)
    planned = count_plans(monkeypatch)
    assert run(draft_always(drafting, 3, 1, 0, 2), PROMPTS, PARAMS) == expected
    assert len(planned) == len(set(planned))
    speculation = drafting._speculation
    assert speculation is not None
    assert speculation.counters.drafted
