"""What is drawn with drafts has the distribution of what is drawn without, whoever drafts.

The same test must catch verifiers that do not keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tangram.engine.drafts.speculation import accept, verifiers
from tangram.engine.sampling.sampler import SampleRow, choose_tokens
from tangram.types import ChosenToken, SamplingParams
from tests.small_engines import probabilities
from tests.speculation import few

VOCAB, FIRST, END = 6, 0, 5
ANSWER = 3  # tokens
SEQUENCES = 16_000  # their answers take more than 20,000 rounds
FEW = 2_000  # show a verifier that is far off
FALSE_ALARM = 1e-10  # of one test; twelve of them stay below 1e-9 with a margin
SETTINGS = {
    "warm": SamplingParams(temperature=1.0),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.9),
    "few": SamplingParams(temperature=1.3, top_k=4, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6
    ),
    "bias": SamplingParams(temperature=2.0, logit_bias={1: 1.0, 3: -2.0}),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=2),
}
Verifier = Callable[["Round"], list[int]]


def tables() -> tuple[Tensor, Tensor]:
    """Logits [V, V] behind each token, of the model and of a model that drafts."""
    generator = torch.Generator().manual_seed(5)
    model, other = torch.randn(2, VOCAB, VOCAB, generator=generator)
    return model, model + 0.7 * other


MODEL, DRAFTING = tables()


@dataclass
class Growing:
    """An answer in progress."""

    seed: int
    sampler: SampleRow
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """A draft, what its verifiers choose, and other draws from the same rows."""

    drafts: list[int]
    chosen: list[int]
    again: list[int]


def row_of(params: SamplingParams, seed: int, step: int = 0) -> SampleRow:
    row = SampleRow(
        params, prompt_token_ids=[FIRST], vocab_size=VOCAB, seed=seed, end_token_ids=[END]
    )
    row.step = step
    return row


# -- who drafts two tokens -------------------------------------------------------------------------


def certain(sequences: Sequence[Growing]) -> Tensor:
    """A lookup, which knows no probabilities: always the same tokens."""
    return torch.tensor([[3, 1]]).expand(len(sequences), 2)


def draw_drafts(sequences: Sequence[Growing]) -> Tensor:
    """A model that draws from its own distribution, with the numbers of the sequence."""
    drafts: list[Tensor] = []
    newest = torch.tensor([one.tokens[-1] if one.tokens else FIRST for one in sequences])
    for number in range(2):
        found = torch.stack(drafts, dim=1) if drafts else None
        rows = [
            one.sampler.ahead(number, None if found is None else found[at])
            for at, one in enumerate(sequences)
        ]
        newest = choose_tokens(DRAFTING[newest], rows)
        drafts.append(newest)
    return torch.stack(drafts, dim=1)


DRAFTERS = {"certain": certain, "drawn": draw_drafts}

# -- who verifies ----------------------------------------------------------------------------------


def serving(turn: Round) -> list[int]:
    """What the engine does."""
    taken = accept(turn.drafts, [ChosenToken(token) for token in turn.chosen])
    return [token.token_id for token in taken if token is not None]


def credulous(turn: Round) -> list[int]:
    """Whatever is drafted is accepted."""
    return [*turn.drafts, turn.chosen[-1]]


def drawing_again(turn: Round) -> list[int]:
    """In place of a refused draft another token is drawn from the model's distribution."""
    taken = serving(turn)
    accepted = len(taken) - 1
    return taken if accepted == len(turn.drafts) else [*taken[:-1], turn.again[accepted]]


# -- a test ----------------------------------------------------------------------------------------


def choose_for(sequences: Sequence[Growing], drafts: Tensor, shift: int) -> list[list[int]]:
    """The tokens [n, 3] that the model chooses at each place of `drafts` [n, 2]."""
    newest = torch.tensor([[one.tokens[-1] if one.tokens else FIRST] for one in sequences])
    rows = [
        row
        for one, own in zip(sequences, drafts, strict=True)
        for row in verifiers(one.sampler, own)
    ]
    for row in rows:
        row.seed += shift
    chosen = choose_tokens(MODEL[torch.cat([newest, drafts], dim=1).flatten()], rows)
    found: list[list[int]] = chosen.view(len(sequences), -1).tolist()
    return found


