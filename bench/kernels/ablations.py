"""The cost of leaving out one part of the kernels: merging, tile classes, overlap, shape of pages.

Cases are trees of PAT and rows that share nothing, with `packing:thrifty`. Other ablations are
columns of other families: packing rules in `pat`, split maps and re-planning in `ragged`, buckets
in `persistent`, page groups in `fragmentation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench.kernels import dense, pat
from bench.kernels.family import Entry, execute, parser
from tangram_lab.kernel_benchmarks.case import BatchGeometry, Case
from tangram_lab.kernel_benchmarks.tree import Tree

WHOLE = "packing:thrifty"
VARIANTS = (WHOLE, *(f"{WHOLE}+{change}" for change in ("apart", "onetile", "serial")))
TREES = ("1,16,32,64,128,1024_256,128,64,32,32,32", "1,256_256,32", "1,2,64_1024,256,256")
ROWS = "8 × 8K"
PAGE_TOKENS, HEADS_PER_PAGE = (16, 32, 64), (1, 2, 4, 8)
PAGE = 32  # the page of the full configuration


def _makers() -> dict[str, Callable[[BatchGeometry, bool], Case]]:
    trees = {text: partial(_tree, Tree.parse(text)) for text in TREES}
    return {
        **trees,
        ROWS: lambda geometry, tiny: dense.make(ROWS, dense.LENGTHS[ROWS], geometry, 0, tiny),
    }


def _tree(tree: Tree, geometry: BatchGeometry, tiny: bool) -> Case:
    return pat.make(tree, geometry, str(tree), tiny)


def _fits(name: str, page_tokens: int) -> bool:
    return name == ROWS or not any(tokens % page_tokens for tokens in Tree.parse(name).tokens)


def _entry(
    name: str,
    make: Callable[[BatchGeometry, bool], Case],
    geometry: BatchGeometry,
    variants: Sequence[str],
) -> Entry:
    shape = {"page_tokens": geometry.page_tokens, "heads_per_page": geometry.heads_per_page}
    title = f"{name}, pages of {geometry.page_tokens} × {geometry.heads_per_page} heads"
    return Entry(
        title, name, partial(make, geometry), {"case": name, **shape}, only=tuple(variants)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the family; a page size leaves out trees whose nodes are not whole pages of it."""
    options_of = parser(__doc__, VARIANTS, (), page_tokens=PAGE)
    options_of.add_argument("--heads", default="32/8", help="query/KV heads")
    options = options_of.parse_args(arguments)
    entries = []
    for name, make in _makers().items():
        whole = BatchGeometry.of_heads(options.heads, PAGE, None)
        entries.append(_entry(name, make, whole, options.planners))
        sizes = [size for size in PAGE_TOKENS if size != PAGE and _fits(name, size)]
        shapes = [(size, whole.heads_per_page) for size in sizes]
        shapes += [(PAGE, heads) for heads in HEADS_PER_PAGE if heads < whole.kv_heads]
        entries += [
            _entry(name, make, BatchGeometry.of_heads(options.heads, *shape), (WHOLE,))
            for shape in shapes
        ]
    execute("ablations", options, entries)


if __name__ == "__main__":
    main()
