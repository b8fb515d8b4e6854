"""One completion while it is being written: its sequence, its sampler, its text."""

from __future__ import annotations

from dataclasses import dataclass

from tangram.engine.sampling import SampleRow
from tangram.engine.scheduler import Sequence
from tangram.engine.text import TextStream
from tangram.types import Event, FinishReason, Request, TokenLogprob, Usage


@dataclass(frozen=True)
class News:
    """A token that was taken and that its client has not heard of; `reason` if it ended the completion."""

    completion: Completion
    token: TokenLogprob
    reason: FinishReason | None
    usage: Usage


@dataclass(eq=False)
class Completion:
    """Number `index` of the `n` completions of `request`."""

    request: Request
    index: int
    sequence: Sequence
    sampler: SampleRow
    text: TextStream
    max_tokens: int
    end_token_ids: frozenset[int]
    ended: bool = False

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.sequence.known - self.sequence.prompt_tokens

    def take(self, token: TokenLogprob) -> FinishReason | None:
        """Enter a sampled token; the reason if the completion ends here, whatever its text is."""
        self.sequence.append(token.token_id)
        self.sampler.append(token.token_id)
        if token.token_id in self.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.completion_tokens >= self.max_tokens else None

    def read(self, token: TokenLogprob, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """The text that a token which was taken makes certain, and the reason to end if there is one now."""
        if reason is FinishReason.STOP:
            return self.text.finish(), reason
        delta, stopped = self.text.push(token.token_id)
        if stopped:
            return delta, FinishReason.STOP
        return (delta if reason is None else delta + self.text.finish()), reason

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
