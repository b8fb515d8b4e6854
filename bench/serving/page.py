"""Writes the measured tables of docs/serving.md from the files of `bench.serving.compare` and of the ablation.

Engines are compared within one lease: of several series of files each case is shown from the one in which the peer did
best. (vLLM with host memory behind its pool is slower in some cases than without.)

python -m bench.serving.page [--results bench/results] [--page docs/serving.md]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kernels.family import RESULTS
from bench.kernels.page import replaced

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
# Of `tangram bench serving ablation`, by marker: decode that fills no chunk, and decode in which every row fills one.
ABLATIONS = {"ablation": "ablation_20gib.json", "filled": "ablation_decode.json"}
COMPARED = ("vllm", "tangram-1", "tangram-0.25")
PLAIN, FP8 = "tangram-0.25", "tangram-0.25-fp8"
ENGINES = (*COMPARED, FP8)
Found = dict[str, dict[str, Any]]  # by engine
# What is shown of each case: a title, the parts it is the median of, and a figure of the summary, perhaps one of its
# percentiles; less is better unless it is of a second.
ROWS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("prefill, 64 × 8,192 tokens: tokens/s", "prefill", ("run",), "prompt_tokens_per_s"),
    ("64 × (8,192 in, 512 out): s", "answers-8k", ("run",), "seconds"),
    ("64 × (16,384 in, 256 out): s", "answers-16k", ("run",), "seconds"),
    ("24 × (32,768 in, 256 out): s", "answers-32k", ("run",), "seconds"),
    ("64 × (4,096 shared + 256 own, 256 out): s", "shared", ("run",), "seconds"),
    ("24 conversations × 8,000, 8 short turns/s: TTFT p50, s", "short-turns", ("turns",), "ttft_s p50"),
    ("24 conversations × 8,000, 8 short turns/s: TTFT p90, s", "short-turns", ("turns",), "ttft_s p90"),
    ("24 conversations × 8,000, 8 short turns/s: TPOT p50, ms", "short-turns", ("turns",), "tpot_ms p50"),
    ("40 sessions × 16,384, turns 2 and 3: requests/s", "sessions-40", ("turn 2", "turn 3"), "requests_per_s"),
    ("96 sessions × 16,384, turns 2 and 3: requests/s", "sessions-96", ("turn 2", "turn 3"), "requests_per_s"),
)


def found(results: Path, kind: str = "serving") -> list[Found]:
    """The series of results of a kind, `KIND_ENGINE.json`, `KIND-2_ENGINE.json`, …: in each what engines measured."""
    names = sorted({path.name.split("_")[0] for path in results.glob(f"{kind}*_*.json")})
    series = [{engine: results / f"{name}_{engine}.json" for engine in ENGINES} for name in names]
    return [
        {engine: json.loads(path.read_text()) for engine, path in paths.items() if path.exists()} for paths in series
    ]


def written(series: Sequence[Found]) -> str:
    """The table in Markdown, a column an engine, and how each was measured."""
    engines = [name for name in COMPARED if any(name in results for results in series)]
    titles = [next(_title(results[name]) for results in series if name in results) for name in engines]
    lines, used = [["", *titles], ["---", *(["---:"] * len(engines))]], dict[int, list[str]]()
    for title, case, parts, figure in ROWS:
        having = [number for number, results in enumerate(series) if case in _cases(results)]
        if having:
            shown = max(reversed(having), key=lambda number: _peer_speed(series[number], case, parts, figure))
            results = series[shown]
            used.setdefault(shown, []).append(case)
            lines.append(
                [title, *(_cell(results.get(name), results.get("vllm"), case, parts, figure) for name in engines)]
            )
    hows = [
        _how(result, [case for case in dict.fromkeys(cases) if case in result["cases"]])
        for number, cases in used.items()
        for name, result in series[number].items()
        if name in COMPARED
    ]
    return _lined(lines) + "\n\n" + "\n".join(hows) + "\n"


def halved(series: Sequence[Found]) -> str:
    """An FP8 cache beside the other, where both were measured in one lease: what was asked of either."""
    text = []
    for results in (results for results in series if PLAIN in results and FP8 in results):
        pair = [results[name] for name in (PLAIN, FP8)]
        lines = [["", *map(_title, pair)], ["---", "---:", "---:"]]
        lines.append(["tokens that fit", *(f"{result['options']['fits_tokens']:,}" for result in pair)])
        for title, case, parts, figure in ROWS:
            if any(case in result["cases"] for result in pair):
                lines.append([title, *(_cell(result, None, case, parts, figure) for result in pair)])
        text.append(_lined(lines) + "\n\n" + "\n".join(_how(result, list(result["cases"])) for result in pair))
    return "\n\n".join(text) + "\n"


def _lined(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cases(results: Found) -> set[str]:
    """Those of the peer, whom the others are compared with; without one, anybody's."""
    with_peer = results.get("vllm")
    every = [set(result["cases"]) for result in results.values()]
    return set(with_peer["cases"]) if with_peer else set().union(*every)


def _peer_speed(results: Found, case: str, parts: Sequence[str], figure: str) -> float:
    """The peer's median, more being better; nothing where it was not measured."""
    values = _figures(results["vllm"], case, parts, figure) if "vllm" in results else []
    if not values:
        return 0.0
    middle = statistics.median(values)
    return middle if figure.endswith("per_s") else 1.0 / middle


