"""Writes the measured tables of docs/load.md, and draws its picture, from the files under bench/results.

python -m bench.hammer.page [--results bench/results] [--page docs/load.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.page import replaced

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "load.md"
Result = dict[str, Any]
# The seconds of a whole run, by kind.
WHOLE_S = {"fuzz": 300, "load": 60, "overload": 120, "soak": 1200}
QUIET_PERCENT = 10.0


def found(results: Path) -> dict[str, Result]:
    """The result files that there are, by kind."""
    paths = {kind: results / f"http_{kind}.json" for kind in WHOLE_S}
    return {kind: json.loads(path.read_text()) for kind, path in paths.items() if path.exists()}


def written(kind: str, result: Result) -> str:
    """A table in Markdown, and how it was measured."""
    lines = [("", ""), ("---", "---:"), *ROWS[kind](result)]
    return "\n".join(f"| {name} | {value} |" for name, value in lines) + f"\n\n{_how(kind, result)}\n"


def _how(kind: str, result: Result) -> str:
    where, seconds = result["environment"], result["options"]["seconds"]
    named = ("python", "torch", "transformers", "schemathesis", "guidellm")
    versions = ", ".join(f"{name} {where[name]}" for name in named if name in where)
    short = f" **A short run**, {seconds:.0f} s of {WHOLE_S[kind]}." if seconds < WHOLE_S[kind] else ""
    busy = where["busy_before_percent"]
    shared = f" **Others used the machine**: it was {busy:.0f} % busy before." if busy > QUIET_PERCENT else ""
    threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''} of {where['cpu']}"
    return f"`{result['command']}` · {threads} · {versions} · {where['date']}, commit {where['commit']}.{short}{shared}"


def _fuzz(result: Result) -> list[tuple[str, str]]:
    rows = []
    for name, answers in result["answers"].items():
        shown = ", ".join(f"{status}: {count:,}" for status, count in answers.items())
        rows.append((f"answers, {name}, by status", shown))
    for name, heap in result["heap_mb"].items():
        rows.append(
            (f"heap in use MB, {name}, after half the time / at the end", " / ".join(f"{mb:.1f}" for mb in heap))
        )
    return rows


def _load(result: Result) -> list[tuple[str, str]]:
    options, figures = result["options"], result["figures"]
    shape = f"{options['turns']} turns of {options['prompt_tokens']} in, {options['output_tokens']} out"
    pages = result["pages_afterwards"]
    return [
        ("conversations", f"{options['streams']} at a time, {shape}"),
        ("requests answered / failed / cut at the end", _slashed(figures, "answered", "failed", "cut_at_the_end")),
        ("requests/s, generated tokens/s", f"{figures['requests_per_s']:.2f}, {figures['output_tokens_per_s']:.1f}"),
        ("time to first token ms, p50 / p90 / p99", _percentiles(figures["ttft_ms"], ".0f")),
        ("time between tokens ms, p50 / p90 / p99", _percentiles(figures["inter_token_ms"], ".0f")),
        ("pages held afterwards", f"{pages['held']} of {pages['total']:,}"),
    ]


def _soak(result: Result) -> list[tuple[str, str]]:
    outcomes = result["outcomes"]
    kinds = [
        sum(count for name, count in outcomes.items() if name.startswith(kind))
        for kind in ("answered", "hung up", "lost")
    ]
    capacity, offered = result["capacity_turns_per_s"], result["offered_turns_per_s"]
    held = f"{result['most_pages_held']:,} / {result['afterwards']['held']} of {result['afterwards']['total']:,}"
    return [
        ("capacity, then offered: turns/s", f"{capacity:.2f}, {offered:.2f}"),
        ("turns answered / hung up on / lost", " / ".join(f"{count:,}" for count in kinds)),
        ("asked again alone / another text", _slashed(result, "asked_again", "asked_again_and_changed")),
        ("time to first token s, p50 / p90 / p99", _percentiles(result["ttft_s"], ".2f")),
        ("most running / waiting", _slashed(result, "most_running", "most_waiting")),
        ("pages held, at most / afterwards", held),
        *_grown("heap in use", result["heap_mb"]),
        *_grown("resident memory", result["rss_mb"]),
        ("broken laws", "none" if not result["broken"] else "; ".join(result["broken"])),
    ]


def _grown(name: str, memory: Result) -> list[tuple[str, str]]:
    least, slope = (memory["first_mb"], memory["last_mb"]), (memory["mb_per_hour"], memory["standard_error"])
    return [
        (f"{name} MB, least in the first third / in the last of nine stretches", "{:,.1f} / {:,.1f}".format(*least)),
        (f"{name}, slope through the nine", "{:.0f} ± {:.0f} MB/hour".format(*slope)),
    ]


def _overload(result: Result) -> list[tuple[str, str]]:
    options, few, many = result["options"], result["few"], result["many"]
    after = result["afterwards"]
    return [
        ("people who ask without a pause", f"{options['places']}, then {options['people']}"),
        ("places, places in the queue", f"{options['places']}, {options['queue']}"),
        ("answered, refused (429)", f"{few['answered']}, {few['refused']}; then {many['answered']}, {many['refused']}"),
        *(
            (
                f"{name} ms, p50 / p90 / p99",
                f"{_percentiles(_ms(few[key]), '.0f')}; then {_percentiles(_ms(many[key]), '.0f')}",
            )
            for name, key in (("time between tokens", "gap_s"), ("time to first token", "ttft_s"))
        ),
        ("pages held afterwards", f"{after['held']} of {after['total']:,}"),
        ("broken laws", "none" if not result["broken"] else "; ".join(result["broken"])),
    ]


def _ms(seconds: Result) -> Result:
    return {name: value * 1e3 for name, value in seconds.items()}


def _slashed(values: Result, *names: str) -> str:
    return " / ".join(f"{values[name]:,}" for name in names)


def _percentiles(values: Result, form: str) -> str:
    return " / ".join(format(values[name], form) for name in ("p50", "p90", "p99"))


ROWS: dict[str, Callable[[Result], list[tuple[str, str]]]] = {
    "fuzz": _fuzz, "load": _load, "overload": _overload, "soak": _soak,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page and draw its picture; says what it wrote."""
    from bench.hammer import plot  # the tables need no Matplotlib

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    text, results = options.page.read_text(), found(options.results)
    for kind, result in results.items():
        text = replaced(text, kind, written(kind, result))
        print(kind)
    options.page.write_text(text)
    if "soak" in results:
        plot.draw(results["soak"], options.page.parent / "pictures" / "http_soak.png")


if __name__ == "__main__":
    main()
