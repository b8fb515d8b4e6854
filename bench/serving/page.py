"""Writes the measured table of docs/serving.md from the files of `bench.serving.compare`.

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
ENGINES = ("vllm", "tangram-1", "tangram-0.25")
# What is shown of each case: a title, the parts it is the median of, and a figure of the summary; more is better unless
# it is seconds.
ROWS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("prefill, 64 × 8,192 tokens: tokens/s", "prefill", ("run",), "prompt_tokens_per_s"),
    ("64 × (8,192 in, 512 out): s", "answers-8k", ("run",), "seconds"),
    ("64 × (16,384 in, 256 out): s", "answers-16k", ("run",), "seconds"),
    ("24 × (32,768 in, 256 out): s", "answers-32k", ("run",), "seconds"),
    ("64 × (4,096 shared + 256 own, 256 out): s", "shared", ("run",), "seconds"),
    ("40 sessions × 16,384, turns 2 and 3: requests/s", "sessions-40", ("turn 2", "turn 3"), "requests_per_s"),
    ("96 sessions × 16,384, turns 2 and 3: requests/s", "sessions-96", ("turn 2", "turn 3"), "requests_per_s"),
)


def found(results: Path) -> dict[str, dict[str, Any]]:
    """The results of each engine that was measured."""
    paths = {name: results / f"serving_{name}.json" for name in ENGINES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def written(results: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown, a column an engine, and how each was measured."""
    peer = next((result for result in results.values() if result["engine"] == "vllm"), None)
    header = ["", *(_title(result) for result in results.values())]
    lines = [header, ["---", *(["---:"] * len(results))]]
    for title, case, parts, figure in ROWS:
        if any(case in result["cases"] for result in results.values()):
            lines.append([title, *(_cell(result, peer, case, parts, figure) for result in results.values())])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(map(_how, results.values())) + "\n"


def _title(result: dict[str, Any]) -> str:
    if result["engine"] == "vllm":
        return f"vLLM {result['environment']['vllm']}"
    return f"ρ {result['options']['kv_retention']}"


def _figures(result: dict[str, Any], case: str, parts: Sequence[str], figure: str) -> list[float]:
    measured = [part for name, part in result["cases"].get(case, {}).items() if name.startswith(tuple(parts))]
    if figure == "prompt_tokens_per_s":
        return [part["prompt_tokens"] / part["seconds"] for part in measured]
    return [part[figure] for part in measured]


def _cell(
    result: dict[str, Any], peer: dict[str, Any] | None, case: str, parts: Sequence[str], figure: str
) -> str:  # fmt: skip
    """The median, the span if there are several, and how many times as fast as the peer that is."""
    values = _figures(result, case, parts, figure)
    if not values:
        return "–"
    middle = statistics.median(values)
    text = _number(middle) + (f" ({_number(min(values))}–{_number(max(values))})" if len(values) > 1 else "")
    theirs = _figures(peer, case, parts, figure) if peer is not None and peer is not result else []
    if not theirs:
        return text
    ratio = middle / statistics.median(theirs)
    return f"{text} · {1 / ratio if figure == 'seconds' else ratio:.2f} ×"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _how(result: dict[str, Any]) -> str:
    where, options = result["environment"], result["options"]
    named = ("vllm", "torch", "triton", "transformers")
    versions = ", ".join(f"{name} {where[name]}" for name in named if name in where)
    command = result["command"].split(" -o ")[0]
    return (
        f"- {_title(result)}: `{command}`, commit {where['commit']}, {where['date']}, {where['gpu']}, {versions}; "
        f"{options['fits_tokens']:,} tokens fit."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    options.page.write_text(replaced(options.page.read_text(), "engines", written(found(options.results))))


if __name__ == "__main__":
    main()
