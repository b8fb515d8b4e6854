"""Answers that follow a grammar: what they may be, and that nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, TypeAdapter
from transformers import LlamaConfig, PretrainedConfig

from tangram.engine.loop import Engine
from tangram.engine.sampling.sampler import SampleRow
from tangram.engine.text.answer_text import read_text
from tangram.engine.text.grammar import CompiledGrammar
from tangram.errors import RequestError
from tangram.model.load import LoadedModel
from tangram.serve.formats.call_grammar import answer_grammar
from tangram.types import Event, Grammar, Request, SamplingParams
from tests.core.cpu.token_choice import sample
from tests.examples import examples
from tests.mentions import mentioning, mentions
from tests.small_engines import drain, probabilities, small_engine

VOCABULARY, EOS = 49152, 2
# A random model never ends a number or a space by itself, so all that can go on is bounded.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "mood": {"enum": ["good", "bad"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "mood", "age"],
    "additionalProperties": False,
}
TINY = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=2048,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS,
)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    mood: Literal["good", "bad"]
    age: int


@pytest.fixture(scope="module")
def tiny(adopt_tiny: Callable[[PretrainedConfig], LoadedModel]) -> LoadedModel:
    """A random model with the embedded model's tokenizer."""
    return adopt_tiny(TINY)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    return small_engine(tiny)


@pytest.fixture(scope="module")
def person(engine: Engine) -> CompiledGrammar:
    return engine.grammars.compile(answer_grammar(PERSON), "response_format")


Job = tuple[SamplingParams, Grammar | None]


def answers(
    engine: Engine, jobs: Sequence[Job], prompt: Sequence[int] = (1, 5, 9)
) -> list[list[list[Event]]]:
    """By job and completion, its events; all are submitted at once."""
    told: list[list[list[Event]]] = []
    for number, (params, grammar) in enumerate(jobs):
        events: list[list[Event]] = [[] for _ in range(params.n)]
        told.append(events)

        def take(event: Event, events: list[list[Event]] = events) -> None:
            events[event.index].append(event)

        engine.submit(Request(str(number), tuple(prompt), params, take, grammar=grammar))
    drain(engine)
    assert engine.stats().pages_held == 0
    return told


def text_of(engine: Engine, events: list[Event]) -> str:
    return read_text(engine.codec, SamplingParams(), (), events)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=200),
        SamplingParams(temperature=2.0, n=3, max_tokens=200),
        SamplingParams(
            top_k=3, min_p=0.1, repetition_penalty=1.3, presence_penalty=1, max_tokens=200
        ),
        SamplingParams(temperature=5.0, top_p=0.9, frequency_penalty=-1, max_tokens=200),
    ],
)
def test_every_answer_is_what_the_schema_says(
    engine: Engine, person: CompiledGrammar, params: SamplingParams, seed: int
) -> None:
    for events in answers(engine, [(replace(params, seed=seed), person)])[0]:
        Person.model_validate_json(text_of(engine, events))
        assert events[-1].finish_reason == "stop"
        assert tokens_of(events)[-1] == EOS


@pytest.mark.parametrize("ahead", [False, True])
def test_who_has_no_grammar_does_not_notice_those_who_have(
    engine: Engine, person: CompiledGrammar, ahead: bool
) -> None:
    """Also where a step is launched before the tokens of the one before are read, as on a GPU."""
    free: list[Job] = [
        (SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), None),
        (SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=30, ignore_eos=True), None),
    ]
    bound: list[Job] = [
        (SamplingParams(temperature=1.5, seed=seed, max_tokens=200), person) for seed in range(4)
    ]
    alone = [[tokens_of(events) for events in answers(engine, [job])[0]] for job in (*free, *bound)]
    engine.ahead = ahead
    together = answers(engine, [bound[0], free[0], bound[1], free[1], *bound[2:]])
    engine.ahead = False
    order = [2, 0, 3, 1, 4, 5]
    assert [[tokens_of(events) for events in told] for told in together] == [
        alone[at] for at in order
    ]


def test_preemption_does_not_lose_the_place_in_a_grammar(
    tiny: LoadedModel, person: CompiledGrammar
) -> None:
    prompt = [3 + at % 90 for at in range(60)]
    long = {"type": "array", "items": PERSON, "minItems": 5, "maxItems": 5}
    roomy, narrow = small_engine(tiny, kv_cache_gib=0.02), small_engine(tiny, kv_cache_gib=0.0008)
    found = []
    for engine in (roomy, narrow):
        grammar = engine.grammars.compile(answer_grammar(long), "response_format")
        jobs: list[Job] = [
            (SamplingParams(temperature=1.0, seed=seed, max_tokens=500), grammar)
            for seed in range(4)
        ]
        found.append([tokens_of(told[0]) for told in answers(engine, jobs, prompt)])
    assert narrow.stats().preemptions > 0 == roomy.stats().preemptions
    assert found[0] == found[1]


def test_a_limit_cuts_an_answer(engine: Engine, person: CompiledGrammar) -> None:
    told = answers(engine, [(SamplingParams(temperature=0, max_tokens=3), person)])[0][0]
    assert (told[-1].finish_reason, len(tokens_of(told))) == ("length", 3)
    assert text_of(engine, told).startswith("{")


def test_a_bias_does_not_beat_the_grammar(engine: Engine) -> None:
    grammar = engine.grammars.compile('start: "yes" | "no"\n', "response_format")
    (unwanted,) = engine.codec.tokenizer.encode("maybe", add_special_tokens=False)[:1]
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={unwanted: 100, EOS: 100})
    assert text_of(engine, answers(engine, [(params, grammar)])[0][0]) in ("yes", "no")


