"""Which sequences a step drafts for: those looked at when it was decided, and no other."""

from __future__ import annotations

from functools import partial

from tangram.engine.speculation import Speculation
from tangram.engine.token_sequence import TokenSequence, sequence_of
from tangram.speculate.lookup import NgramDrafter
from tangram.speculative_config import Ngram
from tests.host.device_double import layout, retentions

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
    wanted = speculation.plan(sequences)
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


def test_in_a_step_that_prefills_nothing_is_drafted() -> None:
    speculation, sequence = speculation_with(StillClock()), repeating(0)
    assert decide(speculation, sequence)
    assert count_drafts(speculation, sequence)
    speculation.begin_step()
    assert not count_drafts(speculation, sequence)
