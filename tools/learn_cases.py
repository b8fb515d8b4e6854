"""Recorded cases of the formulas of /learn: what the Python functions give for some arguments.

`cases()` computes them anew. tests/edge/web/test_learn_math.py compares them with the record and
with what `tangram/web/static/learn/math.js` gives, function by function.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.roofline import Ceiling, StepModel
from tangram.cache.keys import ChunkKeys
from tangram.cache.layout import Layout, adjacent_groups
from tangram.cache.manager import CacheManager
from tangram.cache.retention import Retention
from tangram.compress.groups import allot_pages, cluster
from tangram.compress.profile import Profile
from tangram.errors import ConfigError
from tangram.plan.aot import plan_aot
from tangram.plan.cost import CostModel
from tangram.plan.forest import build_forest
from tangram.plan.form import DecodeRows
from tangram.plan.packing import plan_packing
from tangram.plan.workqueue import Grain
from tangram.sizing.cache_size import fit, kv_size
from tangram.sizing.kv_shape import KVShape, read_shape
from tangram.sizing.weight_size import Weights
from tangram.speculate.pace import expected_tokens
from tangram.types import Geometry
from tangram_lab.baselines.packing_rules import ALL_PACKING_RULES
from tangram_lab.naive import count_cached_positions, count_naive_positions
from tools.learn_data import CARDS, PROFILES, shipped_profile

Case = tuple[list[Any], Any]
LOOSE = {"softmaxPart": 1e-5, "mergeParts": 1e-5, "onlineSoftmax": 1e-5}  # float32 there


def cases() -> dict[str, Any]:
    """For each function of math.js its cases, and the relative error that they may have."""
    return {
        name: {
            "tolerance": LOOSE.get(name, 1e-12),
            "cases": [{"arguments": given, "result": result} for given, result in found],
        }
        for name, found in ((name, list(make())) for name, make in MAKERS.items())
    }


def shape_object(shape: KVShape) -> dict[str, Any]:
    """A `KVShape` as the page has it."""
    return {
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "latent": shape.latent,
        "windows": list(shape.windows),
    }


def _naive_positions() -> Iterator[Case]:
    for given in ((1, 100), (1, 4096), (1, 1), (20, 7), (512, 256)):
        yield list(given), count_naive_positions(*given)


def _cached_positions() -> Iterator[Case]:
    for given in ((1, 100), (1, 4096), (20, 7)):
        yield list(given), count_cached_positions(*given)


SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", {}),
    ("llama-3.1-8b", {"retention": 0.25}),
    ("llama-3.1-8b", {"dtype": "fp8", "retention": 0.5, "context_tokens": 100_001}),
    ("llama-3.1-405b", {"heads_per_page": 3, "retention": 0.3}),
    ("qwen3-4b", {"page_tokens": 32, "chunk_tokens": 2048, "retention": 0.1}),
    ("deepseek-v3", {"dtype": "fp8"}),
    ("gemma-3-12b", {"retention": 0.5}),
    ("gemma-3-12b", {"context_tokens": 500}),
    ("gpt-oss-20b", {"chunk_tokens": 64, "context_tokens": 4099}),
    ("smollm2", {"dtype": "fp32", "context_tokens": 7}),
    ("smollm2", {"context_tokens": 512}),
)
DEFAULTS: dict[str, Any] = {
    "context_tokens": 32_000,
    "dtype": "bf16",
    "retention": 1.0,
    "page_tokens": 16,
    "heads_per_page": 4,
    "chunk_tokens": 512,
}


def _sizes() -> Iterator[Case]:
    for model, changed in SIZES:
        size = kv_size(model, **(DEFAULTS | changed))
        names = ("bytes_per_token", "uncompressed_bytes", "compressed_bytes", "fp8_bytes")
        names += ("page_bytes", "pages", "most_pages", "context_tokens")
        result = {name: getattr(size, name) for name in names}
        yield [shape_object(size.shape), DEFAULTS | changed], result


def _elements() -> Iterator[Case]:
    for model in ("llama-3.1-8b", "deepseek-v3"):
        shape = read_shape(model)
        yield [shape_object(shape)], shape.layer_elements


def _fits() -> Iterator[Case]:
    for (model, changed), memory_gib in product(SIZES[:7], (10.0, 80.0, 141.0)):
        size = kv_size(model, **(DEFAULTS | changed))
        found = fit(size, Weights(8_030_261_248, "bfloat16", "config.json"), memory_gib)
        given = {
            name: getattr(size, name)
            for name in ("context_tokens", "uncompressed_bytes", "page_bytes", "most_pages")
        }
        result = {name: getattr(found, name) for name in ("cache_gib", "sequences", "tokens")}
        yield [given, found.weights.bytes, memory_gib], result


def _layout(tokens: int, retention: float = 0.5, heads: int = 12) -> Layout:
    geometry = Geometry(4, heads // 4, heads // 4, 64, 1, tokens, (None,) * 4)
    groups = adjacent_groups(range(4), heads // 4, 2)
    pages = [max(1, int(retention * 4))] * len(groups)
    return Layout.build(
        geometry,
        chunk_tokens=64,
        page_tokens=16,
        heads_per_page=2,
        max_tokens=tokens,
        groups=groups,
        sealed_pages=pages,
    )


def layout_object(layout: Layout) -> dict[str, int]:
    """The page counts of a `Layout` as the page has them."""
    return {
        "chunk_tokens": layout.chunk_tokens,
        "page_tokens": layout.page_tokens,
        "groups": len(layout.groups),
        "full_span_pages": layout.full_span_pages,
        "window_span_pages": layout.window_span_pages,
        "window_chunks": layout.window_chunks,
    }


def _layouts() -> Iterator[Case]:
    for model, changed in SIZES:
        size = kv_size(model, **(DEFAULTS | changed))
        if size._layout is not None:
            yield [shape_object(size.shape), DEFAULTS | changed], layout_object(size._layout)


def _hold_pages() -> Iterator[Case]:
    layout = _layout(1024)
    for sealed, raw in ((0, 1), (0, 64), (3, 17), (7, 0)):
        yield [layout_object(layout), sealed, raw], layout.count_held_pages(sealed, raw)


def _most_pages() -> Iterator[Case]:
    layout = _layout(1024)
    for tokens in (1, 63, 64, 65, 128, 700):
        yield [layout_object(layout), tokens], layout.most_pages(tokens)
    for model, tokens in product(("gemma-3-12b", "gpt-oss-20b"), (512, 2048, 2049, 8192)):
        windows = kv_size(model, tokens, retention=0.1)._layout
        if windows is not None:
            yield [layout_object(windows), tokens], windows.most_pages(tokens)


def _sharing() -> Iterator[Case]:
    """Conversations that a real `CacheManager` admits one after the other."""
    retention = Retention(0.5, _layout(1024), "profile")
    layout = retention.layout
    for count, shared, own in ((3, 150, 40), (5, 64, 1), (4, 40, 10), (2, 300, 200), (3, 60, 30)):
        manager = CacheManager(
            [retention], total_pages=10_000, max_sequences=count, prefix_caching=True
        )
        found = [
            _fill(
                manager,
                retention,
                np.array([*range(shared), *(10_000 * (n + 1) + i for i in range(own))]),
            )
            for n in range(count)
        ]
        cached = [sequence.cached_tokens for sequence in found]
        used = manager.ledger.total - manager.ledger.free
        separate = sum(sequence.held_pages for sequence in found)
        shared_pages = (separate - used) // (count - 1)
        result = {
            "separate_pages": separate,
            "shared_pages": shared_pages,
            "pages": used,
            "cached_tokens": cached[-1],
        }
        yield [layout_object(layout), count, shared, own], result


def _fill(manager: CacheManager, retention: Retention, tokens: Any) -> Any:
    """Admit a sequence and compute all of its tokens, chunk by chunk."""
    cache = manager.admit(ChunkKeys(retention, ""), tokens, len(tokens))
    if cache is None:
        raise RuntimeError("the pool of the cases is too small")
    chunk = cache.layout.chunk_tokens
    while cache.computed_tokens < len(tokens):
        manager.extend(cache, len(tokens))
        left = len(tokens) - cache.computed_tokens
        if cache.raw_tokens + left >= chunk:
            manager.seal(cache)
        else:
            manager.grow(cache, left)
        manager.commit(cache, tokens)
    return cache


def _token_us() -> Iterator[Case]:
    for cost, rows in product(
        (CostModel(), CostModel(tile_rows=1, element_bytes=1)), (1, 4, 64, 200)
    ):
        yield [asdict(cost), rows], float(cost.token_us(np.asarray(rows)))


def _crossovers() -> Iterator[Case]:
    """The first number of rows at which `CostModel.token_us` is more than the time of reading."""
    for card, element_bytes in product(CARDS, (1, 2)):
        cost = CostModel(
            bytes_per_us=card["bytes_per_s"] / 1e6,
            flops_per_us=card["flops_per_s"] / 1e6,
            element_bytes=element_bytes,
            tile_rows=1,
        )
        rows = np.arange(1, 2000)
        us = cost.token_us(rows)
        yield [card, element_bytes], int(rows[us > us[0]][0])


def _ceilings() -> Iterator[Case]:
    for card, intensity in product(CARDS[:3], (0.5, 10.0, 206.0, 5000.0)):
        limit = Ceiling(card["flops_per_s"], card["bytes_per_s"])
        yield [card, intensity], limit.attainable(intensity)


MODELS = ("llama-3.1-8b", "qwen3-4b")


def _decode_steps() -> Iterator[Case]:
    for name, batch, context in product(MODELS, (1, 64), (0, 8192)):
        model = StepModel.of(name)
        flops, read = model.decode(batch, context)
        yield [asdict(model), batch, context], {"flops": flops, "bytes": read}


def _prefill_steps() -> Iterator[Case]:
    for name, tokens in product(MODELS, (1, 8192)):
        model = StepModel.of(name)
        flops, read = model.prefill(tokens)
        yield [asdict(model), tokens], {"flops": flops, "bytes": read}


def _step_seconds() -> Iterator[Case]:
    for card, (flops, read) in product(CARDS[:3], ((1e12, 1e9), (1e9, 1e11))):
        limit = Ceiling(card["flops_per_s"], card["bytes_per_s"])
        yield [card, {"flops": flops, "bytes": read}], limit.seconds(flops, read)


def _attention_inputs() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(0, 2, size).round(2) for size in ((4,), (9, 4), (9, 4)))


def _parts() -> Iterator[Case]:
    q, k, v = _attention_inputs()
    for begin, end in ((0, 9), (2, 3), (4, 9)):
        part = _part(q, k[begin:end], v[begin:end])
        yield [q.tolist(), k[begin:end].tolist(), v[begin:end].tolist(), 0.5], part


def _part(q: Any, k: Any, v: Any) -> dict[str, Any]:
    import torch

    from tangram.kernels.reference import softmax_part

    out, lse = softmax_part(*(torch.tensor(x) for x in (q[None], k, v)), None, 0.5, None)
    return {"out": out[0].tolist(), "lse": float(lse[0])}


def _merge() -> Iterator[Case]:
    import torch

    from tangram.kernels.reference import merge_parts

    q, k, v = _attention_inputs()
    for bounds in ((0, 9), (0, 4, 9), (0, 1, 2, 6, 9)):
        spans = pairwise(bounds)
        parts = [_part(q, k[begin:end], v[begin:end]) for begin, end in spans]
        tensors = [(torch.tensor(part["out"]), torch.tensor(part["lse"])) for part in parts]
        out, lse = merge_parts(tensors)
        yield [parts], {"out": out.tolist(), "lse": float(lse)}


def _online() -> Iterator[Case]:
    """Only the result: the steps are the page's own. A query of 1 makes keys the scores."""
    rng = np.random.default_rng(1)
    scores, values = (rng.normal(0, 3, 8).round(2) for _ in range(2))
    for tile in (1, 3, 8):
        part = _part(np.ones(1), 2 * scores[:, None], values[:, None])
        yield [scores.tolist(), values.tolist(), tile], {"result": part["out"][0]}


