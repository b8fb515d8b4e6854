"""CPU engines side by side on the embedded model, with the same prompts and threads.

    make peers                  # once: the environments of vLLM and llama.cpp
    python -m bench.cpu_peers

Every system runs in a process of its own, and one computes at a time: all systems take a cell in
turns before the next cell, so that a slow minute of the machine affects all. A system that is not
installed is named and left out. The answers of the systems that compute without loss are compared
first. An 8K context with batch 8 takes some minutes a system, so it runs only by --cells 8kx8.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cpu_peers.cells import (
    LONGEST,
    MOST_REQUESTS,
    PeerCell,
    PeerRow,
    Texts,
    at_once,
    count_same,
    make_cells,
)
from bench.cpu_peers.figures import SAME, table_rows
from bench.cpu_peers.system_process import (
    BUILD,
    MissingPeerError,
    PeerSystem,
    SystemProcess,
    start_systems,
)
from bench.cpu_peers.systems import REFERENCE, make_systems
from bench.stress.server import surroundings
from tangram.calibrate.texts import make_texts
from tangram.progress import show_progress

RESULTS = Path(__file__).parents[1] / "results"
FILE = "cpu_peers.json"
SMALL_SCALE, SMALL_OUTPUT_TOKENS = 16, 12
# The cells and repeats of each size.
SIZES = {
    "whole": (("0x1", "0x8", "2kx1", "chat", "shared", "2kx8", "8kx1"), 3),
    "quick": (("0x1", "0x8", "2kx1", "chat", "shared"), 1),
    "small": (("0x1", "0x8", "2kx1", "chat", "shared", "2kx8", "8kx1", "8kx8"), 1),
}
SAMPLE = "A sum: 12 + 30 = 42.\n\n    def größe(x): return x\n"
# Of two cores, for the estimate alone.
PREFILL_TOKENS_PER_S, STEPS_PER_S, START_S = 450, 15, 15
# Values of each repeat, by row, system and figure.
Rows = dict[str, dict[str, dict[str, list[float]]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, measure, keep the raw figures, print the table."""
    options = _parse(arguments)
    cells = make_cells(*((SMALL_SCALE, SMALL_OUTPUT_TOKENS) if options.size == "small" else ()))
    chosen = {name: cells[name] for name in options.cells}
    kv_tokens = max(cell.kv_tokens for cell in chosen.values())
    systems = make_systems(options.threads, kv_tokens)
    if unknown := set(options.systems or ()) - set(systems):
        raise SystemExit(f"--systems: {min(unknown)} is not known, there are {', '.join(systems)}")
    systems = {name: systems[name] for name in options.systems or systems}
    minutes = expect_seconds(list(chosen.values()), len(systems), options.repeats) / 60
    print(
        f"{len(systems)} systems, {len(chosen)} cells, {options.repeats} repeats: some "
        f"{minutes:.0f} minutes on two cores"
    )
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.cpu_peers", *sys.argv[1:]]),
        "size": options.size,
        "repeats": options.repeats,
        "environment": surroundings() | {"threads": options.threads, "cores": os.cpu_count()},
    }
    with ExitStack() as stack:
        running, content["skipped"] = start_systems(systems, options.threads, stack)
        content["systems"] = {
            name: {"title": systems[name].title, "versions": process.versions}
            for name, process in running.items()
        }
        texts = read_texts(running)
        content["differences"] = check_answers(systems, running, texts)
        content["rows"] = {}
        turns = [cell for cell in chosen.values() for _ in range(options.repeats)]
        for cell in show_progress(turns, "Measuring"):
            rows, failed = run_cell(running, cell, texts)
            content["skipped"] |= failed
            add_figures(content["rows"], rows)
            keep(content, options.output)
    Console().print(make_table(content))


def expect_seconds(cells: Sequence[PeerCell], systems: int, repeats: int) -> float:
    """A rough time of the whole run on two cores."""
    each = sum(
        cell.prefill_tokens / PREFILL_TOKENS_PER_S + cell.steps / STEPS_PER_S for cell in cells
    )
    return systems * (START_S + repeats * each)


