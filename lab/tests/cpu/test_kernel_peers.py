"""Other libraries' kernels in the benchmark: the arguments made for them, and FastTree's answer
where its file is on PYTHONPATH.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from bench.kernels.fa3_peer import block_table, copy_pages
from bench.kernels.family import Run
from bench.kernels.fasttree_peer import (
    FastTree,
    TreeNode,
    check_index,
    kv_pointers,
    node_pages,
    token_buffers,
    tree_nodes,
)
from bench.kernels.kernel_report import show_failures
from bench.kernels.peers import peer
from tangram_lab.kernel_benchmarks.case import BatchGeometry, own_case, tree_case
from tangram_lab.kernel_benchmarks.flashinfer import Sequences
from tangram_lab.kernel_benchmarks.flashinfer_contender import layers_of
from tangram_lab.kernel_benchmarks.timing import NotApplicable, relative_error
from tangram_lab.kernel_benchmarks.tree import CONFIGS, HEADS, Tree
from tangram_lab.kernel_benchmarks.workloads import Workload, compute_expected, gather
from tests.interpreter import INTERPRETED, interpreter_few

PAGE = 4


def make_workload(tree: str, heads: str = "4/2", page_tokens: int = PAGE, **given: Any) -> Workload:
    geometry = BatchGeometry.of_heads(heads, page_tokens, head_dim=16, **given)
    case = tree_case(Tree.parse(tree), geometry, 0)
    return Workload.build(case, torch.float16, torch.device("cpu"))


def test_a_tree_becomes_nodes_level_by_level() -> None:
    assert tree_nodes(Tree.parse("1,2,4_8,12,4")) == [
        TreeNode(0, -1, 8, 2, [0, 1, 2, 3]),
        TreeNode(1, 0, 12, 2, [0, 1]),
        TreeNode(2, 0, 12, 2, [2, 3]),
        TreeNode(3, 1, 4, 0, [0]),
        TreeNode(4, 1, 4, 0, [1]),
        TreeNode(5, 2, 4, 0, [2]),
        TreeNode(6, 2, 4, 0, [3]),
    ]


def test_several_roots_get_one_of_no_tokens_above_them() -> None:
    nodes = tree_nodes(Tree.parse("2,4_8,4"))
    assert nodes[:3] == [
        TreeNode(0, -1, 0, 2, [0, 1, 2, 3]),
        TreeNode(1, 0, 8, 2, [0, 1]),
        TreeNode(2, 0, 8, 2, [2, 3]),
    ]
    assert kv_pointers(nodes) == [0, 0, 8, 16, 20, 24, 28, 32]


@pytest.mark.parametrize("tree", ["1,2,4_8,12,4", "2,3,7_8,4,4", "3_8"])
def test_the_tokens_of_a_rows_nodes_are_the_rows_tokens(tree: str) -> None:
    workload = make_workload(tree)
    case = workload.case
    assert case.tree is not None
    nodes = tree_nodes(case.tree)
    pointers = kv_pointers(nodes)
    buffers = token_buffers(workload, node_pages(case, case.tree))
    assert len(buffers[0]) == pointers[-1]
    for row in range(case.tree.leaves):
        on_path = [node for node in nodes if row in node.requests]
        parents = [node.parent for node in on_path]
        assert parents == [-1, *(node.id for node in on_path[:-1])]
        spans = [slice(pointers[node.id], pointers[node.id + 1]) for node in on_path]
        for head in range(2):
            found = gather(workload, 0, np.array([2 * row + head]))
            for buffer, entries in zip(buffers, found, strict=True):
                torch.testing.assert_close(
                    torch.cat([buffer[span, head] for span in spans]), entries[0], rtol=0, atol=0
                )


def test_pages_of_some_heads_are_declined() -> None:
    workload = make_workload("1,2_8,4", heads_per_page=1)
    assert workload.case.tree is not None
    with pytest.raises(NotApplicable, match="all KV heads"):
        node_pages(workload.case, workload.case.tree)


def test_one_tree_is_too_large_for_the_kernels_int32() -> None:
    declined = []
    for heads in HEADS:
        for tree in CONFIGS:
            tokens = kv_pointers(tree_nodes(Tree.parse(tree)))[-1]
            try:
                check_index("keys", tokens * int(heads.split("/")[1]) * 128)
            except NotApplicable:
                declined.append((heads, tree))
    assert declined == [("32/32", "256_4096")]


class TorchOnCpu:
    """torch, where every device is the CPU."""

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize(
    ("tree", "heads"),
    interpreter_few(
        [
            ("2,4,8_32,16,16", "8/2"),
            ("1,2,40_64,16,16", "4/4"),
            ("1,2,12_160,16,16", "8/1"),
            ("6_48", "4/2"),
        ],
        ("2,4,8_32,16,16", "8/2"),
        ("6_48", "4/2"),
    ),
)
def test_fasttree_gives_the_plain_answer_with_every_plan(
    tree: str, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("fasttree", reason="FastTree's file is not on PYTHONPATH")
    workload = make_workload(tree, heads, page_tokens=16)
    if INTERPRETED:
        monkeypatch.setattr(library, "torch", TorchOnCpu())
    contender = FastTree(workload)
    for _ in range(2):
        contender.plan()
        (out,) = contender.run()
        assert relative_error(out, compute_expected(workload)[0]) < 1e-3


def read_pages(pages: Tensor, table: Tensor, length: int) -> Tensor:
    return pages[table.long()].flatten(0, 1)[:length]


def check_sequences(workload: Workload, layers: list[Sequences]) -> None:
    """Every sequence's pages hold what its row reads."""
    for layer, (seqs, pages) in enumerate(zip(layers, copy_pages(layers), strict=True)):
        assert all(half.is_contiguous() for half in pages)
        table = block_table(seqs)
        assert table.dtype == torch.int32
        for number in range(seqs.count):
            length = int(seqs.lengths[number])
            for head in range(seqs.kv_heads):
                cell = np.array([number * seqs.kv_heads + head])
                found = gather(workload, layer, cell)
                for half, entries in zip(pages, found, strict=True):
                    read = read_pages(half[:, :, head], table[number], length)
                    torch.testing.assert_close(read, entries[0, :length], rtol=0, atol=0)