def _tiles() -> Iterator[Case]:
    for tokens, queries, entries in ((64, 64, 64), (1000, 64, 32), (8192, 64, 64), (5, 2, 3)):
        sees = np.tril(np.ones((tokens, tokens), bool))
        cut = np.add.reduceat(sees, np.arange(0, tokens, queries), 0)
        seen = np.add.reduceat(cut, np.arange(0, tokens, entries), 1) > 0
        yield [tokens, queries, entries], {"all": seen.size, "computed": int(seen.sum())}


def _card(card: dict[str, Any]) -> Any:
    from tangram.kernels.triton.card import INTERPRETED

    return replace(
        INTERPRETED, capability=tuple(card["capability"]), shared_bytes=card["shared_bytes"]
    )


def _features() -> Iterator[Case]:
    from tangram.kernels.triton.card import LEAST

    for card in CARDS:
        found = _card(card)
        names = ("chains", "copies_tiles", "converts_fp8", "multiplies_shared")
        served = {"served": found.capability >= LEAST}
        yield [card], served | {name: getattr(found, name) for name in names}


def _operands() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    tiles = (
        {"queries": 8, "entries": 64, "warps": 4, "stages": 2},
        {"queries": 64, "entries": 64, "warps": 4, "stages": 3},
        {"queries": 64, "entries": 32, "warps": 4, "stages": 2},
    )
    for tile, dim, size, widens in product(tiles, (64, 128, 256), (2, 4), (False, True)):
        yield tile, {"head_dim": dim, "element_bytes": size, "hops": 2, "widens": widens}


