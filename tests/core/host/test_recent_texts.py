"""What is kept of texts stays within its bounds, and is what was used last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tangram.engine.text.recent_texts import RecentTexts

KEYS = st.tuples(st.sampled_from("ab"), st.text("xy", max_size=6))


@given(st.lists(st.tuples(KEYS, st.booleans())), st.integers(0, 5), st.integers(0, 20))
def test_what_was_used_last_is_kept_within_the_bounds(
    steps: list[tuple[tuple[str, str], bool]], most: int, most_characters: int
) -> None:
    kept, model = RecentTexts[int](most, most_characters), list[tuple[tuple[str, str], int]]()
    for number, (key, writes) in enumerate(steps):
        known = dict(model)
        assert kept.find(key) == known.get(key)
        if key in known or writes:
            value = number if writes else known[key]
            model = [*((old, seen) for old, seen in model if old != key), (key, value)]
        if writes:
            kept.keep(key, number)
            while len(model) > most or sum(len("".join(old)) for old, _ in model) > most_characters:
                model.pop(0)
    assert all(kept.find(key) == value for key, value in model)
