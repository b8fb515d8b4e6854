"""What fixed budgets cost: entries that dynamic selection would keep and a head's budget has no
room for.

Every figure is of samples that the budgets were not made of.
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
Rooms = tuple[Float64, float]  # [L, H] fractions of C, and the share of a chunk that these occupy


def overflow(wishes: Float64, room: Float64) -> tuple[float, float]:
    """How often a wish exceeds its room, and the share of all wished entries that finds none.

    `wishes` is [chunks, L, H] and `room` [L, H], fractions of C. Example: wishes 0.6 and 0.4 of a
    chunk, room 0.5 for each: one of two exceeds, and 0.1 of 1.0 is lost.
    """
    over = np.maximum(wishes - room, 0.0)
    return float((over > 0).mean()), float(over.sum() / wishes.sum())


def measure_held_out_overflow(
    evidence: Observations, alphas: Sequence[float] = ALPHAS
) -> dict[str, dict[str, float]]:
    """Overflow by kind of budget, over samples in turn, each against a profile of all the others.

    "uniform" gives every head the same, "alpha 0" … scale min(1, μ + α·σ) to ρ as profiles do,
    "own" is made of the sample itself (α 0), so that only its chunks differ. "fitted" shares out
    the same pages so that the other samples lose least. "unscaled" is the paper's budget, at its α,
    in whole pages, whatever that occupies (Tangram, offline profiling). Figures: `footprint`, the
    share of a chunk that is reserved; `exceeded` and `lost` as in `overflow`, means over samples;
    `lost_p5` and `lost_p95`, percentiles over samples. Raises `ConfigError` for fewer than two
    samples.
    """
    if len(evidence.wishes) < 2:
        raise ConfigError("samples is 1, overflow is measured on samples left out: take at least 2")
    flat = np.ones_like(evidence.fractions[0])
    even = _room(evidence.profile.with_statistics(flat, 0 * flat, alpha=0.0))
    everything = list(range(len(evidence.wishes)))
    left_out = [[other for other in everything if other != number] for number in everything]
    rooms = {"uniform": [even for _ in everything]}
    for alpha in alphas:
        rooms[f"alpha {alpha:g}"] = [
            _room(evidence.profile_of(others, alpha)) for others in left_out
        ]
    rooms["own"] = [_room(evidence.profile_of([number], 0.0)) for number in everything]
    rooms["fitted"] = [_fit(evidence, others) for others in left_out]
    rooms["unscaled"] = [
        _fill_unscaled(evidence.profile_of(others, PAPER_ALPHA)) for others in left_out
    ]
    return {name: _summary(evidence, found) for name, found in rooms.items()}


def transfer(evidence: Observations, alpha: float) -> dict[str, dict[str, float]]:
    """`lost` when one kind of text is served with a profile of another, at α: [made of][served],
    means over samples.

    A kind is served with a profile of its other samples, "all" is made of all samples but the one
    served, "all others" of the other kinds. Empty where there is one kind; a kind of one sample is
    not served with its own.
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
    """Of each sample served, what a profile of the members but itself has no room for."""
    chosen = {number: tuple(other for other in members if other != number) for number in served}
    rooms = {
        kept: reserved_fractions(evidence.profile_of(kept, alpha))
        for kept in set(chosen.values())
        if kept
    }
    return [
        overflow(evidence.wishes[number], rooms[kept])[1] for number, kept in chosen.items() if kept
    ]


def _room(profile: Profile) -> Rooms:
    return reserved_fractions(profile), profile.realised_retention


def _fit(evidence: Observations, numbers: Sequence[int]) -> Rooms:
    """Groups of like μ; pages one by one where they hold most, which is best because a group's next
    holds no more.
    """
    profile = evidence.profile_of(numbers, 0.0)
    wishes = np.concatenate([evidence.wishes[number] for number in numbers])
    page = profile.page_tokens / profile.chunk_tokens
    fewest = fewest_pages(profile.sink_tokens, profile.window_tokens, profile.page_tokens)
    numbered = range(fewest, profile.chunk_tokens // profile.page_tokens)
    # [pages, L, H], what each next page would hold of a head
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


def _fill_unscaled(profile: Profile) -> Rooms:
    """Every head as many pages as its group's largest min(1, μ + α·σ) fills."""
    budgets = group_budgets(profile.budgets, profile.layers, profile.groups)
    # Statistics have five digits, so what is left of a page beyond the sixth is rounding.
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


def _summary(evidence: Observations, rooms: Sequence[Rooms]) -> dict[str, float]:
    found = [
        overflow(wishes, room) for wishes, (room, _) in zip(evidence.wishes, rooms, strict=True)
    ]
    exceeded, lost = np.array(found).T
    low, high = np.percentile(lost, (5, 95))
    figures: dict[str, Any] = {
        "footprint": np.mean([footprint for _, footprint in rooms]),
        "exceeded": exceeded.mean(),
        "lost": lost.mean(),
        "lost_p5": low,
        "lost_p95": high,
    }
    return {name: round(float(value), 5) for name, value in figures.items()}