def _shared_bytes() -> Iterator[Case]:
    from tangram.kernels.triton.tiling import Operands, Tile, count_shared_bytes

    for card, (tile, operands) in product(CARDS[:4], _operands()):
        found = count_shared_bytes(Tile(**tile), Operands(**operands), _card(card))
        yield [tile, operands, card], found


def _fit_tiles() -> Iterator[Case]:
    from tangram.kernels.triton.tiling import Operands, Tile, fit_tile

    for card, (tile, operands) in product(CARDS, _operands()):
        try:
            fitted = asdict(fit_tile(Tile(**tile), Operands(**operands), _card(card), 16))
            found = {name: fitted[name] for name in tile}
        except ConfigError:
            found = None
        yield [tile, operands, card, 16], found


def _prefill_kernels() -> Iterator[Case]:
    import torch

    from tangram.kernels.triton import fused_causal, gathered

    for card, dim in product(CARDS, (64, 80, 128, 256)):
        pool: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 2, 16, dim))
        found = _card(card)
        past = "gathered" if gathered.serves(pool, found) else "paged"
        first = "dense" if fused_causal.serves(pool, found) else "paged"
        yield [card, dim], {"past": past, "first": first}


def _accept() -> Iterator[Case]:
    for share, drafted in product((0.0, 0.3, 0.8, 0.99), (0, 1, 4, 8)):
        yield [share, drafted], float(expected_tokens(share, drafted)[-1])


