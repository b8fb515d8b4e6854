"""Making grammars: what is wrong with one, and that nobody pays twice for finding out."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tangram.engine.llm import LLM
from tangram.engine.loop import Engine
from tangram.errors import MachineError, RequestError
from tangram.model.load import LoadedModel
from tangram.serve.formats.call_grammar import answer_grammar
from tests.edge.cpu.test_grammar import PERSON, engine, tiny
from tests.mentions import mentioning
from tests.small_engines import small_engine

__all__ = ["engine", "tiny"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('start: %json {"not": {}}\n', "not"),
        ('start: %json {"type": "string", "format": "zip"}\n', "zip"),
        ('start: %json {"type": "string", "pattern": "("}\n', "unclosed"),
        ("start: nowhere\n", "nowhere"),
        ('start: x "a"\nx: x "b"\n', "satisfies"),
    ],
)
def test_no_grammar_is_an_error_of_the_field_and_the_next_one_is_fine(
    engine: Engine, source: str, words: str
) -> None:
    with pytest.raises(RequestError, match=mentioning(f"response_format {words}")) as error:
        engine.grammars.compile(source, "response_format")
    assert error.value.field == "response_format"
    assert "\n" not in str(error.value)
    engine.grammars.compile(answer_grammar(PERSON), "response_format")


def test_what_was_made_or_refused_before_is_tried_no_more(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where refusals are many, each of which takes seconds of somebody's time."""
    tried = list[bytes]()
    run = subprocess.run

    def count_calls(*args: Any, **options: Any) -> Any:
        tried.append(options["input"])
        return run(*args, **options)

    monkeypatch.setattr("tangram.engine.text.grammar.subprocess.run", count_calls)
    monkeypatch.setattr("tangram.engine.text.grammar._KEPT_GRAMMARS", 2)
    monkeypatch.setattr("tangram.engine.text.grammar._KEPT_REFUSALS", 2)
    grammars = small_engine(tiny).grammars
    good, bad = 'start: "yes"\n', [f"start: nowhere_{number}\n" for number in range(3)]
    assert grammars.look_up(good, "tools") is None
    made = grammars.compile(good, "tools")
    for source in bad:
        with pytest.raises(RequestError, match="nowhere"):
            grammars.compile(source, "tools")
    assert tried == [json.dumps([source]).encode() for source in (good, *bad)]
    for found in (grammars.look_up, grammars.compile):
        assert found(good, "tools") is made
        with pytest.raises(RequestError, match="nowhere_2") as told:
            found(bad[2], "tools")
        assert told.value.field == "tools"
    assert len(tried) == 4
    assert grammars.look_up(bad[0], "tools") is None, "more are kept than may be"


def test_a_trial_that_could_not_be_held_is_held_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'start: "once more"\n'
    with monkeypatch.context() as patched, pytest.raises(MachineError):
        patched.setattr("tangram.engine.text.grammar.sys.executable", "/nowhere")
        engine.grammars.compile(source, "tools")
    assert engine.grammars.look_up(source, "tools") is None
    assert engine.grammars.compile(source, "tools") is engine.grammars.look_up(source, "tools")


def test_a_tokenizer_of_whole_words_is_refused(small_llm: LLM) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        small_llm.engine.grammars.compile(answer_grammar(PERSON), "tools")
