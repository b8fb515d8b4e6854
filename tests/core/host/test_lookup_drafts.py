"""Drafts that are looked up: what a search through all tokens would find."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tangram.speculate.lookup import NgramDrafter, RecentAnswers, SuffixDrafter
from tangram.speculate.token_history import TokenHistory
from tangram.types import Int64

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4)


def array(tokens: list[int]) -> Int64:
    return np.asarray(tokens, np.int64)


def search(tokens: list[int], context: list[int], depth: int) -> dict[int, int]:
    """Position → tokens before it that equal the end of `context`, where at least two do."""
    found = {}
    for end in range(2, len(tokens)):
        most = min(depth, end, len(context))
        equal = [tokens[end - 1 - at] == context[-1 - at] for at in range(most)]
        matched = equal.index(False) if False in equal else most
        if matched >= 2:
            found[end] = matched
    return found


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20), st.integers(2, 8))
def test_places_are_those_that_a_search_finds(tokens: list[int], split: int, depth: int) -> None:
    history = TokenHistory()
    for begin in range(0, len(tokens), split):
        history.extend(array(tokens[begin : begin + split]))
    found = history.places(history.newest(depth), len(tokens) + 1)
    expected = search(tokens, tokens, depth)
    assert dict(found[:, [0, 2]].tolist()) == expected
    assert found[:, 0].tolist() == sorted(expected, reverse=True)


def test_a_long_text_is_kept_whole() -> None:
    history = TokenHistory()
    tokens = np.arange(3000) % 17
    history.extend(tokens[:700])
    history.extend(tokens[700:])
    assert history.newest(4000).tolist() == tokens.tolist()


def test_places_of_many_texts_are_found_in_each_but_not_across_their_ends() -> None:
    """There are more tokens than a history begins with memory for."""
    history, tokens, starts = TokenHistory(), list[int](), set[int]()
    for text in np.random.default_rng(0).integers(0, 4, (9, 250)):
        history.begin_text()
        starts.add(len(tokens))
        history.extend(text)
        tokens += text.tolist()
    found = history.places(history.newest(5), len(tokens))
    expected = search(tokens, tokens, 5)
    ends = {end for end in expected if not starts & {end, end - 1}}
    assert dict(found[:, [0, 2]].tolist()) == {end: expected[end] for end in ends}
    followed = [history.after(place, 300).tolist() for place in found]
    assert followed == [tokens[end : end - end % 250 + 250] for end in sorted(ends, reverse=True)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_an_ngram_draft_is_what_followed_the_longest_match(tokens: list[int], most: int) -> None:
    drafter = NgramDrafter(2, 5)
    drafter.extend(array(tokens))
    drafted = drafter.draft(most).tolist()
    matches = search(tokens, tokens, 5)
    if not matches:
        assert drafted == []
        return
    longest = max(matches.values())
    newest = max(end for end, matched in matches.items() if matched == longest)
    assert drafted == tokens[newest : newest + most]


def test_a_short_match_is_not_followed() -> None:
    drafter = NgramDrafter(4, 5)
    drafter.extend(array([1, 2, 3, 9, 8, 1, 2, 3]))
    assert drafter.draft(4).tolist() == []


def suffix(*answers: list[int], share: float = 0.1, factor: float = 4.0) -> SuffixDrafter:
    recent = RecentAnswers(1000)
    for answer in answers:
        recent.add(array(answer))
    return SuffixDrafter(recent, depth=8, factor=factor, least_share=share)


def test_answers_of_others_are_drafted_from() -> None:
    drafter = suffix([5, 6, 7, 8, 9, 10])
    drafter.extend(array([1, 2, 6, 7]))
    assert drafter.draft(8).tolist() == [8, 9, 10]


def test_a_draft_follows_what_most_did_and_ends_where_they_part() -> None:
    answers = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8]]
    drafter = suffix(*answers, share=0.5)
    drafter.extend(array([9, 1, 2]))
    assert drafter.draft(8).tolist() == [3, 4]


def test_a_draft_is_no_longer_than_its_match_allows() -> None:
    drafter = suffix(list(range(40)), factor=1.0)
    drafter.extend(array([7, 8, 9]))
    assert drafter.draft(16).tolist() == [10, 11, 12]


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_a_draft_has_come_before(texts: list[list[int]], tokens: list[int], most: int) -> None:
    drafter = suffix(*texts)
    drafter.extend(array(tokens))
    drafted = drafter.draft(most).tolist()
    assert len(drafted) <= most
    if drafted:
        pattern = [*tokens[-2:], *drafted[:1]]
        known = [one for text in (*texts, tokens) for one in (*text, -1)]
        runs = [known[at : at + len(pattern)] for at in range(len(known))]
        assert pattern in runs


@given(st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=20))
def test_recent_answers_are_bounded(answers: list[list[int]]) -> None:
    recent = RecentAnswers(50)
    for answer in answers:
        recent.add(array(answer))
    assert sum(map(len, recent.histories)) <= 50


def test_no_answer_is_remembered_where_none_may_be() -> None:
    recent = RecentAnswers(0)
    recent.add(np.arange(10))
    assert all(len(history) == 0 for history in recent.histories)
