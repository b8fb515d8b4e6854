"""From logits to tokens: penalties, temperature, filters, one reproducible draw, log-probabilities.

Meaning and order are vLLM's (V1 sampler): logit bias → repetition, frequency and presence penalties → greedy choice, or
temperature → min-p → top-k → top-p → draw. Log-probabilities are those of the model's own logits, before all of that.

Random rows go through *integer weights*, `floor(exp((x - max) / temperature) · 2**40)`. Integer sums do not depend on
their order, so a row's token is the same alone or in any batch, and a filtered token (weight 0) can never be drawn.
The draw inverts the cumulative weights at one uniform number hashed from (seed, sample index, step).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tangram.errors import ModelError, RequestError
from tangram.kernels.transfer import Fetched, placed
from tangram.types import SamplingParams, TokenLogprob

BROKEN_LOGITS = "are NaN or infinite: try dtype bfloat16 or float32"
_ONE = 2**40  # the weight of the likeliest token: 2**22 of them still fit in an int64
_GREEDY_BELOW = 1e-5  # vLLM's limit: a lower temperature means greedy
_NUCLEUS_WIDTHS = (128, 2048)  # top-p looks at that many of the likeliest tokens before it sorts the vocabulary


class SampleRow:
    """What sampling knows of one completion; lives as long as the completion does. Call `append` with each token.

    `seed` is the request's own or, where it has none, one that the engine picked. `sample_index` counts the `n`
    completions of a request. `step` is the number of tokens generated so far. `device` is where the logits will be.
    Raises `RequestError` if `logit_bias` names a token outside the vocabulary.
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
    ) -> None:
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.step = 0
        self._bias = _bias(params, vocab_size, device)
        self._history = _History(prompt_token_ids, vocab_size, device) if _penalises(params) else None

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken and nothing is drawn."""
        return self.params.temperature < _GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """True when a bias or a penalty moves this row's logits."""
        return self._bias is not None or self._history is not None

    def append(self, token: Tensor) -> None:
        """Count a token, int64 [1] where the logits are, that becomes part of the completion."""
        self.step += 1
        if self._history is not None:
            self._history.output_counts.index_add_(0, token, self._history.one)

    def change_logits(self, logits: Tensor) -> None:
        """Add the bias and the penalties to `logits` [V] (float32), in place."""
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        if self._history is not None:
            self._history.penalise(logits, self.params)


