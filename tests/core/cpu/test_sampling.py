"""Sampling against Transformers' logits processors, against the chi-square test and against its own
laws.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tangram.engine.sampling.draw import exponentials, row_key
from tangram.engine.sampling.filters import find_threshold_by_halving, find_threshold_by_sorting
from tangram.engine.sampling.sampler import SampleRow, choose
from tangram.errors import RequestError
from tangram.types import OPENAI_SAMPLING, SamplingParams
from tests.core.cpu.token_choice import sample
from tests.mentions import mentioning
from tests.small_engines import probabilities

VOCAB = 1000

filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 20, 999, 5000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


def random_logits(
    seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row_of(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    seed: int = 0,
    sample_index: int = 0,
    vocab: int = VOCAB,
) -> SampleRow:
    row = SampleRow(
        params, prompt_token_ids=prompt, vocab_size=vocab, seed=seed, sample_index=sample_index
    )
    for token in output:
        row.append(torch.tensor([token]))
    return row


def transformers_probabilities(logits: torch.Tensor, stated: SamplingParams) -> torch.Tensor:
    params = OPENAI_SAMPLING.with_stated(stated)
    unused = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(unused, logits.clone())
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(unused, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(unused, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(unused, scores)
    return scores.double().softmax(dim=-1)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.3, 3.0, 10.0]), params=filters)
def test_the_filters_give_the_distribution_of_transformers(
    seed: int, spread: float, params: SamplingParams
) -> None:
    logits = random_logits(seed, spread=spread)
    ours = probabilities(logits, [row_of(params)])
    theirs = transformers_probabilities(logits, params)
    # A token on the very edge of the nucleus may fall on either side in float32: allow one, of that
    # tiny weight.
    differing = ((ours > 0) != (theirs > 0)) & (ours + theirs > 1e-9)
    assert differing.sum() <= 1
    torch.testing.assert_close(ours[~differing], theirs[~differing], rtol=2e-3, atol=1e-9)


def test_a_nucleus_wider_than_the_first_look_is_still_exact() -> None:
    logits = random_logits(5, rows=3, vocab=6000, spread=1.0)
    logits[1] *= 8  # one row with a narrow nucleus between two with wide ones
    params = SamplingParams(top_p=0.9)
    ours = probabilities(logits, [row_of(params, vocab=6000)] * 3)
    theirs = transformers_probabilities(logits, params)
    assert ((ours > 0).sum(dim=-1) - (theirs > 0).sum(dim=-1)).abs().max() <= 1
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output(
    penalty: float,
) -> None:
    logits = random_logits(1)
    prompt, output = [3, 3, 17, 900], [17, 40, 999]
    row = row_of(SamplingParams(repetition_penalty=penalty), prompt=prompt, output=output)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), logits.clone()
    )
    torch.testing.assert_close(
        probabilities(logits, [row]), expected.double().softmax(-1), rtol=1e-5, atol=1e-11
    )


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = random_logits(2)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4)
    row = row_of(params, prompt=[5, 6, 7], output=[7, 8, 8, 8])
    counts = np.bincount([7, 8, 8, 8], minlength=VOCAB)
    # OpenAI's published formula
    expected = logits[0].double().numpy() - -0.4 * counts - 0.7 * (counts > 0)
    torch.testing.assert_close(
        probabilities(logits, [row])[0],
        torch.from_numpy(expected).softmax(-1),
        rtol=1e-5,
        atol=1e-11,
    )


def test_no_repetition_penalty_makes_logits_infinite() -> None:
    with pytest.raises(RequestError, match=mentioning("repetition_penalty 0.009 [0.01, 10.0]")):
        SamplingParams(repetition_penalty=0.009)
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 7]] = torch.tensor([1e30, -1e30, 2e30])
    for seed in range(5):
        row = row_of(SamplingParams(repetition_penalty=0.01), prompt=[3, 4], seed=seed)
        assert sample(logits.clone(), [row])[0].token_id == 3


def test_the_bias_is_added_before_the_repetition_penalty() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    params = SamplingParams(logit_bias={0: 2.0, 2: 0.5}, repetition_penalty=2.0)
    row = row_of(params, prompt=[0], output=[2], vocab=3)
    expected = torch.tensor([[(1.0 + 2.0) / 2, 0.0, (-1.0 + 0.5) * 2]]).double().softmax(-1)
    torch.testing.assert_close(probabilities(logits, [row]), expected, rtol=1e-5, atol=1e-9)


def test_greedy_obeys_bias_and_penalties_and_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]])

    def greedy(**fields: object) -> int:
        row = row_of(SamplingParams(temperature=0.0, **fields), output=[1, 1], vocab=4)  # type: ignore[arg-type]
        return sample(logits, [row])[0].token_id

    assert greedy() == 1
    assert greedy(logit_bias={3: 5.0}) == 3
    assert greedy(presence_penalty=0.1) == 2
    assert greedy(frequency_penalty=0.1) == 2
    assert greedy(repetition_penalty=1.1) == 2


def test_a_token_is_drawn_as_often_as_its_probability_says() -> None:
    vocab, draws = 20, 20_000
    logits = random_logits(7, vocab=vocab, spread=1.5)
    params = SamplingParams(temperature=0.8, top_k=15, top_p=0.97)
    expected = transformers_probabilities(logits, params)[0].numpy()
    rows = [row_of(params, seed=seed, vocab=vocab) for seed in range(draws)]
    counts = np.bincount(
        [t.token_id for t in sample(logits.expand(draws, -1), rows)], minlength=vocab
    )
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], expected[kept] * draws).pvalue > 1e-3


@pytest.mark.parametrize("kept", [1, 3])
def test_the_outermost_draws_stay_within_the_filter(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest, largest = 2.0**-32, 32 * math.log(2)
    numbers = torch.full((1, 5), smallest)
    numbers[0, 4 - kept] = largest
    monkeypatch.setattr("tangram.engine.sampling.draw.exponentials", lambda *_: numbers)
    logits = torch.tensor([[0.0, 3.0, 0.0, 3.0, 0.0]])
    token = sample(logits, [row_of(SamplingParams(top_k=2), vocab=5)])[0].token_id
    assert token == kept


def test_the_draws_of_one_seed_are_independent_over_steps_and_samples() -> None:
    vocab, steps = 4, 4000
    logits = torch.zeros(2, vocab)
    rows = [
        row_of(SamplingParams(n=2), seed=11, sample_index=index, vocab=vocab) for index in range(2)
    ]
    drawn = np.empty((steps, 2), np.int64)
    for step in range(steps):
        drawn[step] = [token.token_id for token in sample(logits, rows)]
        for row, token in zip(rows, drawn[step], strict=True):
            row.append(torch.tensor([int(token)]))
    for one, other in ((drawn[:-1, 0], drawn[1:, 0]), (drawn[:, 0], drawn[:, 1])):
        table = np.histogram2d(one, other, bins=vocab)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3
        assert stats.chisquare(table.sum(axis=0)).pvalue > 1e-3


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_token_alone_and_in_any_batch(data: st.DataObject) -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, logprobs=2),
        SamplingParams(top_p=0.8, min_p=0.01),
        SamplingParams(top_k=7, logprobs=3),
        SamplingParams(top_k=300, top_p=0.7, repetition_penalty=1.2, logit_bias={3: -1.0}),
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=7))
    # bfloat16 makes many logits equal: the cut of a filter must not depend on how a sort breaks
    # ties.
    logits = random_logits(data.draw(st.integers(0, 10**6)), rows=len(chosen)).bfloat16()
    rows = [
        row_of(params, prompt=[1, 2], output=[3], seed=seed) for seed, params in enumerate(chosen)
    ]
    together = sample(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[order], [rows[i] for i in order])
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row])[0]
        assert alone == together[index] == shuffled[order.index(index)]


def test_a_seed_reproduces_a_completion_and_another_seed_changes_it() -> None:
    logits = random_logits(3, rows=30)

    def completion(seed: int, sample_index: int = 0) -> list[int]:
        row = row_of(SamplingParams(), seed=seed, sample_index=sample_index)
        tokens = []
        for step in range(30):
            tokens.append(sample(logits[step : step + 1], [row])[0].token_id)
            row.append(torch.tensor(tokens[-1:]))
        return tokens

    assert completion(42) == completion(42)
    assert completion(-(2**63)) == completion(-(2**63))
    assert (
        len({tuple(completion(seed, index)) for seed in (42, 43, 2**63 - 1) for index in (0, 1)})
        == 6
    )


def test_numbers_are_exponential_over_tokens_and_over_keys_and_each_argument_counts() -> None:
    keys = torch.tensor([row_key(seed, 0, step) for seed in range(50) for step in range(100)])
    over_tokens, over_keys = exponentials(keys[:1], 50_000)[0], exponentials(keys, 3)
    for numbers in (over_tokens, *over_keys.T):
        assert stats.kstest(numbers.numpy(), "expon").pvalue > 1e-4
    assert (
        stats.kstest((over_keys[:, 0] / over_keys.sum(dim=-1)).numpy(), stats.beta(1, 2).cdf).pvalue
        > 1e-4
    )
    assert len({row_key(1, 2, 3), row_key(2, 1, 3), row_key(1, 3, 2)}) == 3
    one, other = exponentials(keys[:2], 50_000)
    assert (
        abs(np.corrcoef(one, other)[0, 1]) < 0.03
        and abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
    )


def test_numbers_match_the_same_hash_in_plain_integers() -> None:
    key = row_key(7, 1, 5)
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    expected = []
    for token in range(1, 200):
        number = (token * 0x9E3779B9 + low) & 0xFFFFFFFF
        for added in (0, high):
            number = (number + added) & 0xFFFFFFFF
            number = ((number ^ (number >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
            number = ((number ^ (number >> 15)) * 0x846CA68B) & 0xFFFFFFFF
            number ^= number >> 16
        expected.append(-math.log1p(-((number >> 1) + 0.5) / 2**31))
    assert exponentials(torch.tensor([key]), 199)[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_last_bit_moves_a_token_only_between_two_that_are_near() -> None:
    """Inverting a cumulative sum over 49,152 tokens would move hundreds of these."""
    logits = random_logits(11, rows=256, vocab=49152)
    shaken = logits * (
        1 + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    )
    rows = [row_of(SamplingParams(temperature=2.0), vocab=49152, seed=seed) for seed in range(256)]
    pairs = zip(sample(logits, rows), sample(shaken, rows), strict=True)
    assert sum(one.token_id != other.token_id for one, other in pairs) <= 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4, rows=3).bfloat16()
    expected = logits.double().log_softmax(dim=-1)
    before = logits.clone()
    rows = [
        row_of(SamplingParams(temperature=0.0, logprobs=5, logit_bias={12: 100.0})),
        row_of(SamplingParams(temperature=0.3, top_k=3, logprobs=0)),
        row_of(SamplingParams(temperature=2.0, logprobs=2)),
    ]
    got = sample(logits, rows)
    unasked = sample(logits[:1], [row_of(SamplingParams(temperature=0.0))])[0]
    assert unasked.logprob is None
    assert torch.equal(logits, before)
    assert got[0].token_id == 12
    found = [token.logprob for token in got if token.logprob is not None]
    assert [len(token.top) for token in found] == [5, 0, 2]
    for index, token in enumerate(found):
        assert token.token_id == got[index].token_id
        assert token.logprob == pytest.approx(expected[index, token.token_id].item(), abs=1e-4)
        best = expected[index].sort(descending=True).values[: len(token.top)]
        assert [value for _, value in token.top] == pytest.approx(best.tolist(), abs=1e-4)
        assert all(
            value == pytest.approx(expected[index, i].item(), abs=1e-4) for i, value in token.top
        )


def test_the_coldest_and_the_hottest_temperatures_are_sound() -> None:
    logits = torch.tensor([[2.0, 3.0, -torch.inf]])
    cold = sample(logits, [row_of(SamplingParams(temperature=1e-30), vocab=3)])[0]
    almost_cold = probabilities(logits, [row_of(SamplingParams(temperature=2e-5), vocab=3)])
    hot = probabilities(logits, [row_of(SamplingParams(temperature=100.0), vocab=3)])
    assert cold.token_id == 1
    assert almost_cold[0].tolist() == [0.0, 1.0, 0.0]
    assert hot[0].tolist() == pytest.approx([0.4975, 0.5025, 0.0], abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_reported_with_their_row(temperature: float, bad: float) -> None:
    logits = random_logits(6, rows=3)
    logits[1, 4] = bad
    rows = [row_of(SamplingParams(temperature=temperature)) for _ in range(3)]
    tokens = choose(logits, rows).tokens_on_host()
    assert [token is None for token in tokens] == [False, True, False]


def test_a_nan_at_an_end_that_may_not_come_yet_is_reported() -> None:
    logits = random_logits(6, rows=1)
    logits[0, 4] = torch.nan
    params = SamplingParams(temperature=0.0, min_tokens=2)
    row = SampleRow(params, prompt_token_ids=(), vocab_size=VOCAB, seed=0, end_token_ids=(4,))
    assert choose(logits, [row]).tokens_on_host() == [None]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_or_an_end_that_is_no_token_of_the_model_is_refused(token: int) -> None:
    ends = SamplingParams(stop_token_ids=(3, token), min_tokens=1)
    for params, field in (
        (SamplingParams(logit_bias={token: 1.0}), "logit_bias"),
        (ends, "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match=mentioning(f"{field} {token} 999")) as caught:
            row_of(params)
        assert caught.value.field == field


@pytest.mark.serial
def test_greedy_costs_little_beyond_the_argmax() -> None:
    logits = random_logits(8, rows=8, vocab=49152)
    rows = [row_of(SamplingParams(temperature=0.0), vocab=49152) for _ in range(8)]

    def best_ms(action: object) -> float:
        durations = []
        for _ in range(20):
            start = time.perf_counter()
            action()  # type: ignore[operator]
            durations.append(time.perf_counter() - start)
        return min(durations) * 1e3

    assert best_ms(lambda: sample(logits, rows)) < best_ms(lambda: logits.argmax(dim=-1)) + 1.0


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3000),
    st.sampled_from([1e-9, 0.05, 0.5, 0.9, 1 - 1e-12]),
)
@settings(max_examples=60, deadline=None)
def test_a_nucleus_is_the_same_found_by_halving_and_by_sorting(
    seed: int, vocab: int, top_p: float
) -> None:
    """Ties, weights of nothing and one weight of everything included."""
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(0, rng.choice([0.0, 1.0, 30.0]), (4, vocab)).clip(-60, 0)) * 2**40
    weights[0], weights[1] = weights[0].max(), weights[1] // 2**38
    weights[2, rng.integers(vocab)] = 2**40
    weights = torch.from_numpy(weights).long()
    needed = (weights.sum(dim=-1).double() * top_p).ceil().long().clamp_(min=1)
    assert torch.equal(
        find_threshold_by_halving(weights, needed), find_threshold_by_sorting(weights, needed)
    )
