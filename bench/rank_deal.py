"""What fits if one model lies on several devices, by how its KV heads are dealt to them.

python -m bench.rank_deal BUDGETS.npz [--retention 0.25] [--chunk-tokens 512]

Counts pages and computes nothing else. The budgets are those that Tangram's authors published
(`tangram/calibrate/published_budgets.py`). Compared are the model's own order of heads and that of
`tangram/compress/dealing.py`. `numbers` are the page numbers of a sealed chunk, which decide what
fits; `fullest` are the pages that the fullest rank fills of them, `even` would be the same on all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tangram.calibrate.published_budgets import SCORERS, import_published
from tangram.compress.dealing import consecutive_heads, deal_heads, heads_of_rank
from tangram.compress.profile import Profile, ScorerSpec
from tangram.types import Int64

RESULT = Path(__file__).parent / "results" / "rank_deal.json"
MODELS = ("llama-3.1-8b-instruct", "qwen3-4b-instruct-2507")
RANKS = (2, 4, 8)


def kept_pages(profile: Profile) -> Int64:
    """[L, H]: the pages that each head keeps of a sealed chunk."""
    row = {layer: number for number, layer in enumerate(profile.layers)}
    pages = np.zeros((len(profile.layers), profile.model.kv_heads), np.int64)
    for group, count in zip(profile.groups, profile.sealed_pages, strict=True):
        for layer, head in group:
            pages[row[layer], head] = count
    return pages


def count_numbers(pages: Int64, order: Int64, ranks: int) -> int:
    """The page numbers that a sealed chunk takes under `order` [L, H]; `pages` are [L, H]."""
    own = np.take_along_axis(pages, order, axis=1).reshape(len(pages), ranks, -1)
    lists = np.sort(own.transpose(1, 0, 2).reshape(ranks, -1), axis=1)
    return int(lists.max(axis=0).sum())


def measure(pages: Int64, order: Int64, ranks: int) -> dict[str, float]:
    """The counts of one deal."""
    filled = [
        int(np.take_along_axis(pages, heads_of_rank(order, rank, ranks), axis=1).sum())
        for rank in range(ranks)
    ]
    return {
        "numbers": count_numbers(pages, order, ranks),
        "fullest": max(filled),
        "even": int(pages.sum()) / ranks,
    }


def main() -> None:
    from tangram.compress.scorers import ScorerChoice  # these import torch
    from tangram_lab.environment import environment

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("budgets", type=Path)
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    choices = [ScorerChoice(scorer, scope) for scorer in SCORERS for scope in ("layer", "model")]
    for model in MODELS:
        for choice in choices:
            profile = import_published(
                options.budgets,
                model,
                ScorerSpec(choice.scorer, {}),
                choice.scope,
                options.retention,
                chunk_tokens=options.chunk_tokens,
            )
            pages = kept_pages(profile)
            deals = {
                str(ranks): {
                    "consecutive": measure(pages, consecutive_heads(*pages.shape), ranks),
                    "dealt": measure(pages, deal_heads(pages, ranks), ranks),
                }
                for ranks in RANKS
            }
            rows.append({"model": model, **choice._asdict(), "deals": deals})
            print(model, *choice, flush=True)
    content = {
        "command": "python -m bench.rank_deal BUDGETS.npz",
        "options": {"retention": options.retention, "chunk_tokens": options.chunk_tokens},
        "environment": environment(),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