class _History:
    """Which tokens a completion has seen: `prompt_seen` bool [V], `output_counts` float32 [V]."""

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int, device: torch.device | str) -> None:
        self.prompt_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt_seen[torch.tensor(list(prompt_token_ids), dtype=torch.int64, device=device)] = True
        self.output_counts = torch.zeros(vocab_size, device=device)
        self.one = torch.ones(1, device=device)

    def penalise(self, logits: Tensor, params: SamplingParams) -> None:
        """Repetition over prompt and output (CTRL, section 4.1); frequency and presence over the output (OpenAI)."""
        output_seen = self.output_counts > 0
        if params.repetition_penalty != 1.0:
            penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(self.prompt_seen | output_seen, penalised, logits))
        logits.sub_(self.output_counts, alpha=params.frequency_penalty)
        logits.sub_(output_seen.float(), alpha=params.presence_penalty)


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen: `tokens` int64 [R] on the device. The rest is on its way to the host.

    `figures` are the tokens, their log-probabilities and the logsumexp of their rows, `best` the most likely tokens and
    their log-probabilities, each [n, k], of the rows listed with them.
    """

    tokens: Tensor
    figures: Fetched
    best: Sequence[tuple[Sequence[int], Fetched]]

    def tokens_on_host(self) -> list[TokenLogprob | None]:
        """Waits for the device. None for a row that has no token: its logits hold NaN or +∞, or are all −∞."""
        token_ids, logprobs, sums = (part.tolist() for part in self.figures.get())
        top: dict[int, tuple[tuple[int, float], ...]] = {}
        for rows, found in self.best:
            pairs = zip(*(part.tolist() for part in found.get()), strict=True)
            top.update((row, tuple(zip(*pair, strict=True))) for row, pair in zip(rows, pairs, strict=True))
        chosen = zip(token_ids, logprobs, sums, strict=True)
        return [
            TokenLogprob(token_id, logprob, top.get(row, ())) if math.isfinite(normaliser) else None
            for row, (token_id, logprob, normaliser) in enumerate(chosen)
        ]


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[TokenLogprob]:
    """`choose`, and wait for it. Raises `ModelError` if a row's logits are NaN or infinite."""
    tokens = choose(logits, rows).tokens_on_host()
    found = [token for token in tokens if token is not None]
    if len(found) < len(tokens):
        broken = [row for row, token in enumerate(tokens) if token is None]
        raise ModelError(f"the logits of rows {broken} {BROKEN_LOGITS}")
    return found


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> Choice:
    """Choose one token per row. `logits` [R, V], any float dtype, left unchanged; `rows` are not advanced.

    Greedy rows take the first of equal maxima.
    """
    raw = logits.float()
    changed = _change(raw, rows)
    tokens = changed.argmax(dim=-1)
    random = [index for index, row in enumerate(rows) if not row.greedy]
    if random:
        drawn = _draw(_weights(_pick(changed, random), [rows[i] for i in random]), [rows[i] for i in random])
        tokens.index_copy_(0, _on(raw.device, random), drawn)
    normaliser = raw.logsumexp(dim=-1)
    logprobs = raw.gather(1, tokens[:, None])[:, 0] - normaliser
    return Choice(tokens, Fetched(tokens, logprobs, normaliser), _best(raw, normaliser, rows))


def probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[R, V] float64: the distribution that `sample` draws from (a single 1 in greedy rows), for rejection sampling."""
    changed = _change(logits.float(), rows)
    result = torch.zeros(changed.shape, dtype=torch.float64, device=changed.device)
    result.scatter_(1, changed.argmax(dim=-1, keepdim=True), 1.0)
    random = [index for index, row in enumerate(rows) if not row.greedy]
    if random:
        weights = _weights(_pick(changed, random), [rows[i] for i in random])
        result[random] = weights.double() / weights.sum(dim=-1, keepdim=True)
    return result


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` if `logit_bias` names a token outside the vocabulary."""
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias names token {token}, it must lie in [0, {vocab_size - 1}]", "logit_bias")


def uniform(seed: int, sample_index: int, step: int, draw: int = 0) -> float:
    """A number in [0, 1) that depends on the arguments alone; `draw` numbers the several that one step may need."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, sample_index, step, draw), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _bias(params: SamplingParams, vocab_size: int, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    """The bias as (token ids int64, values float32), None if there is none."""
    if not params.logit_bias:
        return None
    check_bias(params, vocab_size)
    token_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
    return token_ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)


def _change(raw: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """`raw` with biases and penalties: itself if no row has any, else a copy."""
    touched = [index for index, row in enumerate(rows) if row.changes_logits]
    if not touched:
        return raw
    changed = raw.clone()
    for index in touched:
        rows[index].change_logits(changed[index])
    return changed


def _weights(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[R, V] int64 weights after temperature, min-p, top-k and top-p; ties with the last token kept stay."""
    temperature = _on(logits.device, [row.params.temperature for row in rows]).float()[:, None]
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_().mul_(_ONE).long()
    vocab_size = weights.shape[1]
    _keep(weights, [math.ceil(row.params.min_p * _ONE) if row.params.min_p > 0 else None for row in rows], _min_p_floor)
    top_k = [row.params.top_k for row in rows]
    _keep(weights, [k if k is not None and k < vocab_size else None for k in top_k], _top_k_floor)
    _keep(weights, [row.params.top_p if row.params.top_p < 1.0 else None for row in rows], _top_p_floor)
    return weights