def _speed_ups() -> Iterator[Case]:
    for share, drafted, draft, check in (
        (0.8, 4, 0.1, 0.0),
        (0.5, 1, 0.0, 0.05),
        (0.2, 8, 0.1, 0.1),
    ):
        result = float(expected_tokens(share, drafted)[-1] / (1 + drafted * (draft + check)))
        yield [share, drafted, draft, check], result


def _best_drafts() -> Iterator[Case]:
    for share, draft, check in (
        (0.8, 0.1, 0.0),
        (0.2, 0.3, 0.1),
        (0.95, 0.0, 0.02),
        (0.0, 0.0, 0.0),
    ):
        gains = expected_tokens(share, 16) / (1 + np.arange(17) * (draft + check))
        yield [share, draft, check, 16], int(gains.argmax())


def _profile_object(profile: Profile) -> dict[str, Any]:
    names = ("alpha", "sink_tokens", "window_tokens", "chunk_tokens", "page_tokens")
    names += ("heads_per_page", "grouping", "layers", "mean", "std")
    content = profile.model_dump(mode="json", include=set(names))
    return {name: content[name] for name in names}


def _small_profile() -> dict[str, Any]:
    content = _profile_object(shipped_profile(PROFILES[0]))
    rows = {name: content[name][:6] for name in ("layers", "mean", "std")}
    return content | rows


def _budgets() -> Iterator[Case]:
    content = _small_profile()
    for alpha in (0.0, 2.0):
        mean, std = np.array(content["mean"]), np.array(content["std"])
        yield [content["mean"], content["std"], alpha], np.minimum(1, mean + alpha * std).tolist()


def _clusters() -> Iterator[Case]:
    content = _small_profile()
    for size, across in product((1, 4), ("model", "layer")):
        groups = cluster(content["mean"], content["layers"], size, across)
        result = [[list(head) for head in group] for group in groups]
        yield [content["mean"], content["layers"], size, across], result


def _allotments() -> Iterator[Case]:
    rng = np.random.default_rng(2)
    for retention in (0.25, 0.3, 0.5, 0.9):
        budgets = np.sort(rng.random(12).round(3))[::-1].tolist()
        options = {
            "chunk_tokens": 256,
            "page_tokens": 16,
            "heads_per_page": 2,
            "retention": retention,
            "min_pages": 1,
        }
        yield [budgets, 23, options], allot_pages(budgets, [2] * 11 + [1], **options)
    options = options | {"retention": 0.19, "heads_per_page": 1}
    equal_turns = [0.25, 0.75]  # 1.5 / 0.25 = 4.5 / 0.75
    yield [equal_turns, 2, options], allot_pages(equal_turns, [1, 1], **options)


