"""FastTree's published kernel (MLSys'25) as a contender; its file is no part of this repository.

The module `fasttree` is kernel_bench/fasttree.py of github.com/PanZaifeng/FastTree-Artifact (Apache
2.0, commit 167928b), unchanged, in a folder of PYTHONPATH. Triton 3.6 and 3.7 compile it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tangram.types import Int64
from tangram_lab.kernel_benchmarks.case import Case
from tangram_lab.kernel_benchmarks.timing import NotApplicable
from tangram_lab.kernel_benchmarks.tree import Tree
from tangram_lab.kernel_benchmarks.workloads import Workload

# Its benchmark.py and run_benchmark.sh, for an H100. A query tile times the group is TILE_ROWS.
TILE_ROWS = (64, 16)
GROUPS = (1, 2, 4, 8, 16)
KV_TILES = (32, 32)
KV_SPLITS = (1024, 128)
FEW_TASKS = ((132, 528), (132, 132))
COSTS = (0.66, 0.33, 0.1)
MOST_ELEMENTS = 2**31  # its kernels count elements in int32, so that its copy takes 8 GiB at most
COPIED_PAGES = 1024


@dataclass
class TreeNode:
    """A node as FastTree reads it: `requests` are the rows below it, `parent` is -1 at the root."""

    id: int
    parent: int
    seqlen: int
    num_children: int = 0
    requests: list[int] = field(default_factory=list)


def tree_nodes(tree: Tree) -> list[TreeNode]:
    """The nodes level by level, as numbered from its one root, node 0.

    Several roots get a root of no tokens above them.
    """
    nodes = []
    above = [-1]
    if tree.nodes[0] > 1:
        nodes, above = [TreeNode(0, -1, 0, requests=list(range(tree.leaves)))], [0]
    for level, (count, tokens) in enumerate(zip(tree.nodes, tree.tokens, strict=True)):
        below = range(len(nodes), len(nodes) + count)
        for j, number in enumerate(below):
            nodes.append(TreeNode(number, above[j * len(above) // count], tokens))
        for row, j in enumerate(tree.path[:, level].tolist()):
            nodes[below[j]].requests.append(row)
        above = list(below)
    for node in nodes[1:]:
        nodes[node.parent].num_children += 1
    return nodes


def kv_pointers(nodes: Sequence[TreeNode]) -> list[int]:
    """The first token of each node in a buffer of all nodes' tokens, then the number of tokens."""
    return [0, *np.cumsum([node.seqlen for node in nodes]).tolist()]


def node_pages(case: Case, tree: Tree) -> Int64:
    """The page ids of all nodes in the order of `tree_nodes`, each node's once.

    Raises `NotApplicable` unless a page holds all KV heads.
    """
    if case.geometry.heads_per_page != case.geometry.kv_heads:
        raise NotApplicable("its tokens need pages that hold all KV heads")
    tables = case.tables.reshape(tree.leaves, -1)
    pages = [tokens // case.geometry.page_tokens for tokens in tree.tokens]
    ends = np.cumsum(pages)
    levels = []
    for level, (count, end) in enumerate(zip(tree.nodes, ends, strict=True)):
        # Leaves of a node are neighbours
        first = np.searchsorted(tree.path[:, level], np.arange(count))
        levels.append(tables[first, end - pages[level] : end].ravel())
    return np.concatenate(levels).astype(np.int64)


def token_buffers(workload: Workload, pages: Int64) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, KV heads, D] of these pages."""
    geometry, index = workload.case.geometry, torch.from_numpy(pages).to(workload.device)
    size = geometry.page_tokens
    shape = (len(pages) * size, geometry.kv_heads, geometry.head_dim)
    keys, values = (workload.pool.new_empty(shape) for _ in range(2))
    for half, out in enumerate((keys, values)):
        # In parts, so that no second copy of all tokens stands beside this one
        parts = torch.split(index, COPIED_PAGES), torch.split(out, COPIED_PAGES * size)
        for part, own in zip(*parts, strict=True):
            own.copy_(workload.pool[:, :, half][part].transpose(1, 2).reshape(own.shape))
    return keys, values


class FastTree:
    """Its planner and its two kernels, over a copy of the tree's nodes in its own layout.

    The planner makes new arrays at every call, and captured work knows those of the first: later
    ones, which are as large for the same tree, are copied there.
    """

    each_step = True
    replans = True
    name = "fasttree"

    def __init__(self, workload: Workload) -> None:
        import fasttree

        tree, geometry = workload.case.tree, workload.case.geometry
        if tree is None:
            raise NotApplicable("no tree of prefixes")
        if geometry.element_bytes != 2:
            raise NotApplicable("its entries have 16 bits")
        if geometry.group not in GROUPS:
            raise NotApplicable(f"groups of {geometry.group} heads, its tiles fit {GROUPS}")
        self._library, self._workload = fasttree, workload
        self._nodes = tree_nodes(tree)
        self._pointers = kv_pointers(self._nodes)
        check_index("keys", self._pointers[-1] * geometry.kv_heads * geometry.head_dim)
        self._keys, self._values = token_buffers(workload, node_pages(workload.case, tree))
        self._out = torch.empty_like(workload.q[0])
        self._arrays: list[Tensor] = []
        self._launch: tuple[Any, ...] = ()

    def plan(self) -> None:
        """Its heuristic, its index arrays and their upload."""
        geometry, library = self._workload.case.geometry, self._library
        params = library.FastTreeParams()
        params.set_values(*COSTS)
        params.set_q_tile_sizes([rows // geometry.group for rows in TILE_ROWS])
        params.set_kv_tile_sizes(list(KV_TILES))
        params.set_kv_group_num(geometry.group)
        with redirect_stdout(io.StringIO()):
            made, _ = library.fasttree_preparation(
                self._nodes,
                self._pointers,
                self._out.shape[0],
                geometry.query_heads,
                geometry.kv_heads,
                geometry.head_dim,
                list(KV_SPLITS),
                *map(list, FEW_TASKS),
                params,
            )
        # The last four: its scratch, which holds nothing between steps, and its launches
        *arrays, mid_o, mid_lse, counts, offsets = made
        if self._arrays:
            for kept, new in zip(self._arrays, arrays, strict=True):
                kept.copy_(new)
            return
        check_index("partial outputs", mid_o.numel())
        self._arrays = arrays
        # The tiles of the plan, which the planner may have changed
        self._launch = (mid_o, mid_lse, counts, offsets, params.TSQs, params.TSKs)

    def run(self) -> list[Tensor]:
        """Both kernels."""
        self._library.fasttree_decode(
            self._workload.q[0],
            self._keys,
            self._values,
            self._out,
            *self._arrays,
            *self._launch,
            self._workload.scaling,
        )
        return [self._out]


def check_index(what: str, elements: int) -> None:
    """Raises `NotApplicable` where an element's number does not fit its kernels' int32."""
    if elements > MOST_ELEMENTS:
        raise NotApplicable(f"its {what} have {elements} elements, int32 counts {MOST_ELEMENTS}")
