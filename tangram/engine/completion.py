"""One completion in progress (its sequence and sampler), and all completions by request."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch

from tangram.cache.retention import Retention
from tangram.cache.step import Row, Step
from tangram.engine.sampling.sampler import SampleRow
from tangram.engine.schedule.token_sequence import TokenSequence, sequence_of
from tangram.engine.text.answer_text import TextStream, end_tokens
from tangram.engine.text.codec import TextCodec
from tangram.engine.text.thought_budget import ThoughtBudget
from tangram.types import (
    ChosenToken,
    Event,
    FinishReason,
    Matcher,
    PromptLogprobs,
    Request,
    SamplingParams,
    SamplingValues,
    Usage,
)

_log = logging.getLogger("tangram")


@dataclass(eq=False)
class Completion:
    """Number `index` of the `n` completions of `request`.

    `begin` makes its sampler, and what looks for its stop strings if there are any, when the first
    token is sampled; a waiting completion holds neither. `error` says why nothing more can be
    written, and the field of the request that caused it, if one did. `scores` are those of its
    prompt, as far as they are known and asked for.
    """

    request: Request
    index: int
    sequence: TokenSequence
    end_token_ids: frozenset[int]
    begin: Callable[[], tuple[SampleRow, TextStream | None]]
    ended: bool = False
    error: tuple[str, str | None] | None = None
    scores: list[PromptLogprobs] = field(default_factory=list)

    @cached_property
    def sampler(self) -> SampleRow:
        """How its tokens are chosen. If it cannot be made, `error` is set.

        The first token is then invalid.
        """
        return self._begun[0]

    @cached_property
    def _begun(self) -> tuple[SampleRow, TextStream | None]:
        try:
            return self.begin()
        except Exception:
            request_id = self.request.request_id
            _log.exception(
                "request %s could not begin", request_id, extra={"request_id": request_id}
            )
            self.error = (
                "the engine could not begin to answer this request: the log has the reason",
                None,
            )
            greedy = SamplingParams(temperature=0.0)
            return SampleRow(greedy, prompt_token_ids=(), vocab_size=1, seed=0), None

    @property
    def constrained(self) -> bool:
        """Whether the next token depends on the value of the token before."""
        return self.sampler.matcher is not None

    def take(self, tokens: Sequence[ChosenToken]) -> FinishReason | None:
        """Add tokens of which only the last may end it, the expected one first.

        Returns why the completion has ended, as it does without tokens. None if it goes on, and
        after an `error`.
        """
        self.sequence.extend([token.token_id for token in tokens])
        return self._find_end(tokens[-1]) if tokens else FinishReason.LENGTH

    def divide(
        self, tokens: Sequence[ChosenToken | None]
    ) -> Sequence[Sequence[ChosenToken | None]]:
        """The next `tokens` in parts of which only the last token may end the completion.

        All are one part if it is certain that none does, or begins or ends a part of the answer.
        """
        if len(tokens) == 1 or self._goes_on(tokens):
            return [tokens]
        return [[token] for token in tokens]

    def _goes_on(self, tokens: Sequence[ChosenToken | None]) -> bool:
        sequence = self.sequence
        return (
            sequence.read_tokens > 0
            and sequence.prompt_tokens + sequence.read_tokens + len(tokens) <= sequence.limit
            and not self.request.sampling.stop
            and not self.constrained
            and all(
                token is not None
                and token.token_id not in self.end_token_ids
                and token.token_id not in self.request.marks.names
                for token in tokens
            )
        )

    def _find_end(self, token: ChosenToken) -> FinishReason | None:
        if (matcher := self.sampler.matcher) is not None:
            matcher.take(token.token_id)
            if matcher.error is not None:
                self.error = str(matcher.error), matcher.error.field
        if self.error is not None:
            return None
        if token.token_id in self.end_token_ids:
            return FinishReason.STOP
        if (stops := self._begun[1]) is not None:
            stops.push([token.token_id])
            if stops.stopped:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.sequence.complete else None

    def event(
        self,
        usage: Usage,
        tokens: Sequence[ChosenToken],
        reason: FinishReason | None,
        error: str | None = None,
        error_field: str | None = None,
    ) -> Event:
        """An event for the client."""
        asked = self.request.sampling.logprobs is not None
        is_first = usage.completion_tokens == len(tokens)
        return Event(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=tuple([token.token_id for token in tokens]),
            logprobs=tuple([token.logprob for token in tokens if token.logprob]) if asked else (),
            usage=usage,
            finish_reason=reason,
            error=error,
            error_field=error_field,
            admitted_s=self.sequence.admitted_s,
            lost=self.sequence.lost if is_first else None,
            prompt_logprobs=tuple(self.scores) if is_first else (),
        )


@dataclass(frozen=True, eq=False)
class Flight:
    """A launched step, and the `completions` that get tokens of it, in the order of its rows.

    `read` gives the tokens of each, None for one with unsound logits: it waits for the device, if
    they are not known yet. So does `read_scores` for those of which the step has `scored` a part of
    the prompt. The time of a step is its own if it is `awaited`: another step ran before it, or it
    is read at once.
    """

    step: Step
    completions: Sequence[Completion]
    awaited: bool
    read: Callable[[], Sequence[Sequence[ChosenToken | None]]]
    scored: Sequence[Completion] = ()
    read_scores: Callable[[], Sequence[PromptLogprobs | None]] = tuple

    @property
    def times_decoding(self) -> bool:
        """Whether its time is that of a step which does nothing but decode."""
        only_decodes = self.step.decode_rows == len(self.step.rows)
        return only_decodes and (self.awaited or self.step.drafts > 0)


def refuse(request: Request, index: int, error: str) -> Event:
    """The event that completion `index` of `request` could not be started."""
    usage = Usage(len(request.prompt_token_ids), 0, 0, 0, 0)
    return Event(request.request_id, index, (), (), usage, FinishReason.ABORT, error)


class Answers:
    """All completions in progress, by request. `seed` seeds the requests without a seed.

    `defaults` hold where a request states nothing.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        vocab_size: int,
        device: torch.device,
        seed: int,
        defaults: SamplingValues,
    ) -> None:
        self._codec, self._vocab_size, self._device = codec, vocab_size, device
        self._defaults = defaults
        self._seeds = random.Random(seed)
        self._arrivals = 0
        self._by_request: dict[str, list[Completion]] = {}
        self._by_sequence: dict[TokenSequence, Completion] = {}
        self._siblings: dict[str, list[Completion]] = {}
        self._held_back = 0

    def __bool__(self) -> bool:
        return bool(self._by_request)

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended, each once."""
        return list(self._by_request)

    def begin(self, request: Request, retention: Retention, max_tokens: int) -> Completion:
        """The first completion of a new request; `siblings` has the others.

        If this fails, nothing is added.
        """
        sampling, request_id = request.sampling, request.request_id
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        ends = end_tokens(self._codec, sampling)
        prompt = np.asarray(request.prompt_token_ids, np.int64)
        limit = len(prompt) + max_tokens - 1
        asks = sampling.prompt_logprobs is not None
        # A mask would have to follow the drafts.
        free = request.grammar is None and sampling.thinking_token_budget is None
        speculative = free and request.speculative is not False
        first, *others = [
            Completion(
                request,
                index,
                sequence_of(
                    *(request_id, self._arrivals + index, retention, request.cache_salt),
                    *(prompt, limit),
                    speculative=speculative,
                    sample_index=index,
                    client=request.client,
                    scored=1 if asks and index == 0 else None,
                ),
                ends,
                partial(self._begin, request, index, seed, ends),
            )
            for index in range(sampling.n)
        ]
        for completion in (first, *others):
            self._by_sequence[completion.sequence] = completion
        self._arrivals += sampling.n
        self._by_request[request_id] = [first, *others]
        self._siblings[request_id] = others
        self._held_back += len(others)
        return first

    @property
    def held_back(self) -> int:
        """How many completions wait until the first of their request has computed the prompt."""
        return self._held_back

    def siblings(self, request_id: str) -> list[Completion]:
        """The other completions of a request, at the first call only."""
        others = self._siblings.pop(request_id, [])
        self._held_back -= len(others)
        return others

    def of(self, rows: Iterable[Row], running: Sequence[TokenSequence]) -> list[Completion]:
        """The completions of `rows`, which are among those of the `running` sequences."""
        by_slot = {
            cache.slot: self._by_sequence[sequence]
            for sequence in running
            if (cache := sequence.cache) is not None
        }
        return [by_slot[row.slot] for row in rows]

    def remove(self, completion: Completion) -> None:
        """Forget a completion that has ended."""
        request_id = completion.request.request_id
        left = self._by_request[request_id]
        left.remove(completion)
        if not left:
            del self._by_request[request_id]
        del self._by_sequence[completion.sequence]

    def of_request(self, request_id: str) -> list[Completion]:
        """The completions of one request, those that still wait for the first too."""
        return list(self._by_request.get(request_id, ()))

    def _begin(
        self, request: Request, index: int, seed: int, ends: frozenset[int]
    ) -> tuple[SampleRow, TextStream | None]:
        prompt, sampling = request.prompt_token_ids, request.sampling
        sampler = SampleRow(
            sampling,
            prompt_token_ids=prompt,
            vocab_size=self._vocab_size,
            seed=seed,
            sample_index=index,
            device=self._device,
            matcher=self._begin_matcher(request),
            end_token_ids=ends,
            defaults=self._defaults,
        )
        if not sampling.stop:
            return sampler, None
        return sampler, TextStream(
            self._codec,
            stop=sampling.stop,
            prompt_token_ids=prompt,
            marks=request.marks,
            skip_special=sampling.skip_special_tokens,
        )

    def _begin_matcher(self, request: Request) -> Matcher | None:
        """What says which tokens an answer to `request` may have; None for any."""
        inner = None if request.grammar is None else request.grammar.begin()
        most, form = request.sampling.thinking_token_budget, request.marks.thinking
        if most is None or form is None or form.channels:
            return inner
        prompt = request.prompt_token_ids
        return ThoughtBudget(self._codec, form, prompt, most, self._vocab_size, inner)
