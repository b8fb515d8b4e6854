"""The requests that the web page can show: those that run, and the newest that have ended."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tangram.watch import SequenceChange, SequenceReading, SequenceState
from tangram.web.questions import Announcement

# Ended requests are remembered up to these bounds.
MOST_REQUESTS, MOST_TOKENS = 1024, 4_000_000
# Announced requests that the engine has not told of yet; it may have refused them.
_MOST_ANNOUNCED = 4096
# So many of the newest completions are asked whether a new one continues their conversation.
_MOST_COMPARED = 64
_MOST_CONVERSATIONS = 65535  # their numbers have 16 bits


@dataclass(eq=False)
class ShownCompletion:
    """One completion, as it was last told of. Times are of the monotonic clock."""

    announcement: Announcement
    choice: int
    conversation: int
    reading: SequenceReading
    state: SequenceState = SequenceState.WAITING
    first_token_s: float | None = None
    ended_s: float | None = None
    told_s: float = 0.0  # when watchers were last told of it

    @property
    def running(self) -> bool:
        """Whether it has pages."""
        return self.state is SequenceState.RUNNING

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.state is SequenceState.ENDED

    def take(self, change: SequenceChange) -> None:
        """Enter a change of the engine's sequence."""
        self.reading = change.reading
        match change.state:
            case SequenceState.FIRST_TOKEN:
                self.first_token_s = change.at_s
            case SequenceState.ENDED:
                self.ended_s = change.at_s
                self.state = change.state
                # The engine's array has space for tokens that never came.
                tokens = change.reading.tokens.astype(np.int64, copy=True)
                self.reading = replace(change.reading, tokens=tokens)
            case SequenceState.RUNNING | SequenceState.WAITING:
                self.state = change.state


@dataclass
class Requests:
    """All completions that are shown, by the id of the API's answer and their choice."""

    _announced: OrderedDict[str, Announcement] = field(default_factory=OrderedDict)
    _by_sequence: dict[tuple[str, int], ShownCompletion] = field(default_factory=dict)
    _by_name: dict[tuple[str, int], ShownCompletion] = field(default_factory=dict)
    _all: dict[ShownCompletion, None] = field(default_factory=dict)
    _running: int = 0
    _ended_tokens: int = 0
    _numbers: Iterator[int] = field(
        default_factory=lambda: itertools.cycle(range(1, _MOST_CONVERSATIONS + 1))
    )

    def announce(self, announcement: Announcement) -> None:
        """The engine may soon tell of sequences of this request."""
        self._announced[announcement.engine_id] = announcement
        if len(self._announced) > _MOST_ANNOUNCED:
            self._announced.popitem(last=False)

    def take(self, change: SequenceChange) -> ShownCompletion | None:
        """The completion that has changed; None if it is of no request of the API."""
        reading = change.reading
        place = reading.request_id, reading.index
        known = self._by_sequence.get(place)
        if known is None:
            announcement = self._announced.get(reading.request_id)
            if announcement is None:
                return None
            choice = announcement.first_choice + reading.index
            number = self._conversation(announcement.client, reading)
            known = ShownCompletion(announcement, choice, number, reading)
            self._by_sequence[place] = known
            self._all[known] = None
            self._running += 1
            for name in announcement.names:
                self._by_name[name, choice] = known
        known.take(change)
        if known.ended:
            self._running -= 1
            self._ended_tokens += len(known.reading.tokens)
            self._forget_oldest()
        return known

    def read(self, reading: SequenceReading) -> ShownCompletion | None:
        """The completion of a sequence that held pages; it may have changed since the reading."""
        known = self._by_sequence.get((reading.request_id, reading.index))
        if known is not None and len(reading.tokens) >= len(known.reading.tokens):
            known.reading = known.reading if known.ended else reading
        return known

    def find(self, name: str, choice: int) -> ShownCompletion | None:
        """The completion `choice` of a request of the API, by one of its names."""
        return self._by_name.get((name, choice))

    @property
    def running(self) -> bool:
        """Whether a completion has not ended."""
        return self._running > 0

    @property
    def newest(self) -> Iterator[ShownCompletion]:
        """All completions, the newest first."""
        return reversed(self._all)

    def _conversation(self, client: bytes | None, reading: SequenceReading) -> int:
        """The number of the conversation that a new completion continues, or a new number.

        It continues that of the longest prompt with which its prompt begins.
        """
        best, number = 0, 0
        for other in itertools.islice(self.newest, _MOST_COMPARED):
            prompt = other.reading.tokens[: other.reading.usage.prompt_tokens]
            same = other.announcement.client == client
            if same and len(prompt) > best and _begins(reading, other.reading, prompt):
                best, number = len(prompt), other.conversation
        return number or next(self._numbers)

    def _forget_oldest(self) -> None:
        for shown in list(self._all):
            if len(self._all) <= MOST_REQUESTS and self._ended_tokens <= MOST_TOKENS:
                return
            if shown.ended:
                self._ended_tokens -= len(shown.reading.tokens)
                del self._all[shown]
                del self._by_sequence[shown.reading.request_id, shown.reading.index]
                for name in shown.announcement.names:
                    del self._by_name[name, shown.choice]


def _begins(reading: SequenceReading, other: SequenceReading, prompt: np.ndarray) -> bool:
    return (
        (reading.kv_retention, reading.scorer) == (other.kv_retention, other.scorer)
        and len(prompt) <= len(reading.tokens)
        and bool((reading.tokens[: len(prompt)] == prompt).all())
    )