@pytest.mark.parametrize("heads_per_page", [1, 2, 4])
def test_pages_and_tables_for_flash_attention_hold_each_rows_entries(heads_per_page: int) -> None:
    geometry = BatchGeometry(4, 2, 16, PAGE, heads_per_page)
    case = own_case("", [3, 17, 1, 8], geometry, 0)
    workload = Workload.build(case, torch.float16, torch.device("cpu"))
    check_sequences(workload, layers_of(workload))
    shared = make_workload("2,4_8,4")
    check_sequences(shared, layers_of(shared))


@pytest.mark.parametrize(("name", "module"), [("fasttree", "fasttree"), ("fa3", "vllm")])
def test_a_missing_library_is_an_import_error(name: str, module: str) -> None:
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ImportError, match=module):
        peer(name, make_workload("1,2_8,4"), torch.empty(0))


def test_a_contender_that_fails_everywhere_takes_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = {"fasttree": "ModuleNotFoundError: No module named 'fasttree'"}
    rows = [
        {"case": "a", "failed": missing | {"fa3": "RuntimeError: no"}},
        {"case": "b", "failed": missing | {"cascade": "NotApplicable: no prefix is shared"}},
    ]
    show_failures(Console(), Run("pat", argparse.Namespace(), rows=rows))
    assert capsys.readouterr().out.splitlines() == [
        "FAILED all 2 cases, fasttree: ModuleNotFoundError: No module named 'fasttree'",
        "FAILED a, fa3: RuntimeError: no",
    ]
