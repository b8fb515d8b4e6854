"""A tokenizer's file may not make texts so much longer that they fill the memory."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from bench.bare_tokenizer import load_tokenizer
from tangram.errors import ModelError
from tangram.model.auto_classes import read_tokenizer
from tangram.model.text_growth import measure_growth
from tests.mentions import mentioning
from tests.real_tokenizers import NAMES, add_tokenizer


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(*texts: str) -> dict[str, Any]:
    """Of SentencePiece, with an empty tree: what is replaced does not matter here."""
    table = bytes(4) + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


LONG = replace({"String": "a"}, "b" * 50_000)
STEPS = {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 5)] * 3}
GROWING = [
    *(LONG, STEPS, charsmap("x", "y" * 101), {"type": "Prepend", "prepend": "z" * 1000}),
    replace({"Regex": "(?=.)"}, "c" * 100),
]


# A decoder has neither tables nor prefixes.
DECODING = [LONG, {"type": "Sequence", "decoders": STEPS["normalizers"]}, GROWING[-1]]
PLACES = [*(("normalizer", rule) for rule in GROWING), *(("decoder", rule) for rule in DECODING)]


@pytest.mark.parametrize(("part", "rule"), PLACES)
def test_a_tokenizer_that_multiplies_texts_is_refused(
    part: str, rule: dict[str, Any], tmp_path: Path
) -> None:
    load_tokenizer("smollm2").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {part: rule}))
    with pytest.raises(ModelError, match=mentioning(f"{part} tokenizer 100")):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_tokenizers_of_real_models_are_read(name: str, tmp_path: Path) -> None:
    assert len(read_tokenizer(add_tokenizer(name, tmp_path))) > 1000


@pytest.mark.parametrize("rule", [rule for rule in GROWING if rule["type"] != "Precompiled"])
def test_what_is_measured_bounds_what_the_library_does(rule: dict[str, Any]) -> None:
    file = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    normalizer = Tokenizer.from_str(json.dumps(file | {"normalizer": rule})).normalizer
    for text in ("a", "aaa"):
        assert 1 < len(normalizer.normalize_str(text)) / len(text) <= measure_growth(rule)


def test_what_unicode_replaces_is_not_counted() -> None:
    # U+FDFA, the longest of NFKC, has 18 characters, which tables of SentencePiece spell.
    assert measure_growth(charsmap("a", "y" * 18)) == 18
    assert measure_growth({"type": "Precompiled", "precompiled_charsmap": ""}) == 1
    assert measure_growth({"type": "NFKC"}) == 1
