"""From logits to tokens: penalties, temperature, filters, a reproducible draw, log-probabilities.

Meaning and order are vLLM's (V1 sampler):

1. grammar mask
2. logit bias
3. ends masked before `min_tokens`
4. repetition, frequency and presence penalties
5. greedy choice, or temperature → min-p → top-k → top-p (`filters.py`) → draw

Log-probabilities are those of the model's own logits over the tokens that the row's grammar allows,
before the other steps.

Random rows use integer weights, whose sums do not depend on their order. A filtered token (weight
0) can never be drawn. Each token draws with a number of its own, hashed from (seed, sample index,
step, token) (`draw.py`). So a row's token depends on its logits alone, and on their last bits only
where two tokens are that close.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened

import numpy as np
import torch
from torch import Tensor

from tangram.engine.sampling.draw import draw, row_key
from tangram.engine.sampling.filters import pick, weights_of
from tangram.errors import RequestError
from tangram.kernels.transfer import HostCopies, upload
from tangram.types import (
    OPENAI_SAMPLING,
    ChosenToken,
    Int64,
    Matcher,
    PromptLogprobs,
    SamplingParams,
    SamplingValues,
    TokenLogprob,
)

BROKEN_LOGITS = "are NaN or infinite: the weights are damaged, or too large for the model's dtype"
_GREEDY_BELOW = 1e-5  # vLLM's limit: a lower temperature means greedy
_SCORED_AT_ONCE = 32  # tokens: their logits are in memory as float32, several times


class SampleRow:
    """The sampling state of one completion. Call `append` with each token.

    `seed` is the request's own or, without one, chosen by the engine. `sample_index` counts the `n`
    completions of a request. `step` is the number of tokens generated so far. `device` is that of
    the logits. `matcher` says which tokens may come next; None allows any. `end_token_ids` end the
    completion, so none of them comes before `min_tokens`. `values` are what `params` state and, for
    the rest, `defaults`. `greedy` says whether the likeliest token is taken and nothing is drawn,
    `takes_largest` whether nothing else is asked of the logits, either. Raises `RequestError` if
    `params` name a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        seed: int,
        sample_index: int = 0,
        device: torch.device | str = "cpu",
        matcher: Matcher | None = None,
        end_token_ids: Collection[int] = (),
        defaults: SamplingValues = OPENAI_SAMPLING,
    ) -> None:
        check_tokens(params, vocab_size)
        self.params, self.values = params, defaults.with_stated(params)
        self.matcher = matcher
        self.seed = seed
        self.sample_index = sample_index
        self.step = 0
        self._bias = _bias(params, device)
        self._history = (
            _History(prompt_token_ids, vocab_size, device) if _penalises(self.values) else None
        )
        ends = (
            [token for token in sorted(end_token_ids) if token < vocab_size]
            if params.min_tokens
            else []
        )
        self._ends = upload(ends, torch.device(device)) if ends else None
        self.greedy = self.values.temperature < _GREEDY_BELOW
        asks_more = self._bias is not None or params.logprobs is not None
        self.takes_largest = self.stays and not asks_more

    @property
    def remembers(self) -> bool:
        """True when the tokens before matter, not only their number."""
        return self._history is not None

    @property
    def stays(self) -> bool:
        """True when every later token is chosen alike, by the logits alone."""
        return self.greedy and not self.remembers and self._ends is None and self.matcher is None

    @property
    def changes_logits(self) -> bool:
        """True when a bias or a penalty moves this row's logits, or the answer may not end yet."""
        return self._bias is not None or self._history is not None or self._must_go_on

    @property
    def _must_go_on(self) -> bool:
        return self._ends is not None and self.step < self.params.min_tokens

    def ahead(self, count: int, tokens: Tensor | None) -> SampleRow:
        """How a token is chosen behind the first `count` of `tokens` [n], if these come next.

        This row stays as it is.
        """
        if self.stays:
            return self
        later = copy.copy(self)
        later.step += count
        if self._history is not None and tokens is not None and count:
            later._history = self._history.ahead(tokens[:count])
        return later

    def append(self, token: Tensor | None) -> None:
        """Add a token, int64 [1] on the logits' device, to the completion.

        It may be None if the row does not remember tokens.
        """
        self.step += 1
        if self._history is not None and token is not None:
            self._history.add(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add `tokens` to the completion."""
        self.step += len(tokens)
        if self._history is not None:
            self._history.add(upload(tokens, self._history.output_counts.device))

    def change_logits(self, logits: Tensor) -> None:
        """Add the bias and the penalties to `logits` [V] (float32), in place; mask early ends."""
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        if self._ends is not None and self._must_go_on:
            logits.index_fill_(0, self._ends, -math.inf)
        if self._history is not None:
            self._history.penalise(logits, self.values)


class _History:
    """Which tokens a completion has seen: `prompt_seen` bool [V], `output_counts` float32 [V]."""

    def __init__(
        self, prompt_token_ids: Sequence[int], vocab_size: int, device: torch.device | str
    ) -> None:
        self.prompt_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt_seen.index_fill_(
            0, upload(np.asarray(prompt_token_ids, np.int64), torch.device(device)), True
        )
        self.output_counts = torch.zeros(vocab_size, device=device)
        self.one = torch.ones(1, device=device)

    def add(self, tokens: Tensor) -> None:
        """Count `tokens`, int64 [n], as part of the output."""
        self.output_counts.index_add_(0, tokens, self.one.expand(len(tokens)))

    def ahead(self, tokens: Tensor) -> _History:
        """The history with `tokens` [n] at its end."""
        later = copy.copy(self)
        later.output_counts = self.output_counts.clone()
        later.add(tokens)
        return later

    def penalise(self, logits: Tensor, values: SamplingValues) -> None:
        """Apply the penalties in place.

        Repetition over prompt and output (CTRL, section 4.1); frequency and presence over the
        output (OpenAI).
        """
        output_seen = self.output_counts > 0
        if values.repetition_penalty != 1.0:
            penalised = torch.where(
                logits > 0, logits / values.repetition_penalty, logits * values.repetition_penalty
            )
            logits.copy_(torch.where(self.prompt_seen | output_seen, penalised, logits))
        logits.sub_(self.output_counts, alpha=values.frequency_penalty)
        logits.sub_(output_seen.float(), alpha=values.presence_penalty)


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The chosen tokens: `tokens` int64 [R] on the device. The rest is being copied to the host.

    `figures` are the tokens and the largest logit of their rows. `logprobs` are, with the rows [n]
    that ask for as many, the log-probabilities [n] of the tokens, and the most likely tokens and
    their log-probabilities, each [n, k]. `prompts` are the figures of the prompts that are asked
    for.
    """

    tokens: Tensor
    figures: HostCopies
    logprobs: Sequence[tuple[Sequence[int], HostCopies]]
    prompts: PromptScores | None = None

    def tokens_on_host(self) -> list[ChosenToken | None]:
        """The tokens; waits for the device. None for a row without one.

        The logits of such a row hold NaN or +∞, or are all −∞.
        """
        token_ids, largest = (part.tolist() for part in self.figures.get())
        if not self.logprobs and all(map(math.isfinite, largest)):
            return list(map(ChosenToken, token_ids))
        logprobs: dict[int, TokenLogprob] = {}
        for rows, found in self.logprobs:
            parts = zip(*(part.tolist() for part in found.get()), strict=True)
            for row, (logprob, *best) in zip(rows, parts, strict=True):
                logprobs[row] = TokenLogprob(token_ids[row], logprob, _possible(*best))
        return [
            ChosenToken(token_id, logprobs.get(row)) if math.isfinite(logit) else None
            for row, (token_id, logit) in enumerate(zip(token_ids, largest, strict=True))
        ]

    def by_row(self) -> list[list[ChosenToken | None]]:
        """`tokens_on_host`, as the one token of each row."""
        return [[token] for token in self.tokens_on_host()]


class PromptScores:
    """The figures of tokens that are known, on their way to the host.

    `logits` [n, V] are of the tokens before, any float dtype. `targets` are the known tokens, n in
    all, and `counts` the alternatives that each part of them asks for.
    """

    def __init__(self, logits: Tensor, targets: Sequence[Int64], counts: Sequence[int]) -> None:
        self._sizes, self._counts = [len(part) for part in targets], counts
        most = min(max(counts), logits.shape[1])
        known = upload(np.concatenate(targets), logits.device)
        parts = (torch.split(whole, _SCORED_AT_ONCE) for whole in (logits, known))
        scored = [_score(part.float(), own, most) for part, own in zip(*parts, strict=True)]
        self._figures = HostCopies(*map(torch.cat, zip(*scored, strict=True)))

    def by_part(self) -> list[PromptLogprobs | None]:
        """Of each part; waits for the device. None for a part whose logits are unsound."""
        figures = (torch.split(figure, self._sizes) for figure in self._figures.get())
        found: list[PromptLogprobs | None] = []
        for (ids, logprobs, ranks), count in zip(
            zip(*figures, strict=True), self._counts, strict=True
        ):
            if logprobs[:, 0].isnan().any():
                found.append(None)
                continue
            arrays = ids[:, : 1 + count], logprobs[:, : 1 + count], ranks
            found.append(PromptLogprobs(*(array.numpy().tobytes() for array in arrays)))
        return found


def _score(raw: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first two and the third of the arrays of `PromptLogprobs`, as it describes them."""
    own = raw.gather(1, tokens[:, None])
    values, best = raw.topk(most, dim=-1)
    logprobs = torch.cat([own, values], dim=1) - raw.logsumexp(dim=-1, keepdim=True)
    ranks = (raw >= own).sum(dim=-1, dtype=torch.int32)  # of equal ones the last, as in vLLM
    return torch.cat([tokens[:, None], best], dim=1).int(), logprobs, ranks


def _possible(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The possible tokens, which may be fewer than requested."""
    return tuple(pair for pair in zip(token_ids, logprobs, strict=True) if pair[1] > -math.inf)


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> SampledTokens:
    """Choose one token per row. `logits` [R, V], any float dtype, left unchanged; `rows`, too.

    Greedy rows take the first of equal maxima.
    """
    raw = logits.float()
    if all(row.takes_largest for row in rows):
        largest, tokens = raw.max(dim=-1)
        return SampledTokens(tokens, HostCopies(tokens, largest), ())
    raw = _mask_forbidden(raw, rows)
    tokens, largest = _choose(raw, rows)
    return SampledTokens(tokens, HostCopies(tokens, largest), _logprobs(raw, tokens, rows))


def choose_tokens(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The tokens of `choose` alone: int64 [R] on the device."""
    return _choose(_mask_forbidden(logits.float(), rows), rows)[0]


def _choose(raw: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """The tokens [R] and the largest logit of each row [R], which is NaN if one is."""
    changed = _change(raw, rows)
    largest, tokens = changed.max(dim=-1)
    if changed is not raw:
        largest = raw.amax(dim=-1)  # a mask may hide a NaN
    random = [index for index, row in enumerate(rows) if not row.greedy]
    if random:
        weights = weights_of(pick(changed, random), [rows[i].values for i in random])
        keys = [row_key(rows[i].seed, rows[i].sample_index, rows[i].step) for i in random]
        tokens.index_copy_(0, upload(random, raw.device), draw(weights, keys))
    return tokens, largest


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` if a field of `params` names an unknown token."""
    for field, tokens in params.named_tokens:
        for token in tokens:
            if not 0 <= token < vocab_size:
                message = (
                    f"{field} names token {shortened(token)}, it must lie in [0, {vocab_size - 1}]"
                )
                raise RequestError(message, field)


def _penalises(values: SamplingValues) -> bool:
    return (
        values.repetition_penalty != 1.0
        or values.presence_penalty != 0.0
        or values.frequency_penalty != 0.0
    )


def _bias(params: SamplingParams, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    """The bias as (token ids int64, values float32), None if there is none."""
    if not params.logit_bias:
        return None
    tokens, values = (
        upload(list(part), torch.device(device))
        for part in (params.logit_bias, params.logit_bias.values())
    )
    return tokens, values.float()


def _mask_forbidden(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """`raw` with −∞ for the tokens that a row's grammar forbids; itself if no row has a grammar."""
    bound = [(index, row.matcher) for index, row in enumerate(rows) if row.matcher is not None]
    if not bound:
        return raw
    masks = np.stack([matcher.mask_tokens() for _, matcher in bound])
    bits = (
        upload(masks, raw.device)[:, :, None]
        >> torch.arange(8, dtype=torch.uint8, device=raw.device)
        & 1
    )
    indices = [index for index, _ in bound]
    chosen = pick(raw, indices).masked_fill(bits.flatten(1)[:, : raw.shape[1]] == 0, -math.inf)
    return raw.index_copy(0, upload(indices, raw.device), chosen)


def _change(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """`raw` with biases and penalties: itself if no row has any, otherwise a copy."""
    touched = [index for index, row in enumerate(rows) if row.changes_logits]
    if not touched:
        return raw
    changed = raw.clone()
    for index in touched:
        rows[index].change_logits(changed[index])
    return changed


def _logprobs(
    raw: Tensor, tokens: Tensor, rows: Sequence[SampleRow]
) -> list[tuple[Sequence[int], HostCopies]]:
    """The figures of the rows that ask for some, alternatives best first; see `SampledTokens`."""
    asked: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.params.logprobs is not None:
            asked.setdefault(min(row.params.logprobs, raw.shape[1]), []).append(index)
    found: list[tuple[Sequence[int], HostCopies]] = []
    for count, indices in asked.items():
        wanted, chosen = pick(raw, indices), pick(tokens, indices)[:, None]
        normaliser = wanted.logsumexp(dim=-1, keepdim=True)
        logprobs = (wanted.gather(1, chosen) - normaliser)[:, 0]
        values, token_ids = wanted.topk(count, dim=-1)
        found.append((indices, HostCopies(logprobs, token_ids, values - normaliser)))
    return found
