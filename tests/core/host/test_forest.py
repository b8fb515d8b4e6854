"""The prefix forest: nodes are exactly the runs of units that the same rows share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cache.layout import Layout
from tangram.errors import ConfigError
from tangram.plan.forest import Forest, build_forest, units_of
from tangram.plan.loops import bound_cells
from tangram.types import Geometry, Int64


def forest_of(paths: list[list[int]], padding: int = 0) -> Forest:
    """`padding` is what lies behind the valid units of a row."""
    units = np.full((len(paths), max(map(len, paths), default=0)), padding, np.int64)
    for row, path in enumerate(paths):
        units[row, : len(path)] = path
    return build_forest(
        units, np.array([len(path) for path in paths]), np.zeros(len(paths), np.int64)
    )


def describe_nodes(forest: Forest) -> set[tuple[frozenset[int], int, int]]:
    """(rows, first unit, last unit) of each node."""
    return {
        (frozenset(forest.order[begin:end].tolist()), int(first), int(last))
        for begin, end, first, last in zip(
            forest.row_begin, forest.row_end, first_units(forest), forest.unit_end, strict=True
        )
    }


def first_units(forest: Forest) -> Int64:
    """[N]: where the units of each node begin, which is where those of its parent end."""
    return np.where(forest.depth > 0, forest.unit_end[forest.parent], 0)


def brute_force(paths: list[list[int]]) -> set[tuple[frozenset[int], int, int]]:
    """For each prefix the rows that have it; runs of prefixes with the same two or more rows are
    the nodes.
    """
    having: dict[tuple[int, ...], set[int]] = {}
    for row, path in enumerate(paths):
        for end in range(1, len(path) + 1):
            having.setdefault(tuple(path[:end]), set()).add(row)
    units: dict[frozenset[int], list[int]] = {}
    for prefix, rows in having.items():
        if len(rows) > 1:
            units.setdefault(frozenset(rows), []).append(len(prefix) - 1)
    return {(rows, min(shared), max(shared) + 1) for rows, shared in units.items()}


paths = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


@given(paths, st.integers(0, 2))
def test_the_forest_is_the_brute_force_one(paths: list[list[int]], padding: int) -> None:
    forest = forest_of(paths, padding)
    assert describe_nodes(forest) == brute_force(paths)
    assert len(describe_nodes(forest)) == forest.nodes
    assert sorted(forest.order.tolist()) == list(range(len(paths)))


@given(paths)
def test_parents_come_first_and_contain_their_children(paths: list[list[int]]) -> None:
    forest = forest_of(paths)
    for node, up in enumerate(forest.parent):
        if up == node:
            assert forest.depth[node] == 0
            continue
        assert up < node and forest.depth[node] == forest.depth[up] + 1
        assert forest.unit_end[up] < forest.unit_end[node]
        assert (
            forest.row_begin[up]
            <= forest.row_begin[node]
            < forest.row_end[node]
            <= forest.row_end[up]
        )


@given(paths)
def test_the_deepest_node_of_a_row_ends_where_its_own_tail_begins(paths: list[list[int]]) -> None:
    forest = forest_of(paths)
    for position, row in enumerate(forest.order):
        shared = [end for rows, _, end in brute_force(paths) if row in rows]
        node = forest.deepest[position]
        assert (forest.unit_end[node] if shared else node) == (
            max(shared) if shared else forest.nodes
        )


def test_the_worked_example() -> None:
    forest = forest_of([[7, 8, 9], [5, 6], [7, 8, 4], [5, 6, 2]])
    assert describe_nodes(forest) == {(frozenset({0, 2}), 0, 2), (frozenset({1, 3}), 0, 2)}
    assert forest.parent.tolist() == [0, 1] and forest.depth.tolist() == [0, 0]


def test_equal_rows_share_everything_and_a_chain_is_as_deep_as_it_is_long() -> None:
    assert describe_nodes(forest_of([[1, 2], [1, 2], [1, 2]])) == {(frozenset({0, 1, 2}), 0, 2)}
    chain = forest_of([[*range(length)] for length in range(1, 40)])
    assert chain.nodes == 38 and chain.depth.tolist() == list(range(38))


def test_boundaries_count_what_each_head_keeps_of_sealed_chunks_and_whole_pages_after_them() -> (
    None
):
    kept, sealed, owner = np.array([[[512, 64]], [[128, 256]]]), np.array([2, 1]), np.zeros(4, int)
    tokens = np.empty((1, 5, 2), np.int32)
    bound_cells(np.array([0, 1, 2, 5]), owner, sealed, kept, 16, tokens)
    assert tokens[0, :4].tolist() == [[0, 0], [512, 64], [1024, 128], [1024 + 48, 128 + 48]]
    bound_cells(np.array([1, 1]), np.array([0, 1]), sealed, kept, 16, tokens)
    assert tokens[0, :2].tolist() == [[512, 64], [128, 256]]


def test_units_are_read_where_the_layout_puts_sealed_chunks_and_raw_pages() -> None:
    layout = Layout.build(
        Geometry(2, 2, 4, 16, 100, 4096, (None, None)),
        chunk_tokens=64,
        page_tokens=16,
        heads_per_page=1,
        max_tokens=512,
        groups=[[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]],
        sealed_pages=[1, 3, 2, 4],
    )
    width, group = int(layout.group_offset[-1]), int(layout.head_group[0, 1])
    tables = np.arange(2 * width, dtype=np.int32)
    start = np.array([0, width]) + layout.group_offset[group]
    sealed, raw = np.array([2, 0]), np.array([1, 3])
    units, count = units_of(tables, start, np.full(2, layout.sealed_pages[group]), sealed, raw)
    tail = layout.raw_entries(2, 0)
    for place in (0, -1):
        expected = [
            [
                *(
                    layout.span_entries(chunk)[layout.span_group == group][place]
                    for chunk in (0, 1)
                ),
                tail[group],
            ],
            [width + layout.raw_entries(0, page)[group] for page in range(3)],
        ]
        pages = units >> 32 if place == 0 else units & 0xFFFFFFFF
        assert count.tolist() == [3, 3] and pages.tolist() == expected


@pytest.mark.parametrize("pages", [([1, 2, 3, 4], [1, 2, 3, 5]), ([4, 3, 2, 1], [5, 3, 2, 1])])
def test_chunks_that_share_their_oldest_pages_alone_are_two(pages: tuple[list[int], ...]) -> None:
    """Decode has filled them, behind a tail that both rows have; drafts read the newest first."""
    tables, nothing = np.array(pages, np.int32).ravel(), np.zeros(2, np.int64)
    units, count = units_of(tables, np.array([0, 4]), np.full(2, 4), np.ones(2, np.int64), nothing)
    assert count.tolist() == [1, 1] and units[0, 0] != units[1, 0]
    assert build_forest(units, count, np.ones(2, np.int64)).nodes == 0


@pytest.mark.parametrize(
    ("count", "sealed"), [([3, 1], [0, 0]), ([1], [0, 0]), ([1, 1], [0]), ([-1, 1], [0, 0])]
)
def test_counts_that_do_not_fit_the_units_are_refused_by_name(
    count: list[int], sealed: list[int]
) -> None:
    with pytest.raises(ConfigError, match="unit_count"):
        build_forest(np.zeros((2, 2), np.int64), np.array(count), np.array(sealed))
