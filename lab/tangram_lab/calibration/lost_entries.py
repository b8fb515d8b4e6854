"""The cost of fixed budgets: entries that dynamic selection would keep beyond a head's budget.

A wish is the count that dynamic selection gives a head of a chunk. Every figure is measured on
samples that the budgets were not made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tangram.calibrate.observations import Observations, reserved_fractions, share_of_heads
from tangram.compress.groups import compute_realised_retention, group_budgets
from tangram.compress.profile import PAPER_ALPHA, Profile, fewest_pages
from tangram.errors import ConfigError
from tangram.types import Float64

ALPHAS = (0.0, 1.0, PAPER_ALPHA)
Budgets = tuple[Float64, float]  # [L, H] fractions of C, and their share of a chunk


def make_profile(
    evidence: Observations, numbers: Sequence[int], alpha: float | None = None
) -> Profile:
    """The profile that these samples alone would have made; a number may come more than once.

    `alpha` None is that of the profile.
    """
    chosen = evidence.fractions[list(numbers)]
    return evidence.profile.with_statistics(
        chosen.mean(axis=0),
        chosen.std(axis=0),
        alpha=evidence.profile.alpha if alpha is None else alpha,
    )


def overflow(wishes: Float64, budget: Float64) -> tuple[float, float]:
    """How often a wish exceeds its budget, and the share of all wished entries beyond it.

    `wishes` is [chunks, L, H] and `budget` [L, H], fractions of C. Example: wishes 0.6 and 0.4 of
    a chunk, budget 0.5 for each: one of two exceeds, and 0.1 of 1.0 is lost.
    """
    over = np.maximum(wishes - budget, 0.0)
    return float((over > 0).mean()), float(over.sum() / wishes.sum())


def measure_held_out_overflow(
    evidence: Observations, alphas: Sequence[float] = ALPHAS
) -> dict[str, dict[str, float]]:
    """Overflow by kind of budget: each sample in turn, against a profile of all the others.

    Kinds of budget:

    - "uniform" gives every head the same.
    - "alpha 0" … scale min(1, μ + α·σ) to ρ as profiles do.
    - "own" is made of the sample itself (α 0), so that only its chunks differ.
    - "fitted" distributes the same pages so that the other samples lose least.
    - "unscaled" is the paper's budget at its α, in whole pages, whatever that occupies (Tangram,
      offline profiling).

    Figures: `footprint` is the share of a chunk that is reserved. `exceeded` and `lost` are those
    of `overflow`, means over samples. `lost_p5` and `lost_p95` are percentiles over samples. Raises
    `ConfigError` for fewer than two samples.
    """
    if len(evidence.wishes) < 2:
        raise ConfigError("samples is 1, overflow is measured on samples left out: take at least 2")
    flat = np.ones_like(evidence.fractions[0])
    even = _budget(evidence.profile.with_statistics(flat, 0 * flat, alpha=0.0))
    everything = list(range(len(evidence.wishes)))
    left_out = [[other for other in everything if other != number] for number in everything]
    budgets = {"uniform": [even for _ in everything]}
    for alpha in alphas:
        budgets[f"alpha {alpha:g}"] = [
            _budget(make_profile(evidence, others, alpha)) for others in left_out
        ]
    budgets["own"] = [_budget(make_profile(evidence, [number], 0.0)) for number in everything]
    budgets["fitted"] = [_fit(evidence, others) for others in left_out]
    budgets["unscaled"] = [
        _fill_unscaled(make_profile(evidence, others, PAPER_ALPHA)) for others in left_out
    ]
    return {name: _summary(evidence, found) for name, found in budgets.items()}


def transfer(evidence: Observations, alpha: float) -> dict[str, dict[str, float]]:
    """`lost` when one kind of text is served with a profile of another, at α.

    Keys are [made of][served]; values are means over samples. A kind is served with a profile of
    its other samples. "all" is made of all samples but the one served, "all others" of the other
    kinds. Empty where there is one kind; a kind of one sample is not served with its own.
    """
    kinds = list(dict.fromkeys(evidence.kinds))
    if len(kinds) < 2:
        return {}
    members = {kind: evidence.of_kind(kind) for kind in kinds}
    everything = list(range(len(evidence.wishes)))
    table: dict[str, dict[str, float]] = {}
    for made_of in (*kinds, "all", "all others"):
        for served in kinds:
            others = [number for number in everything if number not in members[served]]
            sources = members | {"all": everything, "all others": others}
            losses = _count_lost(evidence, alpha, members[served], sources[made_of])
            if losses:
                table.setdefault(made_of, {})[served] = round(float(np.mean(losses)), 5)
    return table


def _count_lost(
    evidence: Observations, alpha: float, served: Sequence[int], members: Sequence[int]
) -> list[float]:
    """The overflow of each served sample with a profile of the members except itself."""
    chosen = {number: tuple(other for other in members if other != number) for number in served}
    budgets = {
        kept: reserved_fractions(make_profile(evidence, kept, alpha))
        for kept in set(chosen.values())
        if kept
    }
    return [
        overflow(evidence.wishes[number], budgets[kept])[1]
        for number, kept in chosen.items()
        if kept
    ]


def _budget(profile: Profile) -> Budgets:
    return reserved_fractions(profile), profile.realised_retention


def _fit(evidence: Observations, numbers: Sequence[int]) -> Budgets:
    """Groups of similar μ. Each page goes where it holds most.

    This is optimal, because a group's next page never holds more.
    """
    profile = make_profile(evidence, numbers, 0.0)
    wishes = np.concatenate([evidence.wishes[number] for number in numbers])
    page = profile.page_tokens / profile.chunk_tokens
    fewest = fewest_pages(profile.sink_tokens, profile.window_tokens, profile.page_tokens)
    numbered = range(fewest, profile.chunk_tokens // profile.page_tokens)
    # [pages, L, H], entries of a head that each next page would hold
    held = np.zeros((len(numbered), *wishes.shape[1:]))
    for place, number in enumerate(numbered):
        held[place] = np.clip(wishes - number * page, 0.0, page).mean(axis=0)
    row = {layer: index for index, layer in enumerate(profile.layers)}
    gains = np.stack(
        [sum(held[:, row[layer], head] for layer, head in group) for group in profile.groups]
    )
    spare = sum(profile.sealed_pages) - fewest * len(profile.groups)
    winners = np.argsort(-gains, axis=None, kind="stable")[:spare] // max(1, len(numbered))
    pages = fewest + np.bincount(winners, minlength=len(profile.groups))
    return share_of_heads(profile, pages.tolist()), profile.realised_retention


def _fill_unscaled(profile: Profile) -> Budgets:
    """Every head gets the pages of its group's largest min(1, μ + α·σ)."""
    budgets = group_budgets(profile.budgets, profile.layers, profile.groups)
    # Statistics have five digits, so a remainder of a page beyond the sixth is rounding.
    pages = [
        math.ceil(round(budget * profile.chunk_tokens / profile.page_tokens, 6))
        for budget in budgets
    ]
    footprint = compute_realised_retention(
        pages,
        profile.budgets.size,
        chunk_tokens=profile.chunk_tokens,
        page_tokens=profile.page_tokens,
        heads_per_page=profile.heads_per_page,
    )
    return share_of_heads(profile, pages), footprint


def _summary(evidence: Observations, budgets: Sequence[Budgets]) -> dict[str, float]:
    found = [
        overflow(wishes, budget)
        for wishes, (budget, _) in zip(evidence.wishes, budgets, strict=True)
    ]
    exceeded, lost = np.array(found).T
    low, high = np.percentile(lost, (5, 95))
    figures: dict[str, Any] = {
        "footprint": np.mean([footprint for _, footprint in budgets]),
        "exceeded": exceeded.mean(),
        "lost": lost.mean(),
        "lost_p5": low,
        "lost_p95": high,
    }
    return {name: round(float(value), 5) for name, value in figures.items()}
