"""Takes off the marks around the text of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tangram.serve.formats.arguments import mark_overlap
from tangram.serve.formats.calls import Call
from tangram.serve.formats.thoughts import Part, PartConverter, Reader


class WrappedReader(PartConverter):
    """What a reader that `new_reader` makes finds, without the `marks` around its text.

    Only the first mark at the beginning makes text wrapped. Then the last mark ends it where a call
    or nothing follows; elsewhere it is text. Spaces inside the marks belong to them.
    """

    def __init__(self, marks: tuple[str, str], new_reader: Callable[[], Reader]) -> None:
        super().__init__(new_reader())
        self._begin, self._end = marks
        self._held, self._gap = "", True
        self._wrapped: bool | None = None  # None while that is not known

    def finish(self) -> Iterator[Part]:
        """What was held back, once the completion has ended."""
        yield from super().finish()
        yield from self._release()

    def _convert(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, str):
                if text := self._take(part):
                    yield text
            else:
                if isinstance(part, Call):
                    yield from self._release()
                yield part

    def _take(self, text: str) -> str:
        """What is certain of the text that was held, and `text`."""
        self._held += text
        if self._wrapped is None:
            start = self._held.lstrip()
            if self._begin.startswith(start) and start != self._begin:
                return ""
            self._wrapped = start.startswith(self._begin)
            self._held = start[len(self._begin) :] if self._wrapped else self._held
        if self._wrapped and self._gap:
            self._held = self._held.lstrip()
            self._gap = not self._held
        certain = self._held[: len(self._held) - self._measure_undecided()]
        self._held = self._held[len(certain) :]
        return certain

    def _measure_undecided(self) -> int:
        """How many last characters may belong to the last mark, spaces among them."""
        if not self._wrapped:
            return 0
        words = self._held.rstrip()
        before = words.removesuffix(self._end)
        if before == words:
            before = self._held[: len(self._held) - mark_overlap(self._held, self._end)]
        return len(self._held) - len(before.rstrip())

    def _release(self) -> Iterator[str]:
        """What is text of that which was held, as the text ends here."""
        held, self._held = self._held, ""
        rest = held.rstrip().removesuffix(self._end).rstrip() if self._wrapped else held
        if rest:
            yield rest
