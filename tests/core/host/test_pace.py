"""How many tokens are drafted: the number that pays, found with few trials."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.speculate.pace import (
    PROBE_EVERY,
    PROBE_SHARE,
    REST_STEPS,
    Acceptance,
    Pace,
    expected_of,
    expected_tokens,
)

LOAD, FAR = (4, 12), (9, 20)


def choose(pace: Pace, load: tuple[int, ...], share: float) -> int:
    """The number chosen for one sequence that accepts `share` of its drafts."""
    return pace.choose(load, [Acceptance(1.0, share)])[0]


def run(
    pace: Pace, fixed_s: float, draft_s: float, acceptance: float, iterations: int
) -> list[int]:
    """The numbers chosen where an iteration takes `fixed_s` and `draft_s` for each draft."""
    chosen = []
    for _ in range(iterations):
        count = choose(pace, LOAD, acceptance)
        chosen.append(count)
        pace.record(LOAD, count, fixed_s + draft_s * count)
    return chosen


def rate(count: int, fixed_s: float, draft_s: float, acceptance: float) -> float:
    return expected_tokens(acceptance, count)[count] / (fixed_s + draft_s * count)


@given(st.integers(1, 32), st.floats(0.001, 1.0), st.floats(0.0001, 1.0), st.floats(0.01, 0.99))
def test_what_is_chosen_pays_most(most: int, fixed: float, draft: float, acceptance: float) -> None:
    pace = Pace(most)
    chosen = run(pace, fixed, draft, acceptance, PROBE_EVERY - 1)[-1]
    best = max(rate(count, fixed, draft, acceptance) for count in pace.counts)
    least = 0.999 if chosen else 0.95  # drafts that gain little are not worth their risk
    assert rate(chosen, fixed, draft, acceptance) >= best * least


@given(st.floats(0.01, 1.0), st.floats(0.001, 1.0), st.floats(0.01, 0.6))
def test_where_drafting_does_not_pay_little_is_lost(
    fixed: float, draft: float, acceptance: float
) -> None:
    pace = Pace(8)
    run(pace, fixed, draft, acceptance, 8)  # each load begins with some trials
    chosen = run(pace, fixed, draft, acceptance, 20 * PROBE_EVERY)
    tokens = expected_tokens(acceptance, 8)[chosen].sum()
    seconds = sum(fixed + draft * count for count in chosen)
    assert tokens / seconds >= 0.97 / fixed


@given(
    st.lists(st.floats(0.01, 0.99), min_size=2, max_size=8),
    st.floats(0.01, 1.0),
    st.floats(0.001, 0.5),
)
def test_sequences_that_accept_little_do_not_wait_for_others_more_than_these_gain(
    shares: list[float], fixed: float, draft: float
) -> None:
    """An iteration takes as long as its longest draft: the mean time per token never grows."""
    pace, sequences = Pace(8), [Acceptance(1.0, share) for share in shares]
    for _ in range(16):  # each load begins with some trials
        most = max(pace.choose(LOAD, sequences))
        pace.record(LOAD, most, fixed + draft * most)
    chosen = pace.choose(LOAD, sequences)
    seconds = fixed + draft * max(chosen)
    waits = [
        seconds / own[count] for own, count in zip(expected_of(sequences, 8), chosen, strict=True)
    ]
    assert sum(waits) <= 1.002 * fixed * len(shares)


@pytest.mark.parametrize("disturbed", [8, 20, 45])
def test_a_disturbance_of_plain_iterations_begins_no_drafts(disturbed: int) -> None:
    """As seen on a GPU: 17 iterations in a row took twice as long, and drafts went on for 70."""
    pace = Pace(8)
    run(pace, 1.2e-3, 1.7e-3, 0.98, 200)
    for _ in range(disturbed):
        pace.record(LOAD, 0, 2.4e-3)
    trials = [count for count in run(pace, 1.2e-3, 1.7e-3, 0.98, 2 * PROBE_EVERY) if count]
    assert len(trials) <= 4


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
def test_a_machine_that_becomes_slower_is_not_taken_for_slow_plain_steps(slower: float) -> None:
    """Drafts are compared by old times at first: as seen on a GPU, for 62 steps of 18 ms."""
    pace = Pace(8)
    run(pace, 1.2e-3, 1.7e-3, 0.98, 3000)
    chosen = run(pace, slower * 1.2e-3, slower * 1.7e-3, 0.98, 400)
    assert sum(count > 0 for count in chosen) <= 24


def test_trials_among_plain_steps_lose_half_of_what_trials_may() -> None:
    """The steps around them wait, which loses the other half."""
    pace, fixed, draft = Pace(8), 1.2e-3, 1.7e-3
    run(pace, fixed, draft, 0.98, 200)
    chosen = run(pace, fixed, draft, 0.98, 20000)
    tokens = expected_tokens(0.98, 8)[chosen].sum()
    lost = 1.0 - tokens * fixed / sum(fixed + draft * count for count in chosen)
    assert 0.0 < lost <= 0.55 * PROBE_SHARE


def test_what_one_sequence_gains_can_be_too_little_for_all() -> None:
    good, bad = Acceptance(1.0, 0.95), Acceptance(1.0, 0.05)
    pace = Pace(8)
    for count in pace.counts * 4:
        pace.record(LOAD, count, 2.0 if count else 1.0)
    assert pace.choose(LOAD, [good, bad, bad, bad]) == [0, 0, 0, 0]
    assert pace.choose(LOAD, [good], others=3) == [0], "who has no drafts waits, too"
    mixed = pace.choose(LOAD, [good, good, good, bad])
    assert mixed[0] == 8 and mixed[3] < 8


def test_where_no_sequence_may_have_drafts_none_are_chosen() -> None:
    pace = Pace(8)
    run(pace, 1.0, 0.1, 0.9, 2 * PROBE_EVERY)
    assert pace.choose(LOAD, []) == pace.choose(FAR, []) == []
    pace.record(LOAD, 0, 1.0)
    assert choose(pace, LOAD, 0.9) > 0


def test_a_change_of_costs_is_noticed() -> None:
    pace = Pace(8)
    assert run(pace, 1.0, 0.01, 0.9, PROBE_EVERY - 1)[-1] == 8
    assert run(pace, 1.0, 2.0, 0.9, 6 * PROBE_EVERY)[-1] == 0


def test_loads_are_told_apart() -> None:
    pace = Pace(8)
    run(pace, 1.0, 0.01, 0.9, 16)
    pace.record(FAR, 0, 1.0)
    assert choose(pace, FAR, 0.9) == 3


@given(st.floats(0.5, 4.0), st.sampled_from([0.1, 3.0]))
def test_a_near_load_begins_with_what_is_known(factor: float, draft_s: float) -> None:
    """All times of the next load are longer by one factor: nothing is tried that does not pay."""
    pace = Pace(8)
    best = run(pace, 1.0, draft_s, 0.9, 20)[-1]
    near = LOAD[0], LOAD[1] + 1
    for _ in range(PROBE_EVERY - 1):
        count = choose(pace, near, 0.9)
        assert count == best
        pace.record(near, count, factor * (1.0 + draft_s * count))


def test_a_slow_first_pass_of_a_number_does_not_rule_it_out() -> None:
    """The first pass of its kind may compile or capture something."""
    pace, seen = Pace(8), set[int]()
    for _ in range(20):
        count = choose(pace, LOAD, 0.95)
        seconds = 1.0 + 0.1 * count
        pace.record(LOAD, count, seconds if count in seen else 5.0 * seconds)
        seen.add(count)
    assert choose(pace, LOAD, 0.95) == 8


def test_no_drafts_are_tried_again_wherever_the_best_number_is() -> None:
    """A number is never kept because no drafts were once measured at a bad time."""
    pace = Pace(8)
    for count in (0, 3, 7, 8) * 3:
        pace.record(LOAD, count, 1.0 + count if count else 2.0)
    assert choose(pace, LOAD, 0.9) > 0
    last = []
    for _ in range(40 * PROBE_EVERY):
        last.append(run(pace, 1.0, 1.0, 0.9, 1)[0])
        for _ in range(0 if last[-1] else REST_STEPS):
            pace.record(LOAD, 0, 1.0)
    assert last[-PROBE_EVERY:].count(0) > PROBE_EVERY // 2


def test_a_trial_with_drafts_takes_two_iterations() -> None:
    """The first one follows a plain step, so its time is not told."""
    pace = Pace(8)
    run(pace, 1.0, 2.0, 0.9, 20)
    chosen = run(pace, 1.0, 2.0, 0.9, 40 * PROBE_EVERY)
    trials = "".join("d" if count else "." for count in chosen).split(".")
    assert {len(trial) for trial in trials if trial} == {2}


def test_what_finds_nothing_to_draft_is_asked_less() -> None:
    """Being asked costs time of its own: a step cannot begin before the one before has ended."""
    pace, own, asked = Pace(8), Acceptance(), 0
    for _ in range(200):
        if max(pace.choose(LOAD, [own])):
            asked += 1
            own.count_found(False)
            pace.record_unfound(LOAD, 1.6)
        else:
            pace.record(LOAD, 0, 1.0)
    assert asked < 30


def test_a_load_without_times_ends_without_drafts() -> None:
    """Where every other step prefills, no step follows one of its kind."""
    pace = Pace(8)
    assert [choose(pace, LOAD, 0.9) for _ in range(100)][-50:] == [0] * 50


def test_a_single_slow_iteration_changes_nothing() -> None:
    pace = Pace(8)
    best = run(pace, 1.0, 0.01, 0.9, 20)[-1]
    pace.record(LOAD, best, 100.0)
    assert choose(pace, LOAD, 0.9) == best


@given(st.floats(0.05, 0.95))
def test_acceptance_is_that_of_tokens_that_were_tried(share: float) -> None:
    acceptance, chance = Acceptance(), Random(0)
    for _ in range(400):
        accepted = 0
        while accepted < 4 and chance.random() < share:
            accepted += 1
        acceptance.count(4, accepted)
    assert acceptance.share == pytest.approx(share, abs=0.12)


def test_acceptance_stays_between_its_ends() -> None:
    never, always = Acceptance(), Acceptance()
    for _ in range(5000):
        never.count(4, 0)
        always.count(4, 4)
    assert 0.0 <= never.share < 0.05 and 0.95 < always.share <= 1.0
    assert expected_of([never, always], 8)[:, 8] == pytest.approx([1.0, 9.0])
    assert run(Pace(8), 0.1, 0.001, 1.0, PROBE_EVERY - 1)[-1] == 8


def test_a_new_sequence_begins_with_what_others_accepted() -> None:
    """Where drafts are refused it drafts less from its first token on, and soon knows better."""
    everyone = Acceptance()
    for _ in range(20):
        first = everyone.begin_sequence()
        for _ in range(10):
            first.count(4, 0)
    later = everyone.begin_sequence()
    assert later.share < 0.05
    later.count(16, 16)
    assert later.share > 0.75
    assert everyone.share < later.share


def test_a_new_sequence_begins_with_how_often_others_found_a_draft() -> None:
    everyone = Acceptance()
    for _ in range(50):
        everyone.begin_sequence().count_found(False)
    assert everyone.begin_sequence().found < 0.01