def traced(series: Sequence[Found]) -> str:
    """A line an engine and speed: what came of a recorded trace, and how it was measured."""
    results = [result for found_in in series for result in found_in.values()]
    head = ["", "speed", "TTFT s, p50 / p90", "TPOT ms, p50", "requests/s", "in time, requests/s", "from cache"]
    lines = [head, ["---"] * 2 + ["---:"] * 5]
    for result in results:
        for part, summary in result["cases"]["trace"].items():
            if part == "given up":
                speed, _, reason = summary.removeprefix("speed ").partition(": ")
                lines.append([_behind(result), speed, reason, "–", "–", "–", "–"])
            else:
                lines.append([_behind(result), part.removeprefix("speed "), *_traced_cells(summary)])
    return _lined(lines) + "\n\n" + "\n".join(_how(result, ["trace"]) for result in results) + "\n"


def _behind(result: dict[str, Any]) -> str:
    """Who it is, and what host memory lies behind its pool."""
    options = result["options"]
    gib = options.get("kv_offload_gib") or options.get("kv_offloading_size")
    return _title(result) + (f", {gib:g} GiB of host memory" if gib else "")


def _traced_cells(summary: dict[str, Any]) -> list[str]:
    ttft, tpot = summary["ttft_s"], summary["tpot_ms"]
    limited = summary["limits"]["ttft_s"] is not None
    return [
        f"{ttft['p50']:.2f} / {ttft['p90']:.2f}", f"{tpot['p50']:.0f}", f"{summary['requests_per_s']:.2f}",
        f"{summary['goodput_per_s']:.2f}" if limited else "–", f"{summary['cached_share']:.0%}",
    ]  # fmt: skip


def parted(result: dict[str, Any]) -> str:
    """A line a rung of `tangram bench serving ablation`: where the time goes, and TTFT at each rate."""
    rates = next(iter(result["rungs"].values()))["rates"]
    head = ["", "KV held of a chunk", "tokens that fit", "prefill, ms of 1,000 tokens", "of that attention", "upkeep",
            "reclamation", "decode, ms of a step", "upkeep", "chunks sealed", "outside the model",
            *(f"TTFT s at {rate}/s, p50 / p90" for rate in rates)]  # fmt: skip
    lines = [head, ["---", *(["---:"] * (len(head) - 1))]]
    for rung in result["rungs"].values():
        prefill, decode = rung["breakdown"]["prefill"], rung["breakdown"]["decode"]
        lines.append([
            rung["title"], f"{rung['footprint']:.3f}", f"{rung['capacity_tokens']:,}",
            f"{sum(prefill['ms'].values()):.1f}", f"{prefill['ms']['attention']:.1f}", f"{prefill['upkeep']:.1%}",
            f"{prefill['reclamation']:.1%}", f"{sum(decode['ms'].values()):.2f}", f"{decode['upkeep']:.1%}",
            f"{decode['sealed_chunks']}", f"{decode['outside']:.1%}",
            *(f"{rung['rates'][rate]['ttft_s']['p50']:.2f} / {rung['rates'][rate]['ttft_s']['p90']:.2f}"
              for rate in rates),
        ])  # fmt: skip
    where = result["environment"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "triton", "transformers"))
    return (
        _lined(lines)
        + f"\n\n- `{result['command'].split(' -o ')[0]}`, commit {where['commit']}, {where['date']}, {where['gpu']}, "
        f"{versions}. {result['load']}.\n"
    )


def _title(result: dict[str, Any]) -> str:
    if result["engine"] == "vllm":
        return f"vLLM {result['environment']['vllm']}"
    options = result["options"]
    return f"ρ {options['kv_retention']}" + (", FP8 cache" if options.get("kv_cache_dtype") == "fp8" else "")


def _figures(result: dict[str, Any], case: str, parts: Sequence[str], figure: str) -> list[float]:
    measured = [part for name, part in result["cases"].get(case, {}).items() if name.startswith(tuple(parts))]
    if figure == "prompt_tokens_per_s":
        return [part["prompt_tokens"] / part["seconds"] for part in measured]
    name, _, percentile = figure.partition(" ")
    return [part[name][percentile] if percentile else part[name] for part in measured]


def _cell(
    result: dict[str, Any] | None, peer: dict[str, Any] | None, case: str, parts: Sequence[str], figure: str
) -> str:  # fmt: skip
    """The median, the span if there are several runs, and how many times as fast as the peer that is.

    Different turns are no runs of the same: they stand side by side.
    """
    values = [] if result is None else _figures(result, case, parts, figure)
    if not values:
        return "–"
    middle = statistics.median(values)
    if len(parts) > 1:
        text = " / ".join(map(_number, values))
    else:
        text = _number(middle) + (f" ({_number(min(values))}–{_number(max(values))})" if len(values) > 1 else "")
    theirs = _figures(peer, case, parts, figure) if peer is not None and peer is not result else []
    if not theirs:
        return text
    ratio = middle / statistics.median(theirs)
    return f"{text} · {ratio if figure.endswith('per_s') else 1 / ratio:.2f} ×"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _how(result: dict[str, Any], cases: Sequence[str]) -> str:
    where, options = result["environment"], result["options"]
    named = ("vllm", "torch", "triton", "transformers")
    versions = ", ".join(f"{name} {where[name]}" for name in named if name in where)
    command = result["command"].split(" -o ")[0]
    return (
        f"- {_title(result)}, {', '.join(cases)}: `{command}`, commit {where['commit']}, {where['date']}, "
        f"{where['gpu']}, {versions}; {options['fits_tokens']:,} tokens fit."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    page = replaced(options.page.read_text(), "engines", written(found(options.results)))
    page = replaced(page, "trace", traced(found(options.results, "trace")))
    page = replaced(page, "fp8", halved(found(options.results)))
    for marker, name in ABLATIONS.items():
        page = replaced(page, marker, parted(json.loads((options.results / name).read_text())))
    options.page.write_text(page)


if __name__ == "__main__":
    main()