def _affordable() -> Iterator[Case]:
    for retention in (0.1, 0.25, 0.3, 0.7):
        options = {"retention": retention, "chunk_tokens": 512, "page_tokens": 16}
        options["heads_per_page"] = 4
        pages = allot_pages([0.5] * 9, [4] * 9, **options, min_pages=1)
        yield [36, options], sum(pages)


def _derive() -> Iterator[Case]:
    """The shipped profiles at their own ρ, which must give their own pages, and at others."""
    for name in PROFILES:
        profile = shipped_profile(name)
        for retention in (profile.kv_retention, 0.35, 0.8):
            found = profile.model_copy(update={"kv_retention": retention}).with_pages(
                profile.page_tokens, profile.heads_per_page
            )
            result = found.model_dump(mode="json", include={"groups", "sealed_pages"})
            result["realised_retention"] = found.realised_retention
            yield [_profile_object(profile), retention], result


def _smallest() -> Iterator[Case]:
    """The bound that the refusal of a smaller ρ names."""
    for name in PROFILES:
        profile = shipped_profile(name)
        try:
            profile.model_copy(update={"kv_retention": 1e-3}).with_pages(16, 4)
        except ConfigError as error:
            bound = str(error).split("the smallest possible is ")[1].split(":")[0]
            yield [_profile_object(profile)], float(bound)


def _balance() -> Iterator[Case]:
    for entries, workers, tasks, least in (
        ([800, 300, 100], 2, 4, 1),
        ([512, 512, 512, 512], 3, 4, 128),
        ([9000, 40, 700, 3000, 10, 80, 2200, 512], 8, 2, 128),
        ([100] * 12, 2, 4, 1),
    ):
        zeros = np.zeros((1, 1, len(entries)), np.int64)
        budget = np.array(entries, np.float64).reshape(zeros.shape)
        rows = DecodeRows.of(zeros, zeros, zeros, budget, (None,), 16)
        plan = plan_aot(rows, workers, tasks_per_worker=tasks, tile_tokens=16, min_tokens=least)
        counts = np.bincount(plan.tasks["head"], minlength=len(entries))
        yield [entries, workers, tasks, least], counts.tolist()


def _tasks() -> Iterator[Case]:
    for entries, parts, workers in (([800, 300, 100], [5, 2, 1], 2), ([90, 50, 20], [1, 1, 1], 3)):
        free = [0.0] * workers
        sizes = sorted((e / p for e, p in zip(entries, parts, strict=True) for _ in range(p)))
        for size in reversed(sizes):
            heapq.heapreplace(free, free[0] + size)
        yield [entries, parts, workers], {"longest": max(free)}


def _fit_parts() -> Iterator[Case]:
    from tangram.plan.split import fit_parts

    for sizes, target, wanted in (
        ([800.0, 300.0, 100.0], 150.0, 8),
        ([7.0] * 9, 2.0, 4),
        ([5.0, 3.0], 2.0, 1),
        ([5.0, 7.0, 3.0, 5.0, 1.0], 2.0, 4),
    ):
        found = fit_parts(np.array(sizes).reshape(1, 1, -1), np.full((1, 1, 1), target), wanted)
        yield [sizes, target, wanted], found.ravel().tolist()


Tree = dict[str, Any]
TREES: tuple[Tree, ...] = (
    {"chunks": 2, "tails": [476, 176]},
    {"chunks": 1, "tails": [30, 40], "children": [{"chunks": 3, "tails": [10, 20, 30]}]},
    {
        "chunks": 0,
        "children": [
            {
                "chunks": 4,
                "children": [{"chunks": 1, "tails": [5] * 40}, {"chunks": 2, "tails": [9]}],
            },
            {"chunks": 2, "tails": [100]},
            {"chunks": 1, "children": [{"chunks": 1, "tails": [64] * 3}]},
        ],
    },
    {"chunks": 1, "tails": [16], "children": [{"chunks": 1, "tails": [8, 8], "children": []}] * 3},
    {
        "chunks": 2,
        "tails": [60],
        "children": [
            {"chunks": 2, "tails": [139, 42], "children": [{"chunks": 2, "tails": [109, 194, 174]}]}
        ],
    },
    {"chunks": 2, "children": [{"chunks": 9}, {"chunks": 1, "tails": [5, 6]}, {"chunks": 3}]},
    {
        "chunks": 1,
        "tails": [4],
        "children": [{"chunks": 2, "children": [{"chunks": 8}, {"chunks": 1, "tails": [3]}]}],
    },
)
KEPT, GROUP, MOST_ROWS = 128, 4, 16


