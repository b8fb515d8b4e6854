"""Why a prefix was not reused: laws of the index of recent conversations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tangram.cache.recent import MOST_OF_DOMAIN, MOST_TOKENS, Conversations
from tangram.types import MOST_SHOWN, Int64, LossReason, LostPrefix

CHUNK = 4
MINE, THEIRS = b"mine", b"theirs"
# Few tokens, so that prompts often begin alike.
Tokens = st.lists(st.integers(0, 2), max_size=60)
Spoken = st.lists(st.tuples(st.sampled_from([MINE, THEIRS]), Tokens), max_size=12)


def array(tokens: Sequence[int]) -> Int64:
    return np.asarray(tokens, np.int64)


def talk(count: int, seed: int) -> list[int]:
    """Tokens as of a text that no other has."""
    return np.random.default_rng(seed).integers(10, 50_000, count).tolist()


def heard(*conversations: Sequence[int], chunk: int = CHUNK) -> Conversations:
    """An index in which all of these have ended, each with all of its whole chunks stored."""
    index = Conversations(chunk)
    for tokens in conversations:
        index.remember(MINE, array(tokens), len(tokens) // chunk * chunk)
    return index


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(Spoken, Tokens.filter(bool), st.integers(0, 12))
def test_a_loss_is_what_a_conversation_had_and_the_prompt_could_use(
    spoken: list[tuple[bytes, list[int]]], prompt: list[int], cached_chunks: int
) -> None:
    index = Conversations(CHUNK)
    for domain, tokens in spoken:
        index.remember(domain, array(tokens), len(tokens) // CHUNK * CHUNK)
    usable = (len(prompt) - 1) // CHUNK * CHUNK
    cached = min(cached_chunks * CHUNK, usable)
    lost = index.find_loss(MINE, array(prompt), cached)
    mine = [tokens for domain, tokens in spoken if domain == MINE]
    same = max((min(common(tokens, prompt), usable) for tokens in mine), default=0)
    if same // CHUNK * CHUNK > cached:
        assert lost == LostPrefix(LossReason.EVICTED, same // CHUNK * CHUNK - cached)
    elif lost is not None:
        assert lost.reason is LossReason.DIVERGED
        assert any(
            common(tokens, prompt) == lost.at
            and tuple(tokens[lost.at :][:MOST_SHOWN]) == lost.known
            and lost.tokens == min(len(tokens) // CHUNK * CHUNK, usable) - cached > 0
            for tokens in mine
        )


@given(st.lists(Tokens, max_size=12), Tokens.filter(bool))
def test_nothing_is_said_of_conversations_of_others(
    theirs: list[list[int]], prompt: list[int]
) -> None:
    index = Conversations(CHUNK)
    for tokens in (*theirs, prompt, [9, *prompt, *prompt]):
        index.remember(THEIRS, array(tokens), len(tokens) // CHUNK * CHUNK)
    assert index.find_loss(MINE, array(prompt), 0) is None


HISTORY = talk(6000, 1)


def test_a_changed_date_loses_all_behind_it() -> None:
    prompt = [*HISTORY[:41], 7, 8, *HISTORY[42:], *talk(300, 2)]
    lost = heard(HISTORY, chunk=64).find_loss(MINE, array(prompt), 0)
    stored = len(HISTORY) // 64 * 64
    assert lost == LostPrefix(LossReason.DIVERGED, stored, 41, tuple(HISTORY[41 : 41 + MOST_SHOWN]))


def test_another_order_and_a_dropped_part_are_found() -> None:
    index = heard(HISTORY, chunk=64)
    tools = [*HISTORY[:100], *HISTORY[1500:3000], *HISTORY[100:1500], *HISTORY[3000:]]
    thoughts = [*HISTORY[:5000], *HISTORY[5400:], *talk(300, 3)]
    for prompt, at in ((tools, 100), (thoughts, 5000)):
        lost = index.find_loss(MINE, array(prompt), at // 64 * 64)
        assert lost is not None and (lost.reason, lost.at) == (LossReason.DIVERGED, at)


def test_another_question_behind_the_same_instructions_has_lost_nothing() -> None:
    prompt = [*HISTORY[:1000], *talk(5000, 4)]
    assert heard(HISTORY, chunk=64).find_loss(MINE, array(prompt), 960) is None


def test_a_conversation_with_more_in_common_does_not_hide_the_one_that_was_continued() -> None:
    """Today's date is in another conversation, too, which has only the instructions in common."""
    today = [*HISTORY[:41], 7, *HISTORY[42:]]
    other = [*today[:1000], *talk(5000, 5)]
    lost = heard(HISTORY, other, chunk=64).find_loss(MINE, array(today), 960)
    assert lost is not None and (lost.at, lost.tokens) == (41, len(HISTORY[:-1]) // 64 * 64 - 960)


def test_the_next_turn_loses_nothing_and_takes_the_place_of_the_last() -> None:
    index = Conversations(CHUNK)
    for turn in range(1, 3 * MOST_OF_DOMAIN):
        prompt = HISTORY[: 10 * turn]
        cached = (len(prompt) - 1) // CHUNK * CHUNK
        assert index.find_loss(MINE, array(prompt), cached) is None
        index.remember(MINE, array(prompt), len(prompt) // CHUNK * CHUNK)
    assert index.cost_tokens < 2 * len(HISTORY)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, MOST_TOKENS // 3)), max_size=12))
def test_memory_is_bounded_and_the_newest_stays(spoken: list[tuple[int, int]]) -> None:
    index = Conversations(CHUNK)
    for number, (domain, tokens) in enumerate(spoken):
        said = np.full(tokens + CHUNK, number, np.int64)
        index.remember(bytes([domain]), said, CHUNK)
        assert index.cost_tokens <= MOST_TOKENS
        prompt = np.full(CHUNK + 1, number, np.int64)
        lost = index.find_loss(bytes([domain]), prompt, 0)
        assert lost == LostPrefix(LossReason.EVICTED, CHUNK)
