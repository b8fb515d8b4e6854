"""Options that all measurements of speculation have."""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with --small and --output."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.speculation {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes: only tries the command")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="folder of the raw figures; bench/results, or build/speculation with --small",
    )
    return parser


def output_folder(options: argparse.Namespace) -> Path:
    """Where the raw figures go. Tiny sizes are no results."""
    given: Path | None = options.output
    if given is not None:
        return given
    return ROOT / ("build/speculation" if options.small else "bench/results")
