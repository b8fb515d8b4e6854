"""A policy chooses what was fastest on steps like this one, and its file says what it holds for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import ConfigError
from tangram.plan.cost import CostModel
from tangram.plan.policy import FLASHINFER, Policy, StepLoad
from tangram.plan.schedule import Schedule
from tangram_lab.kernel_benchmarks.case import BatchGeometry, own_case, tree_case, unique_entries
from tangram_lab.kernel_benchmarks.cases import (
    budgets,
    calibration,
    make_held_out_cases,
    random_tree,
)
from tangram_lab.kernel_benchmarks.tree import CONFIGS, Tree

GEOMETRY = BatchGeometry(kv_heads=2, group=2, head_dim=4, page_tokens=4, heads_per_page=2)
SMALL, LARGE = StepLoad(8, 1024, 1.0, 1.0), StepLoad(2048, 1024, 1.0, 1.0)
SCHEDULES = ("workqueue", "aot", FLASHINFER)


def policy(times: dict[StepLoad, list[float]], schedules: tuple[str, ...] = SCHEDULES) -> Policy:
    return Policy.fit(
        "a GPU", {"kv_heads": 2}, CostModel(), schedules, list(times), list(times.values())
    )


def two_regimes() -> Policy:
    """Small steps want the first schedule, large ones the second; four traces of each."""
    small = {StepLoad(8 + n, 1024, 1.0, 1.0): [10.0, 14.0, 30.0] for n in range(4)}
    large = {StepLoad(2048 + n, 1024, 1.0, 1.0): [30.0, 20.0, 22.0] for n in range(4)}
    return policy(small | large)


def test_each_step_gets_what_was_fastest_on_steps_like_it() -> None:
    made = two_regimes()
    assert made.choose(StepLoad(10, 1500, 1.1, 1.0), library=True) == "workqueue"
    assert made.choose(StepLoad(1500, 800, 1.0, 1.0), library=True) == "aot"


def test_far_from_every_trace_the_nearest_decide() -> None:
    made = two_regimes()
    assert made.choose(StepLoad(1e9, 1e9, 1e3, 1e3), library=True) == "aot"
    assert made.choose(StepLoad(1, 1, 1.0, 1.0), library=True) == "workqueue"


def test_the_library_is_chosen_only_where_it_may_be() -> None:
    made = policy({SMALL: [10.0, 11.0, 5.0], LARGE: [10.0, 12.0, 5.0]})
    assert made.choose(SMALL, library=True) == FLASHINFER
    assert made.choose(SMALL, library=False) == "workqueue"


def test_differences_in_the_noise_leave_the_first_schedule() -> None:
    made = policy({SMALL: [10.02, 10.0, 30.0], LARGE: [10.0, 10.03, 30.0]})
    assert made.choose(SMALL, library=True) == made.choose(LARGE, library=True) == "workqueue"


def test_one_mistaken_trace_does_not_decide_among_many() -> None:
    good = {StepLoad(64, 1000 + n, 1.0, 1.0): [10.0, 11.0, 30.0] for n in range(10)}
    made = policy(good | {StepLoad(64, 1011, 1.0, 1.0): [10.3, 10.0, 30.0]})
    assert made.choose(StepLoad(64, 1011, 1.0, 1.0), library=True) == "workqueue"


def test_a_file_gives_the_same_policy_back(tmp_path: Path) -> None:
    made = two_regimes()
    made.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == made


def test_schedules_of_older_files_go_by_their_present_names(tmp_path: Path) -> None:
    old = ("packing:measured", "packing:measured+queries=128", "workqueue")
    replace(two_regimes(), schedules=old).save(tmp_path / "policy.json")
    found = Policy.load(tmp_path / "policy.json").schedules
    assert found == ("packing:thrifty", "packing:thrifty+queries=128", "workqueue")
    assert all(Schedule.parse(text).text == text for text in found)


@pytest.mark.parametrize(
    ("field", "value"),
    [("schedules", None), ("reach", "far"), ("loads", [{"cells": 1}]), ("cost", {"task_us": "x"})],
)
def test_a_damaged_file_is_refused_by_field(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "policy.json"
    two_regimes().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=rf"policy\.json: {field}.*calibrate it again"):
        Policy.load(path)


def test_a_policy_of_another_gpu_or_model_is_refused_by_what_differs() -> None:
    made = two_regimes()
    made.check("a GPU", {"kv_heads": 2})
    with pytest.raises(ConfigError, match="device a GPU, this is cpu"):
        made.check("cpu", {"kv_heads": 2})
    with pytest.raises(ConfigError, match="kv_heads 2, this is 8"):
        made.check("a GPU", {"kv_heads": 8})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        Policy.load(tmp_path / "none.json")


def test_one_trace_makes_no_policy() -> None:
    with pytest.raises(ConfigError, match="two traces"):
        policy({SMALL: [1.0, 2.0, 3.0]})


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    levels = draw(st.integers(1, 4))
    nodes = sorted(draw(st.lists(st.integers(1, 9), min_size=levels, max_size=levels)))
    return Tree(
        tuple(nodes),
        tuple(draw(st.lists(st.sampled_from([4, 8]), min_size=levels, max_size=levels))),
    )


@given(trees())
def test_sharing_is_what_is_read_over_what_is_there(tree: Tree) -> None:
    case = tree_case(tree, GEOMETRY, seed=0)
    load = StepLoad.of(case.decoding)
    assert load.sharing == pytest.approx(int(case.cell_lengths.sum()) / unique_entries(case))
    assert (load.cells, load.mean_tokens, load.unevenness) == (
        tree.leaves * 2,
        sum(tree.tokens),
        1.0,
    )


def test_uneven_rows_are_seen_as_such() -> None:
    case = own_case("", [10, 10, 10, 90], GEOMETRY, seed=0)
    load = StepLoad.of(case.decoding)
    assert (load.cells, load.mean_tokens, load.unevenness, load.sharing) == (8, 30, 3.0, 1.0)


def test_what_a_policy_learns_from_is_not_what_it_is_judged_by() -> None:
    geometry = BatchGeometry.of_heads("32/8", 16)
    learnt, judged = (
        {case.name for case in suite(geometry)} for suite in (calibration, make_held_out_cases)
    )
    assert not learnt & judged and len(learnt) == len(calibration(geometry))
    assert {case.family for case in make_held_out_cases(geometry)} >= {
        "ragged",
        "shared prefixes",
        "bimodal B8",
    }
    assert set(CONFIGS) <= judged


@pytest.mark.parametrize("seed", range(100, 112))
def test_random_trees_are_shared_and_within_bounds(seed: int) -> None:
    tree = random_tree(seed)
    assert (
        tree.shared
        and 16 <= tree.leaves <= 1024
        and all(tokens % 32 == 0 for tokens in tree.tokens)
    )


def test_ragged_budgets_keep_their_promise_on_average() -> None:
    kept = budgets(64, seed=0)
    assert (
        np.all((kept > 0) & (kept <= 1))
        and kept.mean() <= 0.25 + 1e-9
        and kept.max() > 2 * kept.mean()
    )
