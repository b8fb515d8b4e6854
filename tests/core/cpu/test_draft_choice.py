"""Which sequences a step drafts for: those looked at when it was decided, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, cycle, islice

import pytest
from transformers import PretrainedConfig

from tangram.engine.drafts.speculation import Speculation
from tangram.engine.schedule.token_sequence import TokenSequence, sequence_of
from tangram.model.load import LoadedModel
from tangram.speculate.lookup import NgramDrafter
from tangram.speculate.pace import REST_STEPS
from tangram.speculative_config import Ngram
from tangram.types import SamplingParams
from tests.core.cpu.test_purity import TINY
from tests.core.host.device_double import layout, retentions
from tests.small_engines import small_engine
from tests.speculation import METHODS, ask, draft_always

MOST = 3


class StillClock:
    """Seconds that go by when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def speculation_with(clock: StillClock) -> Speculation:
    return Speculation(Ngram(MOST), look=partial(NgramDrafter, 2, 5), now=clock)


def repeating(number: int) -> TokenSequence:
    """A sequence for which a lookup always finds drafts."""
    (retention,) = retentions(layout(2))
    return sequence_of(f"request-{number}", number, retention, "", (1, 2, 3) * 8, 99)


def decide(speculation: Speculation, *sequences: TokenSequence) -> bool:
    """Whether the next step, which decodes `sequences`, drafts."""
    speculation.begin_step()
    if speculation.rests(len(sequences)):
        return False
    wanted = speculation.plan(sequences, waiting=False)
    if not wanted:
        speculation.skip(sequences)
    return wanted


def count_drafts(speculation: Speculation, sequence: TokenSequence) -> int:
    return len(speculation.offer(sequence, MOST))


def rest(speculation: Speculation, clock: StillClock, *sequences: TokenSequence) -> None:
    """Steps that decode `sequences` until drafts are seen not to pay, and none is wanted."""
    while decide(speculation, *sequences):
        for sequence in sequences:
            assert count_drafts(speculation, sequence)
            speculation.settle(sequence, MOST, 0)
        clock.seconds += 10.0
        speculation.end_step()
    clock.seconds += 0.1
    speculation.end_step()


def test_while_no_drafts_are_wanted_a_sequence_that_comes_back_has_none() -> None:
    """Tokens of others are still on the device then, and would be overtaken."""
    clock, (first, second, third) = StillClock(), map(repeating, range(3))
    speculation = speculation_with(clock)
    assert decide(speculation, first, third)
    assert count_drafts(speculation, third)
    rest(speculation, clock, first, second)  # meanwhile `third` fills a chunk
    assert not decide(speculation, first, third)
    assert not count_drafts(speculation, third)


def test_a_choice_of_no_drafts_holds_for_some_steps_or_until_a_sequence_comes_or_goes() -> None:
    clock, sequences = StillClock(), [repeating(number) for number in range(3)]
    speculation = speculation_with(clock)
    rest(speculation, clock, *sequences)
    assert [speculation.rests(3) for _ in range(REST_STEPS + 1)] == [True] * REST_STEPS + [False]
    assert not speculation.plan(sequences, waiting=False)
    assert speculation.rests(3)
    assert not speculation.rests(2)
    speculation.plan(sequences[:1], waiting=False)  # the other one decodes later
    assert not speculation.rests(2)


def test_in_a_step_that_prefills_nothing_is_drafted() -> None:
    speculation, sequence = speculation_with(StillClock()), repeating(0)
    assert decide(speculation, sequence)
    assert count_drafts(speculation, sequence)
    speculation.begin_step()
    assert not count_drafts(speculation, sequence)


def decode_mixed(gaining: int, *, waiting: bool, slower: float) -> tuple[list[float], int]:
    """Answers of some sequences whose drafts are all accepted, and of one that finds none.

    A step with drafts takes `slower` times as long as one without. Returns the seconds of a token
    of each sequence, where one without drafts takes 1, and the steps with drafts.
    """
    clock, steps, drafting = StillClock(), 2400, 0
    speculation = speculation_with(clock)
    (retention,) = retentions(layout(2))
    sources = [*(cycle((1, 2, 3)) for _ in range(gaining)), count(100)]
    sequences = [
        sequence_of(f"{number}", number, retention, "", tuple(islice(source, 24)), 1 << 14)
        for number, source in enumerate(sources)
    ]
    for _ in range(steps):
        speculation.begin_step()
        rests = speculation.rests(len(sequences))
        if not rests and not speculation.plan(sequences, waiting=waiting):
            speculation.skip(sequences)
        drafts = [count_drafts(speculation, sequence) for sequence in sequences]
        for sequence, source, accepted in zip(sequences, sources, drafts, strict=True):
            speculation.settle(sequence, accepted, accepted)
            sequence.extend(list(islice(source, accepted + 1)))
        clock.seconds += slower if any(drafts) else 1.0
        drafting += any(drafts)
        speculation.end_step()
    return [clock.seconds / sequence.read_tokens for sequence in sequences], drafting


@pytest.mark.parametrize("slower", [1.3, 2.0])
def test_no_sequence_loses_much_by_the_drafts_of_others(slower: float) -> None:
    """In the mean of the sequences drafts pay: without a bound every step would have some."""
    (*gaining, alone), drafting = decode_mixed(7, waiting=False, slower=slower)
    assert alone <= 1.03
    assert max(gaining) < 1.0
    assert 0 < drafting < 400


def test_while_requests_wait_for_a_place_what_all_gain_counts() -> None:
    (*gaining, alone), drafting = decode_mixed(7, waiting=True, slower=2.0)
    assert drafting > 2000
    assert max(gaining) < 0.6 and 1.8 < alone <= 2.0


def test_sequences_that_all_gain_are_drafted_for_in_every_step() -> None:
    clock, sequences = StillClock(), [repeating(number) for number in range(4)]
    speculation, drafting = speculation_with(clock), 0
    for _ in range(300):
        speculation.begin_step()
        wanted = speculation.plan(sequences, waiting=False)
        for sequence in sequences if wanted else ():
            speculation.settle(sequence, count_drafts(speculation, sequence), MOST)
        clock.seconds += 2.0 if wanted else 1.0
        drafting += wanted
        speculation.end_step()
    assert drafting > 250


def test_the_engine_says_whether_requests_wait(
    adopt_tiny: Callable[[PretrainedConfig], LoadedModel],
) -> None:
    """Of two requests one waits for the only place, then none."""
    engine, seen = (
        draft_always(
            small_engine(
                adopt_tiny(TINY),
                kv_retention=1.0,
                max_num_seqs=1,
                speculative_config=METHODS["ngram"],
            )
        ),
        list[bool](),
    )
    assert engine._speculation is not None
    plan = engine._speculation.plan

    def note(sequences: Sequence[TokenSequence], *, waiting: bool) -> bool:
        seen.append(waiting)
        return plan(sequences, waiting=waiting)

    engine._speculation.plan = note  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ask(engine, [[5, 6, 7] * 4, [8, 9] * 5], [params] * 2)
    assert seen.index(False) > 0 and not any(seen[seen.index(False) :])