def count_packed_entries(tree: Tree, cost: CostModel, rule: str) -> int:
    """The entries of one head that the tasks of a plan read."""
    paths: list[tuple[list[int], int]] = []
    _walk(tree, [], iter(range(1, 1 << 20)), paths)
    width = max(len(path) for path, _ in paths)
    units = np.array([path + [0] * (width - len(path)) for path, _ in paths])
    count = np.array([len(path) for path, _ in paths])
    forest = build_forest(units.reshape(len(paths), width), count, count)
    lengths = np.array([len(path) * KEPT + tail for path, tail in paths], np.int32)
    shape = (len(paths), 1, 1)
    place = np.zeros(shape, np.int64)
    index = np.arange(len(paths)).reshape(shape)
    rows = DecodeRows.of(place, place, index, lengths.reshape(shape).astype(float), (None,), 16)
    plan = plan_packing(
        rows,
        lengths,
        forest,
        np.array([[KEPT]]),
        Grain(cost.workers),
        group=GROUP,
        cost=cost,
        rule=ALL_PACKING_RULES[rule],
    )
    begin, end = plan.spans(lengths)
    return int((end - begin).sum())


def _walk(node: Tree, path: list[int], names: Iterator[int], paths: list[Any]) -> None:
    path = path + [next(names) for _ in range(node["chunks"])]
    paths.extend((path, tail) for tail in node.get("tails", []))
    for child in node.get("children", []):
        _walk(child, path, names, paths)


def _grow(rng: np.random.Generator, depth: int) -> Tree:
    """A random tree, in which whether a run pays depends on those above it."""
    tails = rng.integers(0, 200, rng.integers(0, 4)).tolist()
    children = [_grow(rng, depth - 1) for _ in range(rng.integers(1, 4))] if depth else []
    return {
        "chunks": int(rng.integers(0, 3)),
        "tails": tails if children else [*tails, 7],
        "children": children,
    }


COSTS = (
    CostModel(),
    CostModel(task_us=40.0, partial_bytes_per_us=2e5),
    CostModel(task_us=8.0, partial_bytes_per_us=1e5),
    CostModel(task_us=29.0, partial_bytes_per_us=2.44e6),
)


def _pack() -> Iterator[Case]:
    rng = np.random.default_rng(3)
    grown = tuple(_grow(rng, 1 + number % 4) for number in range(12))
    for tree, cost, rule in product(TREES + grown, COSTS, ("measured", "naive", "off")):
        given = [tree, KEPT, asdict(cost), GROUP, MOST_ROWS, rule]
        yield given, count_packed_entries(tree, cost, rule)


def _simulate() -> Iterator[Case]:
    """Steps of the real scheduler, without a model: each yields one token of every row."""
    from tools.learn_schedule import count_steps

    for answers, most in product(([5, 1, 3, 3, 8, 2], [4, 4, 4], [1] * 7, [30, 2, 2, 2]), (2, 3)):
        for scheduling in ("continuous", "static"):
            yield [answers, most, scheduling], count_steps(answers, most, scheduling)


MAKERS = {
    "countNaivePositions": _naive_positions,
    "countCachedPositions": _cached_positions,
    "layerElements": _elements,
    "kvSize": _sizes,
    "layoutOf": _layouts,
    "fit": _fits,
    "countHeldPages": _hold_pages,
    "mostPages": _most_pages,
    "sharePages": _sharing,
    "tokenUs": _token_us,
    "crossoverBatch": _crossovers,
    "attainable": _ceilings,
    "decodeStep": _decode_steps,
    "prefillStep": _prefill_steps,
    "stepSeconds": _step_seconds,
    "softmaxPart": _parts,
    "mergeParts": _merge,
    "onlineSoftmax": _online,
    "countTiles": _tiles,
    "featuresOf": _features,
    "countSharedBytes": _shared_bytes,
    "fitTile": _fit_tiles,
    "prefillKernels": _prefill_kernels,
    "expectedTokens": _accept,
    "speedUp": _speed_ups,
    "bestDrafts": _best_drafts,
    "budgetsOf": _budgets,
    "clusterHeads": _clusters,
    "affordablePages": _affordable,
    "allotPages": _allotments,
    "deriveProfile": _derive,
    "smallestRetention": _smallest,
    "fitParts": _fit_parts,
    "balanceHeads": _balance,
    "runTasks": _tasks,
    "packedEntries": _pack,
    "simulateSteps": _simulate,
}
