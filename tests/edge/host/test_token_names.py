"""Names of control tokens in a text are found as a pattern of all of them would find them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tangram.engine.text.token_names import TokenNames

NAMES = ["<a>", "<a", "<ab>", "]", "[b]", "^"]
LONGEST_FIRST = "|".join(map(re.escape, sorted(NAMES, key=len, reverse=True)))


@given(st.text(alphabet="<ab>[]^-", max_size=20))
def test_names_are_split_off_and_hidden(text: str) -> None:
    names = TokenNames(NAMES)
    assert names.split(text) == re.split(f"({LONGEST_FIRST})", text)
    hidden = names.hide(text, "#")
    assert hidden == re.sub(f"(?=(?:{LONGEST_FIRST}))(.)", r"\1#", text)
    assert "<a>" not in hidden


def test_no_names() -> None:
    assert (TokenNames([]).split("<a>"), TokenNames([]).hide("<a>", "#")) == (["<a>"], "<a>")
