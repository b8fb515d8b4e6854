"""What a model's files say of sampling holds where a request states nothing, field by field."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tangram.engine.llm import LLM
from tangram.engine.sampling.sampler import SampleRow, choose
from tangram.engine.text.formats import THINKING_FORMATS, TOOL_FORMATS
from tangram.errors import ConfigError, ModelError
from tangram.model.generation import NO_ADVICE, read_defaults
from tangram.types import OPENAI_SAMPLING, SamplingParams, SamplingValues
from tests.mentions import mentioning, mentions
from tests.recorded_calls import cut_down_template

PROMPT = {"prompt_token_ids": list(range(40, 60))}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A tiny model as Transformers saves one, without sampling defaults."""
    path = tmp_path_factory.mktemp("plain")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of it whose generation_config.json has the given content."""

    def make(**content: Any) -> Path:
        for file in plain.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return tmp_path

    return make


def serve(model: Path, **options: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "kv_retention": 1.0, "kv_cache_gib": 0.01}
    return LLM(str(model), max_num_seqs=4, **(fixed | options))


def answer(llm: LLM, **stated: Any) -> tuple[int, ...]:
    params = SamplingParams(ignore_eos=True, **{"max_tokens": 8} | stated)
    return llm.generate(PROMPT, params)[0].outputs[0].token_ids


def values(path: Path, name: str = "m", option: str = "auto") -> SamplingValues:
    return read_defaults(name, path, option).sampling


def test_the_files_values_hold_and_a_request_wins_field_by_field(
    model: Callable[..., Path],
) -> None:
    """Top-k 1 leaves one token, so answers are greedy unless a request switches it off."""
    llm = serve(model(do_sample=True, temperature=5.0, top_k=1, max_new_tokens=12))
    greedy = answer(llm, temperature=0.0)
    assert [answer(llm, seed=seed) for seed in range(3)] == [greedy] * 3
    hot = {answer(llm, seed=seed, top_k=-1) for seed in range(3)}
    assert len(hot) == 3, "temperature 5 holds where a request states top_k alone"
    assert hot == {answer(llm, seed=seed, top_k=0, temperature=5.0) for seed in range(3)}
    assert len(answer(llm, max_tokens=None)) == 12
    assert len(answer(llm, max_tokens=30)) == 30


def test_a_penalty_of_the_model_holds_for_greedy_rows_unless_they_state_their_own() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9]])

    def choice(params: SamplingParams) -> int:
        row = SampleRow(
            params,
            prompt_token_ids=[1],
            vocab_size=3,
            seed=0,
            defaults=SamplingValues(repetition_penalty=2.0),
        )
        (chosen,) = choose(logits, [row]).tokens_on_host()
        assert chosen is not None
        return chosen.token_id

    assert choice(SamplingParams(temperature=0.0)) == 2
    assert choice(SamplingParams(temperature=0.0, repetition_penalty=1.0)) == 1
    assert choice(SamplingParams.state_all(temperature=0.0)) == 1


def test_end_tokens_of_the_file_and_of_a_folder_end_answers(
    model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    llm = serve(model(eos_token_id=[2, 7]))
    first = answer(llm, temperature=0.0)[0]
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    assert {2, 7} <= llm.engine.codec.eos_token_ids
    ended = serve(Path(llm.engine.config.model), generation_config=str(other))
    output = ended.generate(PROMPT, SamplingParams(temperature=0.0))[0].outputs[0]
    assert (output.finish_reason, output.token_ids) == ("stop", (first,))


def test_what_transformers_saves_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    GenerationConfig(do_sample=True, **own, max_new_tokens=64).save_pretrained(tmp_path)
    assert values(tmp_path) == SamplingValues(**own, max_tokens=64)
    GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    assert values(tmp_path) == OPENAI_SAMPLING, "a library's own defaults are nobody's advice"
    assert values(tmp_path, option="none") == OPENAI_SAMPLING


HUGE = 10**400
WRONG: dict[str, tuple[str, str]] = {
    '{"temperature": "0.7"}': ("temperature is '0.7'", "it must be a number"),
    '{"temperature": true}': ("temperature is True", "it must be a number"),
    '{"temperature": NaN}': ("temperature is nan", "[0.0, 100.0]"),
    '{"temperature": -1}': ("temperature is -1", "[0.0, 100.0]"),
    f'{{"temperature": {HUGE}}}': ("temperature is 1000", "[0.0, 100.0]"),
    '{"top_p": 1e999}': ("top_p is inf", "(0.0, 1.0]"),
    '{"top_p": 0}': ("top_p is 0", "(0.0, 1.0]"),
    '{"top_k": 1.5}': ("top_k is 1.5", "it must be a whole number"),
    f'{{"top_k": {HUGE}}}': ("top_k is 1000", "[-1, 2147483647]"),
    '{"min_p": [0]}': ("min_p is [0]", "it must be a number"),
    '{"repetition_penalty": 0}': ("repetition_penalty is 0", "[0.01, 10.0]"),
    '{"max_new_tokens": 0}': ("max_new_tokens is 0", "[1, 2147483647]"),
    '{"eos_token_id": "</s>"}': ("eos_token_id has '</s>'", "it must be a token id"),
    '{"eos_token_id": [2, -1]}': ("eos_token_id has -1", "it must be a token id"),
    "[]": ("it holds a list", "a JSON object"),
    "{": ("Expecting property name", "mend the file"),
    "[" * 100_000: ("nested too deeply", "mend the file"),
    " " * (2**20 + 1): ("1048577 bytes", "at most 1048576"),
}


@pytest.mark.parametrize("content", WRONG, ids=lambda content: content[:30])
def test_a_wrong_value_is_refused_by_file_field_value_and_limit(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError) as refused:
        values(tmp_path)
    text = str(refused.value)
    assert all(part in text for part in WRONG[content]), text
    assert "generation_config.json" in text
    assert "--generation-config none" in text


def test_a_wrong_file_is_refused_before_the_weights_and_none_serves_without_it(
    model: Callable[..., Path],
) -> None:
    path = model(temperature="hot")
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=mentioning("temperature 'hot'")):
        serve(path)
    (path / "model.safetensors").write_bytes(weights)
    assert serve(path, generation_config="none").engine.sampling == OPENAI_SAMPLING


def test_fields_without_effect_are_named_once_and_harmless_ones_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {"num_beams": 4, "top_p": 0.9, "temprature": 0.1, "do_sample": False}
    harmless = {"transformers_version": "4.1", "_from_model_config": True, "bos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(content | harmless))
    with caplog.at_level(logging.WARNING, "tangram"):
        assert values(tmp_path) == SamplingValues(top_p=0.9)
    (line,) = caplog.messages
    assert mentions(line, "generation_config.json 2 'num_beams' 'temprature'")


def test_a_folder_without_the_file_is_refused_by_the_option(tmp_path: Path) -> None:
    for option in ("vllm", str(tmp_path)):
        with pytest.raises(ConfigError, match=mentioning("generation_config auto none")):
            read_defaults("m", str(tmp_path), option)


def test_gguf_files_have_keys_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"temp": 0.6, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}, top_k=20)
    read = SamplingValues(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    assert values(tmp_path, str(path)) == read
    write_gguf(path, {"mirostat_tau": 5.0})
    with caplog.at_level(logging.WARNING, "tangram"):
        assert read_defaults(str(path), str(tmp_path), "auto") == NO_ADVICE
    assert "general.sampling.mirostat_tau" in caplog.text
    write_gguf(path, {"temp": -0.5})
    with pytest.raises(ModelError, match=mentioning("general.sampling.temp -0.5 [0.0, 100.0]")):
        values(tmp_path, str(path))
    path.write_bytes(path.read_bytes()[:40] + struct.pack("<Q", 2**60))
    with pytest.raises(ModelError, match="damaged"):
        values(tmp_path, str(path))


def write_gguf(path: Path, numbers: dict[str, float], **whole: int) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, number in numbers.items():
        writer.add_float32(f"general.sampling.{name}", number)
    for name, count in whole.items():
        writer.add_int32(f"general.sampling.{name}", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_template_and_formats_that_a_user_gives_hold(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(cut_down_template("pythonic"), encoding="utf-8")
    codec = serve(plain, chat_template=str(file), thinking_format="think").engine.codec
    assert codec.tool_format == TOOL_FORMATS["pythonic"]
    assert codec.thinking_format == THINKING_FORMATS["think"]
    named = serve(plain, chat_template=str(file), tool_format="lfm2").engine.codec
    assert named.tool_format == TOOL_FORMATS["lfm2"]