def read_texts(running: Mapping[str, SystemProcess]) -> Texts:
    """The texts as token ids. All tokenizers must agree on a sample of them."""
    pieces = make_texts(MOST_REQUESTS, min_characters=8 * LONGEST)
    samples = [SAMPLE, *(text[:2000] for text in pieces)]
    encoded = {
        name: [process.encode(text) for text in samples] for name, process in running.items()
    }
    first, *others = encoded
    for name in others:
        if encoded[name] != encoded[first]:
            raise SystemExit(f"the tokenizers of {first} and {name} differ: nothing is measured")
    return [running[first].encode(text)[:LONGEST] for text in pieces]


def check_answers(
    systems: Mapping[str, PeerSystem], running: Mapping[str, SystemProcess], texts: Texts
) -> dict[str, int]:
    """Compare answers of the systems that compute without loss, and warm all systems up.

    Returns the number of equal first tokens of each that differs from the first of them. These are
    printed, too.
    """
    rows: dict[str, PeerRow] = {}
    for name, process in running.items():
        for cell in (at_once(2, 700, 16), at_once(1, 700, 16)):
            (rows[name],) = cell.run(texts, process.answer)
    exact = [name for name in (REFERENCE, *running) if name in running and systems[name].exact]
    differences = {}
    for name in exact[1:]:
        same = count_same(rows[name], rows[exact[0]])
        if same is not None and same < len(rows[name].answers[0].token_ids):
            differences[name] = same
            print(f"{name} and {exact[0]} agree in {same} tokens and differ in the next")
    return differences


def run_cell(
    running: dict[str, SystemProcess], cell: PeerCell, texts: Texts
) -> tuple[dict[str, list[PeerRow]], dict[str, str]]:
    """The rows of each system, and why a system failed; that one runs no more."""
    rows: dict[str, list[PeerRow]] = {}
    failed: dict[str, str] = {}
    for name, process in list(running.items()):
        try:
            rows[name] = list(cell.run(texts, process.answer))
        except MissingPeerError as error:
            failed[name] = str(error)
            del running[name]
            print(f"left out from here on: {error}", flush=True)
    return rows, failed


def add_figures(kept: Rows, rows: Mapping[str, Sequence[PeerRow]]) -> None:
    """Add the figures of `rows`, by system, to those of earlier repeats."""
    for name, of_system in rows.items():
        for number, row in enumerate(of_system):
            figures = row.figures()
            if REFERENCE in rows and name != REFERENCE:
                same = count_same(row, rows[REFERENCE][number])
                figures |= {} if same is None else {SAME: same}
            lists = kept.setdefault(row.title, {}).setdefault(name, {})
            for figure, value in figures.items():
                lists.setdefault(figure, []).append(value)


def keep(content: Mapping[str, Any], path: Path) -> None:
    """Write the raw figures; after every turn, so that a later failure loses nothing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_table(content: Mapping[str, Any]) -> Table:
    """The table of the terminal."""
    header, *lines = table_rows(content)
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="short cells, once"
    )
    sizes.add_argument(
        "--small",
        dest="size",
        action="store_const",
        const="small",
        help=f"contexts / {SMALL_SCALE}, once, to try the command; figures go to build/",
    )
    parser.set_defaults(size="whole")
    names = make_cells()
    parser.add_argument("--cells", nargs="+", choices=names, help="these only")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="these only")
    parser.add_argument("--repeats", type=int, help="of each cell")
    parser.add_argument("--threads", type=int, default=2, help="of each system")
    parser.add_argument("-o", "--output", type=Path, help="the file of raw figures")
    options = parser.parse_args(arguments)
    cells, repeats = SIZES[options.size]
    options.cells, options.repeats = options.cells or cells, options.repeats or repeats
    if options.repeats < 1 or options.threads < 1:
        parser.error(
            f"--repeats is {options.repeats} and --threads is {options.threads}: both must be at "
            "least 1"
        )
    options.output = options.output or (BUILD if options.size == "small" else RESULTS) / FILE
    return options


if __name__ == "__main__":
    main()
