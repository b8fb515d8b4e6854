"""A page's template: blocks of Jinja between the same marks as on the page, and shared macros.

A block stands between `<!-- NAME -->` and `<!-- end NAME -->`. All blocks share the text outside of
them. A template can use:

- `result(NAME)`: the figures of bench/results/NAME.json.
- `results`: that folder.
- `papers`: what the papers say that Tangram follows (bench/papers.json).
- The statistics of `SUBJECTS`, by subject.
- The filters of bench/render/template_filters.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from bench.accuracy import figures as accuracy
from bench.accuracy import kvpress_pairs as control_pairs
from bench.cpu_peers import figures as cpu_peers
from bench.kernels import summary as kernels
from bench.render.template_filters import FILTERS
from bench.serving import series as serving
from bench.serving import timeline
from bench.speculation import figures as speculation
from tangram_lab.calibration import calibration_report as calibration

RESULTS = Path(__file__).parents[1] / "results"
DOCS = Path(__file__).parents[2] / "docs"
TEMPLATES = Path(__file__).parent / "templates"
PAPERS = Path(__file__).parents[1] / "papers.json"
SUBJECTS = {
    "accuracy": accuracy,
    "calibration": calibration,
    "control_pairs": control_pairs,
    "cpu_peers": cpu_peers,
    "kernels": kernels,
    "serving": serving,
    "speculation": speculation,
    "timeline": timeline,
}
_BLOCK = re.compile(
    r"(?P<begin><!-- (?P<name>\S[^>\n]*?) -->\n)(?P<text>.*?)(?P<end><!-- end (?P=name) -->)",
    re.DOTALL,
)


class Page:
    """The blocks of one page; `results` is the folder of their figures."""

    def __init__(self, name: str, results: Path = RESULTS) -> None:
        self._template = TEMPLATES / f"{name}.md"
        self._source = self._template.read_text(encoding="utf-8")
        self._results = results
        self._environment = Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            undefined=StrictUndefined,
        )
        self._environment.filters |= FILTERS
        self._environment.globals |= {
            **SUBJECTS,
            "papers": json.loads(PAPERS.read_text(encoding="utf-8")),
            "results": results,
            "result": cache(self._result),
        }

    def blocks(self) -> dict[str, str]:
        """Every block whose result files exist, by name, in Markdown."""
        rendered = {}
        for name, text in read_blocks(self._source).items():
            try:
                rendered[name] = _normalise_spacing(
                    self._environment.from_string(text).render(self.shared)
                )
            except FileNotFoundError as missing:
                if not Path(missing.filename).is_relative_to(self._results):
                    raise
            except Exception as error:
                error.add_note(f"in block {name} of {self._template}")
                raise
        return rendered

    @cached_property
    def shared(self) -> Mapping[str, Any]:
        """Macros and names outside of the blocks."""
        module = self._environment.from_string(_BLOCK.sub("", self._source)).module
        return {name: value for name, value in vars(module).items() if not name.startswith("_")}

    def _result(self, name: str) -> Any:
        return json.loads((self._results / f"{name}.json").read_text(encoding="utf-8"))


def page_names() -> list[str]:
    """The pages that have a template."""
    paths = [path.relative_to(TEMPLATES) for path in TEMPLATES.rglob("*.md")]
    return sorted(path.with_suffix("").as_posix() for path in paths)


def page_path(name: str, docs: Path = DOCS) -> Path:
    """Where a page stands: README beside `docs`, the others in it."""
    return docs.parent / "README.md" if name == "README" else docs / f"{name}.md"


def read_blocks(text: str) -> dict[str, str]:
    """The text of each block, by name."""
    return {match["name"]: match["text"] for match in _BLOCK.finditer(text)}


def stale(text: str, blocks: Mapping[str, str]) -> list[str]:
    """The names of `blocks` that differ on the page. Raises `ValueError` as `write_blocks`."""
    known = read_blocks(text)
    for name in blocks:
        if name not in known:
            marks = f"<!-- {name} --> and <!-- end {name} -->"
            raise ValueError(f"the page has no place for {name}: put {marks} there")
    return [name for name, block in blocks.items() if known[name] != block]


def write_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """The page with `blocks` replaced. Raises `ValueError` if it has no place for one."""
    if not stale(text, blocks):
        return text

    def exchange(match: re.Match[str]) -> str:
        return match["begin"] + blocks.get(match["name"], match["text"]) + match["end"]

    return _BLOCK.sub(exchange, text)


def _normalise_spacing(text: str) -> str:
    """At most one empty line between paragraphs, and none before the end mark."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"^\n+", "\n", text)).rstrip("\n") + "\n"
