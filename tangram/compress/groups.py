"""Which heads share pages, and how many pages each group keeps of a sealed chunk.

Tangram, ragged paging. Two pure steps on the host, both done once when a profile is made:

1. `cluster` sorts heads by budget and cuts the order into runs of `Hp` (budget-aware clustering). A
   group is as deep as its deepest member, so neighbours in the order waste least.
2. `allot_pages` gives whole pages to groups so that a sealed chunk occupies at most ρ of the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from tangram.errors import ConfigError
from tangram.types import Float64

Head = tuple[int, int]  # (layer, KV head)
Grouping = Literal["model", "layer"]

# A head that never won an entry still gets pages once the others are full.
_SMALLEST_BUDGET = 1e-12


def cluster(
    budgets: npt.ArrayLike, layers: Sequence[int], heads_per_page: int, across: Grouping
) -> list[tuple[Head, ...]]:
    """Cut the heads into groups of `Hp` with similar budgets; the last group of a run may be short.

        Args:
            budgets: float [L, H], the fraction of its entries each head should keep.
            layers: the model's own index of each of the L rows.
            heads_per_page: Hp.
            across: "model" lets a group mix layers, "layer" does not.

    Returns (layer, head) pairs by group. Every head occurs exactly once, and a run begins with its
    deepest group. Heads of equal budgets keep their order. Raises `ConfigError` if a shape or an
    option is out of range.
    """
    table = _check_budgets(budgets, len(layers))
    if heads_per_page < 1:
        raise ConfigError(f"heads_per_page is {heads_per_page}, it must be at least 1")
    if across not in ("model", "layer"):
        raise ConfigError(f"grouping is {across!r}, it must be 'model' or 'layer'")
    heads = [[(layer, head) for head in range(table.shape[1])] for layer in layers]
    if across == "model":
        heads, table = [[head for layer in heads for head in layer]], table.reshape(1, -1)
    groups: list[tuple[Head, ...]] = []
    for members, values in zip(heads, table, strict=True):
        order = np.argsort(-values, kind="stable")
        groups += _cut([members[index] for index in order], heads_per_page)
    return groups


def group_budgets(
    budgets: npt.ArrayLike, layers: Sequence[int], groups: Sequence[Sequence[Head]]
) -> Float64:
    """[groups] float64: the largest budget of each group's members.

    `budgets` is [L, H] as for `cluster`.
    """
    table = _check_budgets(budgets, len(layers))
    row = {layer: index for index, layer in enumerate(layers)}
    return np.array(
        [max(table[row[layer], head] for layer, head in group) for group in groups], np.float64
    )


def allot_pages(
    budgets: Sequence[float] | Float64,
    group_sizes: Sequence[int],
    *,
    chunk_tokens: int,
    page_tokens: int,
    heads_per_page: int,
    retention: float,
    min_pages: int,
) -> list[int]:
    """Pages that each group keeps of a sealed chunk; their footprint is at most ρ of the chunk.

    Every page costs `Hp · P` entries, a short group's empty columns included. A chunk has `heads ·
    C` entries, so ρ gives a fixed number of pages. Each group first gets `min_pages`. The rest go
    one at a time to the group with the smallest (n − ½) / budget for its n-th page (Sainte-Laguë),
    up to C / P. So counts follow budgets, and ties go to the earlier group. No page is left while a
    group could take another one, and a larger ρ never takes a page away.

    Example: ρ 0.5, C 64, P 16, Hp 1, budgets 0.9 and 0.3: 4 pages; (0.9: 3, 0.3: 1).

        Args:
            budgets: [groups], each group's largest member budget; only their ratios matter.
            group_sizes: [groups], heads in each group, 1..Hp.
            retention: ρ in (0, 1).
            min_pages: pages that the always-kept positions need.

    Raises `ConfigError` for an option out of range. If `min_pages` everywhere exceeds ρ, the error
    names the smallest possible ρ.
    """
    wanted = np.asarray(budgets, np.float64)
    chunk_pages = _check_shape(
        wanted, group_sizes, chunk_tokens, page_tokens, heads_per_page, min_pages
    )
    affordable = _affordable_pages(
        sum(group_sizes), chunk_tokens, page_tokens, heads_per_page, retention
    )
    spare = affordable - min_pages * wanted.size
    if spare < 0:
        entries = min_pages * wanted.size * heads_per_page * page_tokens
        smallest = entries / (sum(group_sizes) * chunk_tokens)
        raise ConfigError(
            f"kv_retention is {retention}, the smallest possible is "
            f"{math.ceil(smallest * 1e4) / 1e4}: each of {wanted.size} groups needs {min_pages} "
            f"page(s) of {heads_per_page} x {page_tokens} entries for the always-kept positions of "
            f"a {chunk_tokens}-token chunk; raise kv_retention or chunk_tokens, or lower "
            "page_tokens or heads_per_page"
            if smallest < 1
            else f"heads_per_page is {heads_per_page} and page_tokens {page_tokens}: {min_pages} "
            f"page(s) for each of {wanted.size} groups hold more entries than chunks of "
            f"{chunk_tokens} tokens have, so nothing could be dropped; raise chunk_tokens, or "
            "lower page_tokens or heads_per_page"
        )
    return _next_pages(wanted, min_pages, chunk_pages, spare)


def _next_pages(budgets: Float64, min_pages: int, chunk_pages: int, spare: int) -> list[int]:
    """Give `spare` pages by ascending (n − ½) / budget.

    Ties go to the larger budget, then to the earlier group.
    """
    numbers = np.arange(min_pages + 1, chunk_pages + 1)
    group = np.repeat(np.arange(budgets.size), numbers.size)
    number = np.tile(numbers, budgets.size)
    turn = (number - 0.5) / np.maximum(budgets, _SMALLEST_BUDGET)[group]
    winners = group[np.lexsort((number, group, -budgets[group], turn))[:spare]]
    return [int(pages) for pages in min_pages + np.bincount(winners, minlength=budgets.size)]


def compute_realised_retention(
    sealed_pages: Sequence[int],
    heads: int,
    *,
    chunk_tokens: int,
    page_tokens: int,
    heads_per_page: int,
) -> float:
    """The share of a chunk's `heads · C` entries that its sealed pages occupy.

    Empty columns are included.
    """
    return sum(sealed_pages) * heads_per_page * page_tokens / (heads * chunk_tokens)


def _affordable_pages(
    heads: int, chunk_tokens: int, page_tokens: int, heads_per_page: int, retention: float
) -> int:
    if not (math.isfinite(retention) and 0.0 < retention < 1.0):
        raise ConfigError(
            f"kv_retention is {retention}, a profile needs it in (0, 1): 1.0 keeps all and needs "
            "none"
        )
    # Exact, so that 0.3 of 10 pages is 3 despite binary rounding.
    return int(
        Fraction(str(float(retention))) * heads * chunk_tokens // (page_tokens * heads_per_page)
    )


def _cut(heads: Sequence[Head], size: int) -> list[tuple[Head, ...]]:
    return [tuple(heads[start : start + size]) for start in range(0, len(heads), size)]


def _check_budgets(budgets: npt.ArrayLike, layers: int) -> Float64:
    table = np.asarray(budgets, np.float64)
    if table.ndim != 2 or table.shape[0] != layers or table.size == 0:
        raise ConfigError(f"budgets has shape {table.shape}, it must be [{layers} layers, heads]")
    _check_values(table)
    return table


def _check_values(budgets: Float64) -> None:
    if not (np.isfinite(budgets).all() and (budgets >= 0).all()):
        raise ConfigError(
            "budgets holds a negative or non-finite value, each must be a fraction of a head's "
            "entries"
        )


def _check_shape(
    budgets: Float64,
    group_sizes: Sequence[int],
    chunk_tokens: int,
    page_tokens: int,
    heads_per_page: int,
    minimum: int,
) -> int:
    """Chunk pages C / P, or `ConfigError` naming what is out of range."""
    if page_tokens < 1 or chunk_tokens < 1 or chunk_tokens % page_tokens:
        raise ConfigError(
            f"chunk_tokens is {chunk_tokens}, it must be a multiple of page_tokens ({page_tokens})"
        )
    if budgets.size != len(group_sizes) or not len(group_sizes):
        raise ConfigError(
            f"there are {budgets.size} budgets for {len(group_sizes)} groups, give one for each"
        )
    _check_values(budgets)
    if any(not 1 <= size <= heads_per_page for size in group_sizes):
        raise ConfigError(f"every group must have 1 to {heads_per_page} heads (heads_per_page)")
    if not 1 <= minimum <= chunk_tokens // page_tokens:
        raise ConfigError(
            f"min_pages is {minimum}, it must lie in [1, {chunk_tokens // page_tokens}] (C / P)"
        )
    return chunk_tokens // page_tokens
