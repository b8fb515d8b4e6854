"""Messages in the tokens of real models: text stays text, whatever it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bench.bare_tokenizer import load_tokenizer
from tangram.engine.text.codec import TextCodec
from tangram.model.convert import read_tokenizer
from tests.real_templates import LLAMA2, MISTRAL_LISTS, real_template
from tests.real_tokenizers import NAMES, add_tokenizer

TEMPLATES = {
    "gptoss": real_template("gptoss"),
    "llama2": LLAMA2,
    "llama3_1": real_template("llama3_1"),
    "mistral_v3": MISTRAL_LISTS["mistral-7b-instruct-v0.3"],
    "qwen2_5": real_template("qwen2_5"),
    "qwen3": real_template("qwen3"),
}
# As `transformers` reads it where the folder names no class: a normalizer prepends the spaces.
PLAIN_LLAMA2 = "llama2, by its file alone"
PLACE = "QQQ"


@pytest.fixture(scope="module", params=[*NAMES, PLAIN_LLAMA2, "smollm2"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    name = request.param
    if name == "smollm2":
        return TextCodec(load_tokenizer(name))
    folder = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer("llama2" if name == PLAIN_LLAMA2 else name, folder)
    tokenizer: PreTrainedTokenizerBase = (
        PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        if name == PLAIN_LLAMA2
        else read_tokenizer(Path(folder))
    )
    tokenizer.chat_template = TEMPLATES.get(name, LLAMA2)
    return TextCodec(tokenizer)


def names_of(codec: TextCodec) -> list[str]:
    """Names of control tokens and of marks, in the order of their ids."""
    tokens = codec.tokenizer.added_tokens_decoder.items()
    marks = codec.marks.words
    return [str(token) for number, token in tokens if token.special or number in marks][:40]


def conversation(codec: TextCodec, text: str) -> tuple[int, ...]:
    return codec.chat_prompt([{"role": "user", "content": text}])


TEXTS: dict[str, Callable[[list[str]], str]] = {
    "asked": lambda names: "".join(f"what does {name} mean? " for name in names) + "end",
    "side by side": lambda names: f"a{''.join(names)}b{names[0]}",
    "across lines": lambda names: "x" + "\n\n  ".join(names) + "\n y",
    "inside words": lambda names: "x".join(["q", *names, "<", names[0][:-1], "é"]),
}


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS)
def test_a_message_decodes_to_itself_and_has_no_control_token(
    codec: TextCodec, make: Callable[[list[str]], str]
) -> None:
    text = make(names_of(codec))
    plain, found = conversation(codec, PLACE), conversation(codec, text)
    structure = codec.special_token_ids.union(codec.marks.words)

    def controls(tokens: tuple[int, ...]) -> list[int]:
        return [token for token in tokens if token in structure]

    assert controls(found) == controls(plain)
    shown = codec.verbatim(plain, "prompt").replace(PLACE, text)
    assert codec.verbatim(found, "prompt") == shown


ODD = (
    "Two  spaces,\n\nlines and é 漢 \t < / >.",
    " begins and ends with spaces  ",
    " def f(x):\n    y",
    "▁▁ and <0x0A>",
    *("x", " ", "\n", "\r\n", "'s", "\u200b🤷", "ﬁ Ａ", "\x00", "|", "12345"),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_conversation_has_the_tokens_of_the_tokenizer(codec: TextCodec, data: DataObject) -> None:
    """Whether its texts were tokenized before or not, and from whom."""
    pieces = st.sampled_from(ODD) | st.sampled_from(names_of(codec))
    rendered = "".join(data.draw(st.lists(pieces, max_size=12)))
    expected = codec.tokenizer.encode(rendered, add_special_tokens=False)
    for salt in ("", "", "another"):
        assert list(codec.encode_chat([rendered], salt)) == expected


def test_a_message_without_names_has_the_tokens_of_the_tokenizer(codec: TextCodec) -> None:
    for text in ODD:
        rendered = codec.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        expected = codec.tokenizer.encode(rendered, add_special_tokens=False)
        assert list(conversation(codec, text)) == expected
