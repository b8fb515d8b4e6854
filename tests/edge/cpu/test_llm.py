"""`LLM`, as people who know vLLM would use it, on the embedded model."""

from __future__ import annotations

import inspect

import pytest

from tangram import LLM, ConfigError, RequestError, SamplingParams
from tangram.config import OPTIONS, KvCacheDtype
from tests.mentions import mentioning

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", kv_retention=0.5, kv_cache_gib=0.5, max_model_len=2048)


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.engine.codec.encode("The capital of France is")
    text, tokens = llm.generate(
        ["The capital of France is", {"prompt_token_ids": list(ids)}], GREEDY
    )
    assert text.prompt_token_ids == tokens.prompt_token_ids == ids
    assert text.outputs[0].token_ids == tokens.outputs[0].token_ids
    assert "Paris" in text.outputs[0].text
    assert text.outputs[0].logprobs is None
    assert text.outputs[0].finish_reason == "length"


def test_chat_goes_through_the_template_and_ends_at_the_end_token(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=40))[0]
    assert "Paris" in answer.outputs[0].text
    assert "<|im_end|>" not in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
    assert answer.kv_bytes > 0
    assert answer.kv_bytes_uncompressed > 0


def test_n_answers_share_the_prompt_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, max_tokens=12, seed=7)
    first = llm.generate(
        "Once upon a time there was a small robot who lived by the sea and", params
    )[0]
    again = llm.generate(
        "Once upon a time there was a small robot who lived by the sea and", params
    )[0]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in first.outputs}) == 3
    assert [output.token_ids for output in first.outputs] == [
        output.token_ids for output in again.outputs
    ]


def test_a_seed_decides_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
    alone = llm.generate("My favourite colour is", params)[0].outputs[0].token_ids
    crowd = (
        llm.generate(["My favourite colour is", "Two plus two", "A list of"], params)[0]
        .outputs[0]
        .token_ids
    )
    assert crowd == alone


def test_logprobs_hold_the_sampled_token_and_the_alternatives(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    output = llm.generate("The capital of France is", params)[0].outputs[0]
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    for entry in output.logprobs:
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert entry.top[0][1] >= entry.top[1][1]


def test_the_prompt_has_log_probabilities_if_they_are_asked_for(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    (scored,) = llm.generate("The capital of France is", params)
    assert scored.prompt_logprobs is not None
    assert tuple(entry.token_id for entry in scored.prompt_logprobs) == scored.prompt_token_ids[1:]
    assert (scored.outputs[0].token_ids, scored.outputs[0].text) == ((), "")
    (plain,) = llm.generate("The capital of France is", SamplingParams(max_tokens=1))
    assert plain.prompt_logprobs is None


def test_stop_strings_are_cut_and_stop_tokens_end(llm: LLM) -> None:
    prompt = "One, two, three, four,"
    whole = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0]
    assert "six" in whole.text
    cut = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12, stop="six"))[
        0
    ].outputs[0]
    assert cut.text == whole.text[: whole.text.index("six")]
    assert cut.finish_reason == "stop"
    third = whole.token_ids[2]
    ended = llm.generate(prompt, SamplingParams(temperature=0.0, stop_token_ids=[third]))[
        0
    ].outputs[0]
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]


def test_a_request_can_opt_out_of_compression(llm: LLM) -> None:
    text = " ".join(f"Item {number} costs {number * 3} dollars." for number in range(130))
    compressed = llm.generate(text, GREEDY)[0]
    whole = llm.generate(text, GREEDY, kv_retention=1.0)[0]
    assert whole.num_cached_tokens == 0, "another retention ratio must not reuse this one's pages"
    assert compressed.kv_bytes < 0.8 * whole.kv_bytes
    less = llm.generate(text, GREEDY, kv_retention=0.3)[0]
    assert less.num_cached_tokens == 0 and less.kv_bytes < compressed.kv_bytes
    with pytest.raises(RequestError, match=mentioning("kv_retention 0.33 0.5, 0.05 --profile")):
        llm.generate(text, GREEDY, kv_retention=0.33)


def test_bad_input_names_the_field_and_loses_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match=mentioning("prompt 3000 2047")) as error:
        llm.generate({"prompt_token_ids": [5] * 3000}, GREEDY)
    assert error.value.field == "prompt"
    with pytest.raises(RequestError, match=mentioning("prompt 99999 [0, 49151]")):
        llm.generate(["fine", {"prompt_token_ids": [99999]}], GREEDY)
    assert not llm.engine.busy
    assert llm.generate("The capital of France is", GREEDY)[0].outputs[0].text


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("max_num_batched_tokens 100 544")):
        LLM(max_num_batched_tokens=100)
    with pytest.raises(ConfigError, match=mentioning("chunk_tokens 500 page_tokens 16")):
        LLM(chunk_tokens=500)
    with pytest.raises(ConfigError, match=mentioning("max_model_len 9000 8192")):
        LLM(max_model_len=9000, kv_cache_gib=0.1)
    with pytest.raises(ConfigError, match=mentioning("max_model_len 8192 kv_cache_gib 327")):
        LLM(max_model_len=8192, kv_cache_gib=0.01, dtype="float32")


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_8_bits_take_a_quarter_of_float32_and_say_much_the_same(
    llm: LLM, dtype: KvCacheDtype
) -> None:
    asked, params = (
        "The capital of France is",
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=1),
    )
    small = LLM(
        dtype="float32",
        kv_retention=0.5,
        kv_cache_gib=0.5,
        max_model_len=2048,
        kv_cache_dtype=dtype,
    )
    assert small.engine.stats().pages_total == 4 * llm.engine.stats().pages_total
    wide, narrow = (one.generate(asked, params)[0] for one in (llm, small))
    assert 4 * narrow.kv_bytes == wide.kv_bytes
    first, other = wide.outputs[0], narrow.outputs[0]
    assert first.logprobs is not None and other.logprobs is not None
    same = next(
        (
            n
            for n, pair in enumerate(zip(first.token_ids, other.token_ids, strict=True))
            if len(set(pair)) > 1
        ),
        12,
    )
    assert same >= 4
    for one, two in zip(first.logprobs[:same], other.logprobs[:same], strict=True):
        assert abs(one.logprob - two.logprob) < 0.3


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentioning("kv_cache_dtype 'int4' auto fp8 int8")):
        LLM(kv_cache_dtype="int4")  # type: ignore[arg-type]


def test_its_keywords_are_the_options_of_the_engine() -> None:
    assert set(inspect.signature(LLM).parameters) == set(OPTIONS)
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(max_sequences=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=mentioning("load_format 'lazy' auto dummy")):
        LLM(load_format="lazy")  # type: ignore[arg-type]
