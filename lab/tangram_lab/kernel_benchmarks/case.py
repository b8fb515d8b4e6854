"""One benchmark case on the host: the pages that each row reads, in integers.

Physical pages are scattered as in a pool that has served for a while (PersistentKV, evaluation
set-up). Page ids are drawn without order from a pool in which half the pages are holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tangram.errors import ConfigError
from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.form import DecodeRows
from tangram.plan.schedule import Decoding
from tangram.types import Float64, Int32, Int64
from tangram_lab.kernel_benchmarks.tree import Tree

HOLES_PER_PAGE = 1  # holes in the pool, for each page in use


@dataclass(frozen=True)
class BatchGeometry:
    """The attention of one model and the shape of a page: H KV heads of G query heads each.

    Entries have 16 bits an element, or FP8 with `element_bytes` 1.
    """

    kv_heads: int
    group: int
    head_dim: int = 128
    page_tokens: int = 16
    heads_per_page: int = 8
    element_bytes: int = 2

    @classmethod
    def of_heads(
        cls, heads: str, page_tokens: int, heads_per_page: int | None = None, head_dim: int = 128
    ) -> BatchGeometry:
        """The geometry from "32/8" (query heads / KV heads). By default a page holds all KV heads.

        Raises `ConfigError` if the numbers do not fit together.
        """
        try:
            query_heads, kv_heads = (int(number) for number in heads.split("/"))
        except ValueError as error:
            raise ConfigError(
                f"heads is {heads!r}, it must read like 32/8 (query heads / KV heads)"
            ) from error
        per_page = kv_heads if heads_per_page is None else min(heads_per_page, kv_heads)
        if query_heads % kv_heads or kv_heads % per_page:
            raise ConfigError(
                f"heads is {heads!r} with {per_page} heads a page: Q/H and H/Hp must be whole"
            )
        return cls(kv_heads, query_heads // kv_heads, head_dim, page_tokens, per_page)

    @property
    def query_heads(self) -> int:
        """Q."""
        return self.kv_heads * self.group


@dataclass(frozen=True, eq=False)
class Case:
    """R rows, L layers, H KV heads: `rows` addresses into `tables` (flat page ids) and `lengths`
    (flat entries).

    `pages` is the size of the pool, holes included. `tree` is set where rows share prefixes, its
    leaves in row order.
    """

    name: str
    geometry: BatchGeometry
    rows: DecodeRows
    tables: Int32
    lengths: Int32
    pages: int
    tree: Tree | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(R, L, H)."""
        r, layers, heads = self.rows.table.shape
        return r, layers, heads

    @property
    def decoding(self) -> Decoding:
        """The case as input of planners. Its prefixes are raw pages, without sealed chunks."""
        kept = np.zeros(self.shape, np.int64)
        return Decoding(self.rows, self.lengths, self.geometry.group, kept, self._forest)

    def _forest(self) -> Forest:
        nothing = np.zeros(self.shape[0], np.int64)
        raw_pages = self.cell_lengths[:, 0, 0] // self.geometry.page_tokens
        return build_forest(
            *units_of(self.tables, self.rows.table[:, 0, 0], nothing, nothing, raw_pages), nothing
        )

    @property
    def cell_lengths(self) -> Int64:
        """[R, L, H]: the number of entries that each row's query reads of each head."""
        return self.lengths[self.rows.length_index].astype(np.int64)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value."""
        return 2 * self.geometry.head_dim * self.geometry.element_bytes

    @property
    def read_bytes(self) -> int:
        """KV bytes if every row read its own copy."""
        return int(self.cell_lengths.sum()) * self.entry_bytes

    @property
    def unique_bytes(self) -> int:
        """KV bytes if every distinct entry were read once: a lower bound for any schedule."""
        return unique_entries(self) * self.entry_bytes

    @property
    def operations(self) -> int:
        """Floating-point operations of both products: 4·G·D for each entry a row reads."""
        return int(self.cell_lengths.sum()) * 4 * self.geometry.group * self.geometry.head_dim

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, holes included."""
        return (
            self.pages * self.geometry.heads_per_page * self.geometry.page_tokens * self.entry_bytes
        )