def _pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """The chosen rows, without a copy when all are chosen."""
    return values if len(rows) == len(values) else values.index_select(0, _on(values.device, rows))


def _on(device: torch.device, values: Sequence[float]) -> Tensor:
    """`values` as int64 or float64 [n] on `device`."""
    return placed(np.asarray(values), device)


def _keep(weights: Tensor, values: Sequence[float | None], floor: Callable[[Tensor, Sequence[float]], Tensor]) -> None:
    """Zero, in place, the weights below their row's floor; rows whose value is None are left alone."""
    rows = [index for index, value in enumerate(values) if value is not None]
    if not rows:
        return
    floors = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    own = floor(_pick(weights, rows), [value for value in values if value is not None])
    floors.index_copy_(0, _on(weights.device, rows), own)
    weights.masked_fill_(weights < floors[:, None], 0)


def _min_p_floor(weights: Tensor, min_weights: Sequence[float]) -> Tensor:
    return _on(weights.device, min_weights)


def _top_k_floor(weights: Tensor, top_k: Sequence[float]) -> Tensor:
    largest = weights.topk(int(max(top_k)), dim=-1).values
    return largest.gather(1, _on(weights.device, top_k)[:, None] - 1)[:, 0]


def _top_p_floor(weights: Tensor, top_p: Sequence[float]) -> Tensor:
    """[R]: the smallest weight in the nucleus, the fewest tokens that reach top-p (Holtzman et al. 2020, section 3)."""
    needed = (weights.sum(dim=-1) * _on(weights.device, top_p)).ceil().long().clamp_(min=1)
    return _halved(weights, needed) if weights.is_cuda else _sorted_through(weights, needed)


def _halved(weights: Tensor, needed: Tensor) -> Tensor:
    """[R]: the largest weight such that it and all larger ones reach `needed`, by halving: nothing waits for a GPU."""
    low, high = torch.zeros_like(needed), torch.full_like(needed, _ONE)
    for _ in range(_ONE.bit_length()):
        middle = (low + high + 1) // 2
        enough = weights.where(weights >= middle[:, None], 0).sum(dim=-1) >= needed
        low, high = low.where(~enough, middle), high.where(enough, middle - 1)
    return low


def _sorted_through(weights: Tensor, needed: Tensor) -> Tensor:
    """The same from the likeliest tokens on, which are few where a nucleus is small."""
    floors = torch.zeros_like(needed)
    open_rows = torch.arange(len(needed), device=weights.device)
    for width in [*(w for w in _NUCLEUS_WIDTHS if w < weights.shape[1]), weights.shape[1]]:
        largest = weights[open_rows].topk(width, dim=-1).values
        reached = largest.cumsum(dim=-1)
        last = torch.searchsorted(reached, needed[open_rows, None]).clamp_(max=width - 1)
        floors[open_rows] = largest.gather(1, last)[:, 0]
        open_rows = open_rows[reached[:, -1] < needed[open_rows]]
        if not len(open_rows):
            break
    return floors


def _draw(weights: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[R] int64: token i with probability weights[i] / sum."""
    numbers = [uniform(row.seed, row.sample_index, row.step) for row in rows]
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum((_on(weights.device, numbers)[:, None] * total).long(), total - 1)
    # The clamp matters for NaN logits only, whose token `tokens_on_host` leaves out.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _best(raw: Tensor, normaliser: Tensor, rows: Sequence[SampleRow]) -> list[tuple[Sequence[int], Fetched]]:
    """The best alternatives of the rows that ask for some, best first; see `Choice.best`."""
    wanted: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.params.logprobs:
            wanted.setdefault(min(row.params.logprobs, raw.shape[1]), []).append(index)
    found: list[tuple[Sequence[int], Fetched]] = []
    for count, indices in wanted.items():
        values, token_ids = _pick(raw, indices).topk(count, dim=-1)
        found.append((indices, Fetched(token_ids, values - _pick(normaliser, indices)[:, None])))
    return found
