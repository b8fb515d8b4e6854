"""The tables of docs/performance.md, a maker for each result file: lines of cells, the first of them the header."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.kernels.summary import BEST, Row, by_group, device_us, names, ratios, wall_us
from tangram.plan.policy import FLASHINFER

DECODE, CASCADE = "flashinfer decode", "flashinfer cascade fa2"
EVEN = " even"
RAGGED = {"uniform": "uniform", "work queue": "workqueue", "re-planned": "aot+replan", "FlashInfer": BEST}
Result = dict[str, Any]
Rows = list[list[str]]


def _times(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "-"


def dense(result: Result) -> Rows:
    rows = [["heads, batch × context", "KV MB", "floor µs", "ours µs", "FlashInfer µs", "× FlashInfer", "of copy"]]
    for row in result["rows"]:
        times = device_us(row)
        ours = times.get(names([row], ours=True)[0])
        rows.append(
            [row["case"], f"{row['unique_bytes'] / 1e6:.0f}", _times(row["byte_floor_us"]), _times(ours),
             _times(times.get(DECODE)), _ratio(times.get(DECODE), ours), _ratio(row["byte_floor_us"], ours)]
        )  # fmt: skip
    return rows


def pat(result: Result) -> Rows:
    """A line a tree, then geometric means; three columns a head setting."""
    rows = {(row["labels"]["config"], row["labels"]["heads"]): row for row in result["rows"]}
    settings, ours = list(dict.fromkeys(heads for _, heads in rows)), names(result["rows"], ours=True)[0]
    lines = [["tree", *(f"{setting}: {what}" for setting in settings for what in ("µs", "/ floor", "× FlashInfer"))]]
    for tree in dict.fromkeys(tree for tree, _ in rows):
        cells = [cell for setting in settings for cell in _tree_cells(rows.get((tree, setting)), ours)]
        lines.append([f"`{tree}`", *cells])
    for peer in (DECODE, CASCADE):
        means = [""] * (3 * len(settings))
        for number, setting in enumerate(settings):
            shared = [row for (_, heads), row in rows.items() if heads == setting and row["labels"]["shared"]]
            if values := ratios(shared, ours, peer):
                means[3 * number + 2] = f"**{statistics.geometric_mean(values):.2f}**"
        lines.append([f"× {peer}, shared trees", *means])
    for other in names(result["rows"], ours=True)[1:]:
        means = [""] * (3 * len(settings))
        for number, setting in enumerate(settings):
            shared = [row for (_, heads), row in rows.items() if heads == setting and row["labels"]["shared"]]
            means[3 * number + 1] = f"{statistics.geometric_mean(ratios(shared, ours, other)):.2f}"
        lines.append([f"`{other}` / `{ours}`, shared trees", *means])
    return lines


def _tree_cells(row: Row | None, ours: str) -> list[str]:
    if row is None:
        return ["-"] * 3
    times, floor = device_us(row), max(row["byte_floor_us"], row["arithmetic_floor_us"])
    mine = times.get(ours)
    return [_times(mine), _ratio(mine, floor), _ratio(times.get(DECODE), mine)]


def _mean(values: Sequence[float | None]) -> float | None:
    """None if any is missing."""
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if len(there) == len(values) else None


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ± {statistics.pstdev(values):.2f}" if values else "-"


def persistent(result: Result) -> Rows:
    """A line a trace family: means over its seeds."""
    ours, *others = names(result["rows"], ours=True)
    header = ["family (seeds)", "ours µs", "FlashInfer µs", "× device", "ours wall µs", "× wall"]
    lines = [[*header, *(f"`{other}` / ours" for other in others)]]
    for family, rows in by_group(result["rows"]).items():
        mean, theirs = (_mean([device_us(row).get(name) for row in rows]) for name in (ours, BEST))
        wall = _mean([wall_us(row).get(ours) for row in rows])
        spread = [_spread(ratios(rows, ours, BEST, wall=clock)) for clock in (False, True)]
        slower = [f"{statistics.geometric_mean(ratios(rows, ours, other)):.2f}" for other in others]
        cells = [_times(mean), _times(theirs), spread[0], _times(wall), spread[1], *slower]
        lines.append([f"{family} ({len(rows)})", *cells])
    return lines


def ragged(result: Result) -> Rows:
    """A line a profile and context: geometric means over the batches, and the worst of AOT."""
    rows = {row["case"]: row for row in result["rows"]}
    lines = [["profile, tokens (batches)", "AOT / even", "worst", *(f"{name} / AOT" for name in RAGGED)]]
    for (profile, context), cases in _by_context(list(rows.values())).items():
        twins = {name: device_us(rows[name + EVEN])["aot"] for name in cases if name + EVEN in rows}
        balance = [device_us(rows[name])["aot"] / even for name, even in twins.items()]
        means = [_mean_ratio([rows[name] for name in cases], "aot", other) for other in RAGGED.values()]
        batches = ", ".join(str(rows[name]["labels"]["batch"]) for name in cases)
        title = f"{profile} {context // 1024}K ({batches})"
        lines.append([title, f"{statistics.geometric_mean(balance):.2f}", f"{max(balance):.2f}", *means])
    return lines


def _by_context(rows: Sequence[Row]) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        if not row["case"].endswith(EVEN):
            labels = row["labels"]
            found.setdefault((labels["profile"], labels["context_tokens"]), []).append(row["case"])
    return found


def _mean_ratio(rows: list[Row], variant: str, peer: str) -> str:
    values = ratios(rows, variant, peer)
    return f"{statistics.geometric_mean(values):.2f}" if values else "-"


def ablations(result: Result) -> Rows:
    """A line a variant of the whole, then one a page shape; a column a case."""
    cases = list(dict.fromkeys(row["labels"]["case"] for row in result["rows"]))
    lines = [["µs", *(f"`{case}`" for case in cases)]]
    whole, *variants = names(result["rows"], ours=True)
    shapes = dict.fromkeys((row["labels"]["page_tokens"], row["labels"]["heads_per_page"]) for row in result["rows"])
    first, *others = shapes
    times = {
        ((row["labels"]["page_tokens"], row["labels"]["heads_per_page"]), row["labels"]["case"]): device_us(row)
        for row in result["rows"]
    }
    for name, shape, text in (
        (whole, first, f"`{whole}`, pages of {first[0]} tokens × {first[1]} heads"),
        *((variant, first, f"`{variant.removeprefix(whole)}`") for variant in variants),
        *((whole, shape, f"pages of {shape[0]} × {shape[1]}") for shape in others),
    ):
        lines.append([text, *(_times(times.get((shape, case), {}).get(name)) for case in cases)])
    return lines


def sealing(result: Result) -> Rows:
    parts = ("attention", "products", "scores", "seal")
    header = ["past tokens", "attention µs", "products µs", "scores µs", "seal µs", "sealing / prefill"]
    return [
        header,
        *(
            [f"{row['past_tokens']:,}", *(_times(row[part][0]) for part in parts), f"{row['share']:.1%}"]
            for row in result["rows"]
        ),
    ]


def tables(result: Result) -> Rows:
    timed = ("seal_ms", "decode_within_page_ms", "decode_into_page_ms", "close_ms")
    header = ["Hp", "groups", "seal a chunk, ms", "decode step, ms", "into new pages, ms", "close a row, ms"]
    return [
        header,
        *(
            [str(row["heads_per_page"]), str(row["groups"]), *(f"{statistics.median(row[name]):.3f}" for name in timed)]
            for row in result["rows"]
        ),
    ]


def fragmentation(result: Result) -> Rows:
    header = ["profile", "grouped", "Hp 1", "Hp 2", "Hp 4", "Hp 8"]
    return [
        header,
        *(
            [row["profile"], row["grouping"], *(f"{value:.2f}" for value in row["reclaimed"].values())]
            for row in result["rows"]
        ),
    ]


def host_cost(result: Result) -> Rows:
    header = ["planner", "tasks", "ms", "quartiles"]
    return [
        header,
        *(
            [
                row["what"],
                str(row.get("tasks", "")),
                f"{row['ms']:.2f}",
                "–".join(f"{q:.2f}" for q in row["ms_quartiles"]),
            ]
            for row in result["rows"]
        ),
    ]


def policy(result: Result) -> Rows:
    """Geometric means over each family's held-out cases."""
    single, families = result["best_single"], dict.fromkeys(case["family"] for case in result["verdicts"])
    lines = [["family (cases)", f"× `{single}`", "worst", "× FlashInfer, device", "wall", "chosen"]]
    for family in families:
        cases = [case for case in result["verdicts"] if case["family"] == family]
        steps = [case["step_us"][single] / case["step_us"][case["chosen"]] for case in cases]
        timed = [case for case in cases if FLASHINFER in case["device_us"]]
        against = [
            _spread([case[clock][FLASHINFER] / case[clock][case["chosen"]] for case in timed])
            for clock in ("device_us", "wall_us")
        ]
        chosen = ", ".join(f"`{name}`" for name in dict.fromkeys(case["chosen"] for case in cases))
        mean = f"{statistics.geometric_mean(steps):.2f}"
        lines.append([f"{family} ({len(cases)})", mean, f"{min(steps):.2f}", *against, chosen])
    return lines


TABLES: dict[str, Callable[[Result], Rows]] = {
    "dense": dense, "pat": pat, "persistent": persistent, "ragged": ragged, "policy": policy,
    "sealing": sealing, "ablations": ablations,
    "host_cost": host_cost, "tables": tables, "fragmentation": fragmentation,
}  # fmt: skip