def play(
    params: SamplingParams, drafter: str, verify: Verifier, answers: int
) -> tuple[Tensor, int]:
    """Counts [V, V, V] of what answers begin with, and how many rounds they took."""
    sequences = [Growing(seed, row_of(params, seed)) for seed in range(answers)]
    rounds, unfinished = 0, sequences
    while unfinished:
        drafts = DRAFTERS[drafter](unfinished)
        chosen = choose_for(unfinished, drafts, 0)
        # Numbers that nothing else was drawn with.
        again = choose_for(unfinished, drafts, 10**9) if verify is drawing_again else chosen
        for one, *turn in zip(unfinished, drafts.tolist(), chosen, again, strict=True):
            taken = verify(Round(*turn))
            one.tokens += taken
            one.sampler.extend(taken)
        rounds += len(unfinished)
        unfinished = [one for one in unfinished if len(one.tokens) < ANSWER]
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    places = tuple(torch.tensor([one.tokens[:ANSWER] for one in sequences]).T)
    counts.index_put_(places, torch.ones(len(sequences)), accumulate=True)
    return counts, rounds


@cache
def expected_shares(name: str) -> Tensor:
    """[V, V, V] float64: the probability of each answer of three tokens."""
    params, shares = SETTINGS[name], torch.ones(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for length in range(ANSWER):
        for tokens in product(range(VOCAB), repeat=length):
            row = row_of(params, 0)
            if tokens:
                row.extend(tokens)
            logits = MODEL[tokens[-1] if tokens else FIRST][None]
            own = probabilities(logits, [row])[0]
            shares[tokens] *= own.view(-1, *[1] * (ANSWER - 1 - length))
    return shares


def false_alarm(counts: Tensor, shares: Tensor) -> float:
    """The probability that counts from `shares` lie as far off as `counts`; 0 if impossible."""
    found, wanted = counts.flatten().numpy(), shares.flatten().numpy() * float(counts.sum())
    if found[wanted == 0].any():
        return 0.0
    order = np.argsort(wanted)
    rare = np.cumsum(wanted[order]) <= 10  # these are one cell
    cells = [
        np.append(values[order][~rare], values[order][rare].sum()) for values in (found, wanted)
    ]
    keep = cells[1] > 0
    return float(stats.chisquare(cells[0][keep], cells[1][keep]).pvalue)


@pytest.mark.parametrize(("drafter", "name"), [("certain", "nucleus"), ("drawn", "penalties")])
def test_some_answers_have_the_distribution_of_the_model(drafter: str, name: str) -> None:
    counts, _ = play(SETTINGS[name], drafter, serving, FEW)
    assert false_alarm(counts, expected_shares(name)) > FALSE_ALARM


@pytest.mark.nightly
@pytest.mark.parametrize(("drafter", "name"), [*product(DRAFTERS, SETTINGS)])
def test_answers_have_the_distribution_of_the_model(drafter: str, name: str) -> None:
    counts, rounds = play(SETTINGS[name], drafter, serving, SEQUENCES)
    assert rounds >= 20_000
    assert false_alarm(counts, expected_shares(name)) > FALSE_ALARM


@pytest.mark.parametrize(
    ("drafter", "verify"),
    few(
        [*product(DRAFTERS, (credulous, drawing_again))],
        ("certain", credulous),
        ("certain", drawing_again),
    ),
)
def test_other_verifiers_are_caught(drafter: str, verify: Verifier) -> None:
    counts, _ = play(SETTINGS["warm"], drafter, verify, FEW)
    assert false_alarm(counts, expected_shares("warm")) < FALSE_ALARM


@pytest.mark.parametrize("name", few([*SETTINGS], "few"))
def test_a_draft_is_accepted_as_often_as_the_coupling_promises(name: str) -> None:
    """Between (1 - TV) / (1 + TV) and 1 - TV, the total variation of the two distributions.

    Rejection sampling accepts 1 - TV, the sum of min(p, q).
    """
    params, rounds = SETTINGS[name], 3_000
    sequences = [Growing(seed, row_of(params, seed)) for seed in range(rounds)]
    row = [row_of(params, 0)]
    own, drafted = (probabilities(table[FIRST][None], row)[0] for table in (MODEL, DRAFTING))
    overlap = float(torch.minimum(own, drafted).sum())
    drafts = draw_drafts(sequences)
    first = torch.tensor(choose_for(sequences, drafts, 0))[:, 0]
    accepted = float((drafts[:, 0] == first).double().mean())
    print(f"{name}: accepted {accepted:.3f}, sum of min(p, q) {overlap:.3f}")
    sigmas = 6 * 0.5 / rounds**0.5
    assert overlap / (2 - overlap) - sigmas < accepted < overlap + sigmas
