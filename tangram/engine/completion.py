"""One completion while it is being written: its sequence, its sampler, its text; and all of them by request."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tangram.engine.sampling import SampleRow
from tangram.engine.sequence import Sequence, sequence_of
from tangram.engine.text import TextCodec, TextStream
from tangram.types import Event, FinishReason, Request, Step, TokenLogprob, Usage


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
            admitted_s=self.sequence.admitted_s,
        )


class Answers:
    """All completions that are being written, by request. `seed` seeds the requests that bring no seed."""

    def __init__(self, codec: TextCodec, *, vocab_size: int, device: torch.device, seed: int) -> None:
        self._codec, self._vocab_size, self._device = codec, vocab_size, device
        self._seeds = random.Random(seed)
        self._arrivals = 0
        self._all: dict[tuple[str, int], Completion] = {}
        self._siblings: dict[str, list[Completion]] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended, each once."""
        return list(dict.fromkeys(request_id for request_id, _ in self._all))

    def begin(self, request: Request, layout: int, max_tokens: int) -> Completion:
        """The first completion of a new request; `siblings` has the others."""
        own_seed = request.sampling.seed
        seed = self._seeds.getrandbits(63) if own_seed is None else own_seed
        first, *others = [
            self._completion(request, index, layout, max_tokens, seed) for index in range(request.sampling.n)
        ]
        self._siblings[request.request_id] = others
        return first

    def siblings(self, request_id: str) -> list[Completion] | None:
        """The other completions of a request, to those who ask first; they wait for the first to compute the prompt."""
        return self._siblings.pop(request_id, None)

    def of(self, step: Step) -> list[Completion]:
        """The completions that get a token from `step`, in the order of its rows."""
        by_slot = {
            completion.sequence.cache.slot: completion for completion in self._all.values()
            if completion.sequence.cache is not None
        }  # fmt: skip
        return [by_slot[row.slot] for row in step.rows if row.sample]

    def remove(self, completion: Completion) -> None:
        """Forget a completion that has ended."""
        del self._all[completion.request.request_id, completion.index]

    def of_request(self, request_id: str) -> list[Completion]:
        """The completions of one request, those that still wait for the first too."""
        return [completion for key, completion in self._all.items() if key[0] == request_id]

    def _completion(self, request: Request, index: int, layout: int, max_tokens: int, seed: int) -> Completion:
        prompt, sampling = request.prompt_token_ids, request.sampling
        self._arrivals += 1
        sequence = sequence_of(
            request.request_id, self._arrivals, layout, request.cache_salt, prompt, len(prompt) + max_tokens - 1
        )
        sampler = SampleRow(
            sampling, prompt_token_ids=prompt, vocab_size=self._vocab_size, seed=seed, sample_index=index,
            device=self._device,
        )  # fmt: skip
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._codec.eos_token_ids)
        text = TextStream(self._codec, stop=sampling.stop, prompt_token_ids=prompt)
        completion = Completion(request, index, sequence, sampler, text, ends)
        self._all[request.request_id, index] = completion
        return completion
