"""What tests ask of texts is asked strictly."""

from __future__ import annotations

from tests.mentions import mentions

TEXT = "kv_retention is 0.33, it must lie in (0, 1]: leave it out,\nor pass --kv-retention -1"


def test_facts_are_whole_words_in_any_order() -> None:
    assert mentions(TEXT, "--kv-retention kv_retention 0.33 (0, 1] -1")
    for other in ("retention", "kv-retention", "0.3", "33", "1 2", "--kv-retention 0.34"):
        assert not mentions(TEXT, other), other
