"""One completion while it is being written: its sequence, its sampler, its text."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.engine.sampling import SampleRow
from tangram.engine.sequence import Sequence
from tangram.engine.text import TextStream
from tangram.types import Event, FinishReason, Request, TokenLogprob, Usage


@dataclass(eq=False)
class Completion:
    """Number `index` of the `n` completions of `request`."""

    request: Request
    index: int
    sequence: Sequence
    sampler: SampleRow
    text: TextStream
    end_token_ids: frozenset[int]
    ended: bool = False

    def take(self, token: TokenLogprob) -> tuple[str, FinishReason | None]:
        """Enter the token that was expected: the text that is certain now, and the reason to end if there is one."""
        self.sequence.settle(token.token_id)
        if token.token_id in self.end_token_ids:
            return self.text.finish(), FinishReason.STOP
        delta, stopped = self.text.push(token.token_id)
        if stopped:
            return delta, FinishReason.STOP
        if self.sequence.complete:
            return delta + self.text.finish(), FinishReason.LENGTH
        return delta, None

    def event(
        self, usage: Usage, token: TokenLogprob | None, text: str, reason: FinishReason | None, error: str | None = None
    ) -> Event:
        """The news for the client."""
        wants_logprobs = self.request.sampling.logprobs is not None
        return Event(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=() if token is None else (token.token_id,),
            text=text,
            logprobs=(token,) if token is not None and wants_logprobs else (),
            usage=usage,
            finish_reason=reason,
            error=error,
        )
