"""Benchmark cases are what they say: who shares which pages, how long rows are, how many bytes
there are to read.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.budgets import SHIPPED, choose_layers, even_case, load, make_ragged_case
from bench.kernels.fragmentation import GROUPINGS, count_reclaimed, scale_budgets
from tangram.errors import ConfigError
from tangram.kernels.triton.packed import DecodeOptions
from tangram.plan.cost import CostModel
from tangram.plan.split import plan_plain
from tangram_lab.baselines.compared_schedules import KernelVariant, parse_schedule
from tangram_lab.kernel_benchmarks.case import (
    BatchGeometry,
    Case,
    own_case,
    tree_case,
    unique_entries,
)
from tangram_lab.kernel_benchmarks.counters import WorkCounters, count_launches
from tangram_lab.kernel_benchmarks.plan_check import check_plan
from tangram_lab.kernel_benchmarks.traces import LIVING_TRACES, SEEDS, TRACES, LivingTrace, Trace
from tangram_lab.kernel_benchmarks.tree import CONFIGS, HEADS, PAGE_TOKENS, Tree

SMALL = BatchGeometry(kv_heads=2, group=2, head_dim=4, page_tokens=4, heads_per_page=2)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    levels = draw(st.integers(1, 4))
    nodes = sorted(draw(st.lists(st.integers(1, 12), min_size=levels, max_size=levels)))
    tokens = draw(st.lists(st.sampled_from([4, 8, 12]), min_size=levels, max_size=levels))
    return Tree(tuple(nodes), tuple(tokens))


def pages_of(case: Case, row: int, head: int = 0) -> list[int]:
    begin = int(case.rows.table[row, 0, head])
    length = int(case.cell_lengths[row, 0, head])
    return case.tables[begin : begin + -(-length // case.geometry.page_tokens)].tolist()


def unique_tokens(tree: Tree) -> int:
    """Tokens with every node counted once."""
    return sum(nodes * tokens for nodes, tokens in zip(tree.nodes, tree.tokens, strict=True))


def test_a_tree_is_read_from_its_written_form() -> None:
    tree = Tree.parse("1,2,6_1024,256,32")
    assert str(tree) == "1,2,6_1024,256,32"
    assert (tree.leaves, unique_tokens(tree)) == (6, 1024 + 2 * 256 + 6 * 32)
    assert tree.path.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]


def test_children_are_dealt_out_evenly_where_they_do_not_divide() -> None:
    assert Tree.parse("2,5_4,4").path[:, 0].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("text", ["1,2", "1,2_3", "2,1_4,4", "1,a_4,4", "0_4", "1_0", "_"])
def test_a_malformed_tree_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="tree"):
        Tree.parse(text)


def test_the_published_configurations_fill_pages_and_parse() -> None:
    assert len(CONFIGS) == 20 and sum(Tree.parse(text).shared for text in CONFIGS) == 18
    assert all(str(Tree.parse(text)) == text for text in CONFIGS)
    assert all(tokens % PAGE_TOKENS == 0 for text in CONFIGS for tokens in Tree.parse(text).tokens)
    assert [BatchGeometry.of_heads(heads, PAGE_TOKENS).group for heads in HEADS] == [8, 4, 2, 1]


@given(trees(), st.sampled_from([1, 2]))
def test_rows_share_exactly_the_pages_of_the_nodes_they_have_in_common(
    tree: Tree, heads_per_page: int
) -> None:
    case = tree_case(tree, BatchGeometry(2, 2, 4, 4, heads_per_page), seed=3)
    assert case.shape == (tree.leaves, 1, 2)
    for head in (0, 1):
        for row in range(tree.leaves):
            mine, first = pages_of(case, row, head), pages_of(case, 0, head)
            assert len(mine) == len(set(mine)) == sum(tree.tokens) // 4
            begin = 0
            for level, tokens in enumerate(tree.tokens):
                end = begin + tokens // 4
                same_node = tree.path[row, level] == tree.path[0, level]
                assert set(mine[begin:end]).isdisjoint(first) != same_node
                assert not same_node or mine[begin:end] == first[begin:end]
                begin = end
    assert unique_entries(case) == unique_tokens(tree) * 2
    assert case.unique_bytes == unique_tokens(tree) * 2 * 2 * 4 * 2
    assert case.read_bytes == tree.leaves * sum(tree.tokens) * 2 * 2 * 4 * 2
    # 4 query heads, D 4, 2 products
    assert case.operations == tree.leaves * sum(tree.tokens) * 4 * 4 * 4


def test_pages_are_scattered_over_a_pool_half_of_which_is_holes() -> None:
    case = own_case("", [400, 90], SMALL, seed=0)
    pages = case.tables
    assert len(set(pages.tolist())) == len(pages) == 100 + 23
    assert case.pages == 2 * len(pages) > pages.max()
    assert (np.diff(pages) != 1).mean() > 0.9


def test_a_node_that_does_not_fill_its_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens is 4"):
        tree_case(Tree((1, 2), (6, 4)), SMALL, seed=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_rows_without_sharing_count_each_entry_once_partial_pages_included(
    lengths: list[int],
) -> None:
    case = own_case("", lengths, SMALL, seed=1)
    assert case.cell_lengths[:, 0, 0].tolist() == lengths
    assert unique_entries(case) == 2 * sum(lengths)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_traces_follow_their_seed_and_stay_within_64k(trace: Trace) -> None:
    lengths = [trace.lengths(seed) for seed in SEEDS]
    assert lengths == [trace.lengths(seed) for seed in SEEDS]
    assert all(len(row) == trace.batch and min(row) >= 1 and max(row) <= 65536 for row in lengths)
    assert trace.family == "homogeneous" or len(set(map(tuple, lengths))) > 1


def test_bimodal_has_one_long_row_for_three_short() -> None:
    lengths = Trace("bimodal", 8).lengths(0)
    assert [length > 40000 for length in lengths] == [True, False, False, False] * 2


@pytest.mark.parametrize("name", SHIPPED[:2])
def test_a_ragged_case_has_the_lengths_its_profile_promises(name: str) -> None:
    profile = load(name, None, page_tokens=None, heads_per_page=None)
    layers = choose_layers(profile, 3)
    case = make_ragged_case(profile, 3 * profile.chunk_tokens, 2, layers, seed=0, name=name)
    chunk, lengths = profile.chunk_tokens, case.cell_lengths
    raw = np.array([chunk // 4, chunk * 3 // 4])
    sealed = np.rint((3 * chunk - raw) / chunk).astype(int)
    for group, members in enumerate(profile.groups):
        for column, (layer, head) in enumerate(members):
            if layer in layers:
                at = layers.index(layer), head
                kept = profile.sealed_pages[group] * profile.page_tokens
                assert lengths[:, at[0], at[1]].tolist() == (sealed * kept + raw).tolist()
                assert case.rows.column[:, at[0], at[1]].tolist() == [column, column]
    block = case.tables[case.rows.table] * case.geometry.heads_per_page + case.rows.column
    assert len(np.unique(block)) == block.size, "two heads start in one place"


def test_the_even_twin_has_the_same_entries_spread_evenly() -> None:
    profile = load(SHIPPED[0], None, page_tokens=None, heads_per_page=None)
    case = make_ragged_case(profile, 16384, 3, choose_layers(profile, 4), seed=0, name="ragged")
    twin = even_case(case, seed=1, name="even")
    assert twin.shape == case.shape
    assert np.unique(case.cell_lengths[0]).size > 4 and np.unique(twin.cell_lengths[0]).size == 1
    assert unique_entries(twin) == pytest.approx(unique_entries(case), rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "packing:best",
        "planner",
        "plain:off",
        "aot+speed=2",
        "aot+quick",
        "packing",
        "plain+ctas=2",
        "aot+tile=x",
    ],
)
def test_an_unknown_schedule_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="known"):
        parse_schedule(text)


def test_a_variant_changes_how_the_kernels_run_and_not_the_plan() -> None:
    found = KernelVariant.parse("packing:paper+apart+queries=128+serial+replan+onetile")
    assert found.schedule.text == "packing:paper+queries=128+onetile"
    assert found.replans and found.each_step
    options = found.options()
    assert (options.merge, options.chained) == ("kernel", False)
    assert KernelVariant.parse("aot").options() == DecodeOptions()
    assert found.schedule.options().one_tile_tasks > DecodeOptions().one_tile_tasks
    with pytest.raises(ConfigError, match="atomic"):
        KernelVariant.parse("aot+atomic")
    with pytest.raises(ConfigError, match="apart"):
        parse_schedule("aot+apart")


@pytest.mark.parametrize("rule", ["off", "naive", "paper", "measured"])
def test_packing_reads_shared_nodes_once_and_counters_say_so(rule: str) -> None:
    case = tree_case(Tree((1, 4), (4096, 512)), BatchGeometry.of_heads("8/2", 32), seed=0)
    plan = parse_schedule(f"packing:{rule}+ctas=4+tasks=2").plan(case.decoding, 4, CostModel())
    check_plan(plan, case.rows, case.lengths, case.tables)
    counters = WorkCounters.of([plan], case, 4)
    assert counters.task_kv_bytes == (case.read_bytes if rule == "off" else case.unique_bytes)
    assert counters.tasks > 16


def test_launches_are_one_for_each_tile_and_one_for_a_merge() -> None:
    case = tree_case(Tree((1, 4), (512, 512)), BatchGeometry.of_heads("8/2", 32), seed=0)
    plan = parse_schedule("packing:naive+tasks=1").plan(case.decoding, 1, CostModel())
    by_tile = DecodeOptions(one_tile_tasks=0)
    assert count_launches(plan, case, by_tile) == 2, "tails merge"
    assert count_launches(plan, case, replace(by_tile, merge="kernel")) == 3
    assert count_launches(plan, case, DecodeOptions()) == 2, "one tile, so that no task comes last"
    alone = plan_plain(case.rows)
    assert WorkCounters.of([alone], case, 4).launches == 1, "nothing is merged"


def test_grouping_by_budget_gives_back_more_and_single_heads_all() -> None:
    mean = np.array([[0.9, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.9]])
    budgets = scale_budgets(mean, 0.25)
    assert budgets.mean() == pytest.approx(0.25) and np.allclose(
        budgets / budgets[0, 1], mean / 0.1
    )
    kept = {grouping: count_reclaimed(budgets, grouping, 2, 4096, 16) for grouping in GROUPINGS}
    assert kept["across layers"] > kept["within layer"] >= kept["adjacent"] > kept["monolithic"]
    assert kept["across layers"] == pytest.approx(0.75, abs=0.01)
    assert count_reclaimed(budgets, "adjacent", 1, 4096, 16) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("living", LIVING_TRACES, ids=lambda living: living.trace.name)
def test_rows_of_a_living_trace_come_grow_and_go(living: LivingTrace) -> None:
    steps = list(living.batches(0, 3000))
    assert steps == list(living.batches(0, 3000)) and steps[0] == (True, living.trace.lengths(0))
    for (_, before), (changed, after) in pairwise(steps):
        assert after, "a step without rows is none"
        assert changed == (after != [length + 1 for length in before])
    assert fmean(len(lengths) for _, lengths in steps) == pytest.approx(
        living.trace.batch, rel=0.35
    )
    assert 10 < sum(changed for changed, _ in steps) < 3000 / 2