def unique_entries(case: Case) -> int:
    """Distinct (page, column, entry) that some row reads."""
    size = case.geometry.page_tokens
    length, table = case.cell_lengths.ravel(), case.rows.table.ravel()
    pages = -(-length // size)
    cell = np.repeat(np.arange(len(pages)), pages)
    step = np.arange(len(cell)) - np.repeat(np.cumsum(pages) - pages, pages)
    block = case.tables[table[cell] + step].astype(np.int64) * case.geometry.heads_per_page
    block += case.rows.column.ravel()[cell]
    filled = np.zeros(case.pages * case.geometry.heads_per_page, np.int64)
    np.maximum.at(filled, block, np.minimum(size, length[cell] - step * size))
    return int(filled.sum())


def scatter_pages(pages: int, seed: int) -> tuple[Int32, int]:
    """`pages` distinct page ids in random order, and the size of their pool."""
    total = pages * (1 + HOLES_PER_PAGE)
    return np.random.default_rng(seed).permutation(total)[:pages].astype(np.int32), total


def tree_case(tree: Tree, geometry: BatchGeometry, seed: int, name: str | None = None) -> Case:
    """One layer; row r is leaf r of the tree, its table the pages of the nodes on its path.

    This is PAT's evaluation. Raises `ConfigError` if a node does not fill whole pages.
    """
    size = geometry.page_tokens
    if any(tokens % size for tokens in tree.tokens):
        raise ConfigError(f"tree {tree}: every node must fill whole pages, page_tokens is {size}")
    runs = geometry.kv_heads // geometry.heads_per_page
    node_pages = [tokens // size for tokens in tree.tokens]
    counts = [nodes * runs * pages for nodes, pages in zip(tree.nodes, node_pages, strict=True)]
    ids, total = scatter_pages(sum(counts), seed)
    levels = [
        level.reshape(nodes, runs, pages)[tree.path[:, index]]
        for index, (level, nodes, pages) in enumerate(
            zip(np.split(ids, np.cumsum(counts)[:-1]), tree.nodes, node_pages, strict=True)
        )
    ]
    tables = np.concatenate(levels, axis=2)
    offset = np.arange(tree.leaves * runs, dtype=np.int64).reshape(-1, runs) * tables.shape[2]
    lengths = np.full(tree.leaves, sum(tree.tokens), np.int32)
    index = np.repeat(np.arange(tree.leaves)[:, None], runs, axis=1)
    rows = _one_layer(offset, index, lengths[index].astype(np.float64), geometry)
    return Case(name or str(tree), geometry, rows, tables.ravel(), lengths, total, tree)


def own_case(name: str, lengths: Sequence[int] | Int64, geometry: BatchGeometry, seed: int) -> Case:
    """One layer of rows that share no pages; lengths are [R] or, by run of heads, [R, H / Hp]."""
    runs = geometry.kv_heads // geometry.heads_per_page
    size = np.asarray(lengths, np.int32)
    size = np.repeat(size[:, None], runs, axis=1) if size.ndim == 1 else size
    pages = -(-size.astype(np.int64).ravel() // geometry.page_tokens)
    ids, total = scatter_pages(int(pages.sum()), seed)
    offset = (np.cumsum(pages) - pages).reshape(size.shape)
    rows = _one_layer(
        offset, np.arange(size.size).reshape(size.shape), size.astype(np.float64), geometry
    )
    return Case(name, geometry, rows, ids, size.ravel(), total)


def _one_layer(
    offset: Int64, length_index: Int64, budget: Float64, geometry: BatchGeometry
) -> DecodeRows:
    """All [R, runs of Hp heads]."""
    table, index = (
        np.repeat(x, geometry.heads_per_page, axis=1)[:, None] for x in (offset, length_index)
    )
    share = np.repeat(budget, geometry.heads_per_page, axis=1)[:, None]
    column = np.broadcast_to(np.arange(geometry.kv_heads) % geometry.heads_per_page, table.shape)
    return DecodeRows.of(
        table, np.ascontiguousarray(column), index, share, (None,), geometry.page_tokens
    )
