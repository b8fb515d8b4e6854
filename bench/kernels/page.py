"""Writes the measured tables of docs/performance.md, and draws its pictures, from the files under bench/results.

    python -m bench.kernels.page [--results bench/results] [--page docs/performance.md]

A table stands between `<!-- NAME -->` and `<!-- end NAME -->`; what has no result file is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from bench.kernels.family import RESULTS
from bench.kernels.page_tables import TABLES, Result

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page; says which tables it wrote."""
    from bench.kernels import plots  # the tables need no Matplotlib

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    text = options.page.read_text()
    for name, result in found(options.results).items():
        text = replaced(text, name, written(name, result))
        print(name)
    options.page.write_text(text)
    plots.main(["--results", str(options.results), "--pictures", str(options.page.parent / "pictures")])


def found(results: Path) -> dict[str, Result]:
    """The result files that a table is made of, by name."""
    paths = {name: results / f"kernels_{name}.json" for name in TABLES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def replaced(text: str, name: str, table: str) -> str:
    """The page with one table exchanged. Raises `ValueError` if the page has no place for it."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no place for {name}: put <!-- {name} --> and <!-- end {name} --> there")
    return pattern.sub(lambda match: f"{match[1]}{table}{match[2]}", text)


def written(name: str, result: Result) -> str:
    """A table in Markdown, and the line that says how it was measured."""
    header, *rest = TABLES[name](result)
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rest]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    where = result["environment"]
    versions = ", ".join(
        f"{package} {where[package]}" for package in ("torch", "triton", "flashinfer-python") if package in where
    )
    machine = where.get("gpu", where["cpu"])
    return f"{table}\n\n`{result['command']}` · {machine} · {versions} · {where['date']}, commit {where['commit']}\n"


if __name__ == "__main__":
    main()
