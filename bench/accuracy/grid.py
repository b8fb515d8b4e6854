"""The comparisons of docs/accuracy.md: a `tangram eval` for each part and scorer, in parallel.

Options after `--` go to every `tangram eval`. Parts come in the order given, in each the slowest
scorer first. Results go to FOLDER/PART.SCORER.json, of slow scorers to one file for each ρ. A file
is extended after every cell. The same command continues an interrupted run, and skips what the
files have. Beside each file is a log of its output. Exits with 1 if a process failed.

Processes that share a GPU take turns on it unless NVIDIA's multi-process service runs
(`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tangram.compress.scorers import default_scope

EMBEDDED = "smollm2"
SLOW = ("kvzip",)  # a second pass over every chunk: one process for each ρ and chunk size
SCORERS = ("kvzip", "keydiff", "fastkvzip", "expected_attention", "snapkv", "tova", "streaming_llm")
ALL_RATIOS, TWO_RATIOS = "--kv-retention 0.7,0.5,0.3,0.25", "--kv-retention 0.5,0.3"
CONTEXT = "--samples 52 --context-tokens 4096"
# Every part has the same prompts, whose contexts end with the largest chunk, 4,096 tokens.
ASKED = f"--suites ruler,multiturn {CONTEXT} --align-tokens 4096"
# Several needles among a few repeated lines, and in prose, which no scorer can take for noise.
HIDDEN = (
    "--suites multiturn/needles,ruler/niah_multikey_1,ruler/niah_multivalue,ruler/niah_multiquery "
    f"{CONTEXT} " + (f"--align-tokens 4096 {TWO_RATIOS}")
)
PARTS: Mapping[str, str] = {
    "base": f"{ASKED} {ALL_RATIOS} --methods static,uniform",
    "full": f"{ASKED} --methods full",
    "needles": f"{HIDDEN} --scope model,layer --methods full,uniform,static",
    # Equal shares of the whole context at once: the baseline of publications on competing heads.
    "needles-at-once": f"{HIDDEN} --methods uniform --chunk-tokens 4096",
    "alphas": f"{ASKED} {ALL_RATIOS} --methods static --alphas 1,2",
    "fidelity": f"--suites fidelity {CONTEXT} {TWO_RATIOS} --methods full,uniform,static",
    "chunks": f"{ASKED} {TWO_RATIOS} --methods uniform,static --chunk-tokens 256,1024,2048",
    # In the scope that is not the default
    "scopes": f"{ASKED} {TWO_RATIOS} --methods static",
    "raw-end": (
        f"--suites ruler,multiturn {CONTEXT} {TWO_RATIOS} --methods full,uniform,static --no-align"
    ),
    "window-0": f"{ASKED} {TWO_RATIOS} --methods static --window-tokens 0",
    "window-32": f"{ASKED} {TWO_RATIOS} --methods static --window-tokens 32",
    "window-64": f"{ASKED} {TWO_RATIOS} --methods static --window-tokens 64",
    "sinks-0": f"{ASKED} {TWO_RATIOS} --methods static --sink-tokens 0",
}
LOCOMO = (
    f"--suites locomo --context-tokens 4096 {TWO_RATIOS} --methods full,uniform,static --locomo"
)


@dataclass(frozen=True)
class GridRun:
    """One `tangram eval`: the name of its file, and its options."""

    name: str
    options: tuple[str, ...]


def tasks(
    scorers: Sequence[str], parts: Sequence[str], gate: Path | None, locomo: Path | None
) -> Iterator[GridRun]:
    """The tasks by part, in their order, and then by scorer; `full` has none."""
    for part in parts:
        for scorer in scorers[:1] if part == "full" else scorers:
            options = [*shlex.split(PARTS[part]), *_scoring(part, scorer, gate)]
            for own in (
                _apart(options)
                if scorer in SLOW and part != "full"
                else [GridRun("", tuple(options))]
            ):
                yield GridRun(f"{part}.{scorer}{own.name}", own.options)
    for scorer in scorers if locomo is not None else ():
        yield GridRun(
            f"locomo.{scorer}",
            (*shlex.split(LOCOMO), str(locomo), *_scoring("locomo", scorer, gate)),
        )


def _apart(options: Sequence[str]) -> Iterator[GridRun]:
    """A task for each combination of ρ and chunk size, which is in its name."""
    places = [
        at + 1 for at, word in enumerate(options) if word in ("--kv-retention", "--chunk-tokens")
    ]
    for values in product(*(options[place].split(",") for place in places)):
        own = list(options)
        for place, value in zip(places, values, strict=True):
            own[place] = value
        yield GridRun("".join(f".{value}" for value in values), tuple(own))


def _scoring(part: str, scorer: str, gate: Path | None) -> list[str]:
    if part == "full":
        return []
    gates = ["--gate", str(gate)] if gate and scorer == "fastkvzip" else []
    scopes = (
        ["--scope", "model" if default_scope(scorer) == "layer" else "layer"]
        if part == "scopes"
        else []
    )
    return ["--scorer", scorer, *gates, *scopes]


def measure(task: GridRun, options: argparse.Namespace) -> int:
    """Its exit code."""
    command = [
        sys.executable,
        "-m",
        "tangram",
        "eval",
        options.model,
        *task.options,
        *options.extra,
    ]
    with (options.folder / f"{task.name}.log").open("a", encoding="utf-8") as log:
        print(shlex.join(command[2:]), file=log, flush=True)
        code = subprocess.call(
            [*command, "-o", str(options.folder / f"{task.name}.json")], stdout=log, stderr=log
        )
    print(
        f"{task.name}: {'done' if code == 0 else f'exit code {code}, see {log.name}'}", flush=True
    )
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument(
        "--scorers", help="comma-separated; all, fastkvzip only where there is a gate"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument(
        "--gate", type=Path, help=f"a gate file, for fastkvzip; one of {EMBEDDED} ships"
    )
    parser.add_argument("--locomo", type=Path, help="file or folder of LoCoMo; adds its questions")
    parser.add_argument("--at-once", type=int, default=1, help="processes")
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    gated = options.gate is not None or options.model == EMBEDDED
    known = [scorer for scorer in SCORERS if scorer != "fastkvzip" or gated]
    scorers, parts = (
        options.scorers.split(",") if options.scorers else known,
        options.parts.split(","),
    )
    if "fastkvzip" in scorers and not gated:
        parser.error(
            f"scorer fastkvzip needs --gate for {options.model}: train one with `tangram calibrate "
            "--train-gate`"
        )
    if unknown := [*(set(scorers) - set(known)), *(set(parts) - set(PARTS))]:
        parser.error(
            f"{unknown[0]!r} is not known: scorers are {', '.join(known)}, parts {', '.join(PARTS)}"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    options.extra = given[cut + 1 :]
    with ThreadPoolExecutor(options.at_once) as pool:
        codes = list(
            pool.map(
                lambda task: measure(task, options),
                tasks(scorers, parts, options.gate, options.locomo),
            )
        )
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