def test_logprobs_are_over_what_the_grammar_allows(engine: Engine) -> None:
    grammar = engine.grammars.compile("start: /[ab]/\n", "response_format")
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=5)
    first, last = [event.logprobs[0] for event in answers(engine, [(params, grammar)])[0][0]]
    assert len(first.top) == 2
    assert sum(torch.tensor([logprob for _, logprob in first.top]).exp()) == pytest.approx(
        1, abs=1e-5
    )
    assert [token for token, _ in last.top] == [EOS]


def test_a_mask_is_exact(engine: Engine) -> None:
    """The probabilities are those of the allowed tokens alone, in the last places of the vocabulary
    too.
    """
    grammar = engine.grammars.compile("start: /(.|\\n)*/\n", "response_format")
    row = SampleRow(
        SamplingParams(),
        prompt_token_ids=(),
        vocab_size=VOCABULARY,
        seed=0,
        matcher=grammar.begin(),
    )
    free = SampleRow(SamplingParams(), prompt_token_ids=(), vocab_size=VOCABULARY, seed=0)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    bound, unbound = probabilities(logits, [row, free])
    allowed = np.unpackbits(grammar.begin().mask_tokens(), bitorder="little")[:VOCABULARY]
    assert 0.99 * VOCABULARY < allowed.sum() < VOCABULARY
    assert not any(allowed[token] for token in engine.codec.control_token_ids)
    expected = unbound * torch.from_numpy(allowed)
    torch.testing.assert_close(bound, expected / expected.sum(), rtol=1e-4, atol=1e-10)
    assert sample(logits, [free, row])[0] == sample(logits[:1], [free])[0]


def test_a_grammar_that_becomes_too_much_ends_its_request_alone(
    engine: Engine, person: CompiledGrammar
) -> None:
    heavy = {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}
    grammar = engine.grammars.compile(answer_grammar(heavy), "response_format")
    params = SamplingParams(temperature=0, max_tokens=300)
    failed, fine = (told[0] for told in answers(engine, [(params, grammar), (params, person)]))
    assert failed[-1].finish_reason == "abort"
    assert mentions(str(failed[-1].error), "response_format grammar")
    assert failed[-1].error_field == "response_format"
    Person.model_validate_json(text_of(engine, fine))


@pytest.mark.parametrize("at_least", [1, 7, 30])
def test_no_end_comes_before_min_tokens(engine: Engine, at_least: int) -> None:
    bias = {EOS: 100.0, 7: 100.0}  # which would end it at once
    params = SamplingParams(
        temperature=0, max_tokens=30, min_tokens=at_least, logit_bias=bias, stop_token_ids=[7]
    )
    told = answers(engine, [(params, None)])[0][0]
    assert len(tokens_of(told)) == min(30, at_least + 1)
    assert told[-1].finish_reason == ("stop" if at_least < 30 else "length")


def test_min_tokens_lies_within_max_tokens_and_stands_without_stop_strings() -> None:
    with pytest.raises(RequestError, match=mentioning("min_tokens 5 [0, 4]")):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError, match=mentioning("min_tokens stop")):
        SamplingParams(max_tokens=4, min_tokens=2, stop="a")


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "string", "maxLength": 5}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 50),
    ),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True).map(
        lambda values: {"enum": values}
    ),
)
SCHEMAS = st.recursive(
    VALUES,
    lambda inner: (
        st.dictionaries(st.text(min_size=1, max_size=5), inner, min_size=1, max_size=3).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            }
        )
        | inner.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2})
    ),
    max_leaves=4,
)


def allows(schema: dict[str, Any], value: Any) -> bool:
    """JSON schema, as far as `SCHEMAS` goes."""
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {
        "string": str,
        "boolean": bool,
        "null": type(None),
        "integer": int,
        "object": dict,
        "array": list,
    }
    if type(value) is not kinds[schema["type"]]:
        return False
    if isinstance(value, dict):
        fields = schema["properties"]
        return value.keys() == fields.keys() and all(
            allows(fields[name], item) for name, item in value.items()
        )
    if isinstance(value, list):
        return 1 <= len(value) <= 2 and all(allows(schema["items"], item) for item in value)
    if isinstance(value, str):
        return len(value) <= 5
    return (
        not isinstance(value, int)
        or "minimum" not in schema
        or schema["minimum"] <= value <= schema["maximum"]
    )


@settings(max_examples=examples(25), deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_any_schema_is_followed(engine: Engine, schema: dict[str, Any], seed: int) -> None:
    grammar = engine.grammars.compile(answer_grammar(schema), "response_format")
    params = SamplingParams(temperature=3.0, seed=seed, max_tokens=1000)
    told = answers(engine, [(params, grammar)])[0][0]
    if told[-1].finish_reason == "stop":
        assert allows(schema, json.loads(text_of(engine, told)))


def test_the_embedded_model_fills_in_a_form(loaded: LoadedModel) -> None:
    engine = small_engine(loaded, kv_cache_gib=0.1)
    prompt = engine.codec.chat_prompt(
        [{"role": "user", "content": "Describe Ann, who is 31 and sad, as JSON."}]
    )
    grammar = engine.grammars.compile(
        answer_grammar(TypeAdapter(Person).json_schema()), "response_format"
    )
    params = SamplingParams(temperature=0.7, seed=1, n=3, max_tokens=120)
    ended = [
        events
        for events in answers(engine, [(params, grammar)], prompt)[0]
        if events[-1].finish_reason == "stop"
    ]
    assert ended
    for events in ended:
        Person.model_validate_json(text_of(engine, events))
