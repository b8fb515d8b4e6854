"""Writes the tables of docs pages from the raw figures under bench/results.

    python -m bench.render [PAGE...] [--check]

A page is named by its template, bench/render/templates/PAGE.md, and stands at docs/PAGE.md;
README.md stands beside docs.
A block without a result file is left as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.render.page import DOCS, RESULTS, Page, page_names, page_path, stale, write_blocks


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the pages; prints the blocks that changed."""
    known = page_names()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"all of: {', '.join(known)}")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a page is not up to date",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the raw figures")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.pages if name not in known]:
        parser.error(f"there is no template of page {unknown[0]}: pages are {', '.join(known)}")
    old = 0
    for name in options.pages or known:
        path = page_path(name, options.docs)
        blocks, text = Page(name, options.results).blocks(), path.read_text(encoding="utf-8")
        for block in stale(text, blocks):
            print(f"{path}: {block}{' is not up to date' if options.check else ''}")
            old += 1
        if not options.check:
            path.write_text(write_blocks(text, blocks), encoding="utf-8")
    return 1 if options.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
