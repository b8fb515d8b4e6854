"""The memory that ragged pages free, by heads per page and grouping (Tangram, ragged paging).

A group is as deep as its deepest head, so its shallower heads waste the rest. Groups are of heads
with similar budgets across the model or within each layer, of adjacent heads of a layer, or of all
heads of a layer (monolithic). Pages have 16 tokens, chunks the profile's size. Budgets are those
before ρ is enforced: each head has its own, rounded up to pages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kernels.budgets import SHIPPED, load
from bench.kernels.family import RESULTS
from tangram.compress.groups import cluster, group_budgets
from tangram.compress.profile import Profile
from tangram.types import Float64
from tangram_lab.environment import environment

HEADS_PER_PAGE = (1, 2, 4, 8)
GROUPINGS = ("across layers", "within layer", "adjacent", "monolithic")


def scale_budgets(mean: Float64, retention: float) -> Float64:
    """Budgets in the proportions of `mean`, at most 1 each, that keep `retention` of
    the entries.
    """
    low, high = 0.0, 1.0 / max(float(mean[mean > 0].min()), 1e-6)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(1.0, mean * middle).mean() < retention else (low, middle)
        )
    return np.asarray(np.minimum(1.0, mean * high), np.float64)


def count_reclaimed(
    budgets: Float64, grouping: str, heads_per_page: int, chunk_tokens: int, page_tokens: int
) -> float:
    """The share of an uncompressed chunk's entries without a page; at most 1 - mean budget."""
    layers = range(len(budgets))
    per_page = budgets.shape[1] if grouping == "monolithic" else heads_per_page
    across = "model" if grouping == "across layers" else "layer"
    sorts = grouping in ("across layers", "within layer")  # heads of equal budgets stay neighbours
    sorted_by = budgets if sorts else np.ones_like(budgets)
    groups = cluster(sorted_by, layers, per_page, across)  # type: ignore[arg-type]
    depth = (
        np.ceil(group_budgets(budgets, layers, groups) * chunk_tokens / page_tokens) * page_tokens
    )
    return 1.0 - float(depth.sum()) * per_page / (budgets.size * chunk_tokens)


def rows_of(name: str, profile: Profile, retention: float) -> list[dict[str, Any]]:
    """One row per grouping."""
    budgets = scale_budgets(np.asarray(profile.mean, np.float64), retention)
    return [
        {
            "profile": name,
            "grouping": grouping,
            "reclaimed": {
                str(heads): count_reclaimed(
                    budgets, grouping, heads, profile.chunk_tokens, profile.page_tokens
                )
                for heads in HEADS_PER_PAGE
            },
        }
        for grouping in GROUPINGS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write bench/results/kernels_fragmentation.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--retention", type=float, default=0.3)
    parser.add_argument("--profiles", nargs="+", default=list(SHIPPED))
    parser.add_argument("--budgets", type=Path, default=None, help="published budgets (.npz)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    found = {
        name: load(name, options.budgets, page_tokens=None, heads_per_page=None)
        for name in options.profiles
    }
    rows = [
        row for name, profile in found.items() for row in rows_of(name, profile, options.retention)
    ]
    table = Table(
        title=f"reclaimed of an uncompressed cache at ρ {options.retention:g} (most: "
        f"{1 - options.retention:g})"
    )
    for column in ("profile", "grouping", *(f"Hp {heads}" for heads in HEADS_PER_PAGE)):
        table.add_column(column, justify="left" if column in ("profile", "grouping") else "right")
    for row in rows:
        table.add_row(
            row["profile"],
            row["grouping"],
            *(f"{value:.2f}" for value in row["reclaimed"].values()),
        )
    Console(width=150).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m bench.kernels.fragmentation --retention {options.retention:g}"
    content = {
        "command": command,
        "environment": environment(),
        "retention": options.retention,
        "rows": rows,
    }
    (options.out / "kernels_fragmentation.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
