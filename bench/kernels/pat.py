"""Decode over shared prefixes: PAT's 20 trees × 4 head settings (arXiv 2511.22333, kernel
evaluation).

    python -m bench.kernels.pat [--configs TREE ...] [--heads 32/8,64/8] [--planners ...] \
        [--peers ...] [--quick]

A tree is written nodes-per-level `_` tokens-per-level, its leaves are the requests. D 128, fp16,
pages of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.kernels.family import Entry, execute, parser
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case, tree_case
from tangram_lab.kernel_benchmarks.tree import CONFIGS, HEADS, PAGE_TOKENS, QUICK_CONFIGS, Tree

PLANNERS = ("packing:thrifty", "packing:naive", "packing:paper", "packing:off")
PEERS = ("decode", "decode-static", "batch", "cascade", "fasttree", "fa3")


def make(tree: Tree, geometry: BatchGeometry, name: str, tiny: bool) -> Case:
    """The case of a tree; tiny: as many levels, at most 8 nodes and two pages each."""
    small = tree.shrink(leaves=8, tokens=2 * geometry.page_tokens) if tiny else tree
    return tree_case(small, geometry, seed=0, name=name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the family."""
    options_of = parser(__doc__, PLANNERS, PEERS, page_tokens=PAGE_TOKENS)
    options_of.add_argument("--configs", nargs="+", default=None, help="trees; default: all 20")
    options_of.add_argument(
        "--heads", default=None, help="query/KV heads, comma-separated; default: all 4"
    )
    options = options_of.parse_args(arguments)
    configs = options.configs or (QUICK_CONFIGS if options.quick else CONFIGS)
    heads = options.heads.split(",") if options.heads else (("32/8",) if options.quick else HEADS)
    entries = []
    for setting in heads:
        geometry = BatchGeometry.of_heads(setting, options.page_tokens, options.heads_per_page)
        for config in configs:
            tree, name = Tree.parse(config), f"{setting} {config}"
            labels = {"config": config, "heads": setting, "shared": tree.shared}
            group = f"{setting} {'shared' if tree.shared else 'not shared'}"
            entries.append(Entry(name, group, partial(make, tree, geometry, name), labels))
    execute("pat", options, entries)


if __name__ == "__main__":
    main()
