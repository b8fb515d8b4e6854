"""The texts of /learn: short, with Python that runs and source that exists."""

from __future__ import annotations

# isort: off
import tests.interpreter  # noqa: F401, before Triton is imported

# isort: on
import doctest
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tools.learn_data import data_files, source_links, source_of
from tools.learn_page import DATA, spell
from tools.learn_site import PAGE, ROOT
from tools.prose import sentences

TITLES = (
    "Naive decoding",
    "The KV cache",
    "What it costs",
    "The memory wall",
    "Tiled attention",
    "Online softmax",
    "Which kernel on which card",
    "Paging and sharing",
    "Continuous and static batching",
    "Speculative decoding",
    "Quantised and compressed caches",
)
HINT = "run python -m tools.learn_page"
MOST_WORDS = 300
LONGEST_SENTENCE = 30
VOID = {"meta", "link", "br", "img", "input"}


@dataclass
class Chapter:
    """A section of the page: its texts, headings, Python, widgets and links into the source."""

    name: str
    title: str = ""
    paragraphs: list[str] = field(default_factory=list)
    python: str = ""
    widgets: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


class ChapterReader(HTMLParser):
    """Reads the chapters, and fails at a tag that is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.chapters: list[Chapter] = []
        self.open: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert "style" not in given and not any(name.startswith("on") for name in given)
        assert tag != "script" or given.get("src"), "no inline script"
        if tag not in VOID:
            self.open.append(tag)
        if given.get("class") == "chapter":
            self.chapters.append(Chapter(str(given["id"])))
        if tag == "p" and self.chapters:
            self.chapters[-1].paragraphs.append("")
        if given.get("data-widget"):
            self.chapters[-1].widgets.append(str(given["data-widget"]))
        if given.get("data-source"):
            self.chapters[-1].sources.append(str(given["data-source"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.chapters[-1].python += data
        elif "p" in self.open and self.chapters:
            self.chapters[-1].paragraphs[-1] += data
        elif "h2" in self.open:
            self.chapters[-1].title += data


def read() -> list[Chapter]:
    reader = ChapterReader()
    reader.feed(PAGE.read_text())
    assert not reader.open
    return reader.chapters


CHAPTERS = read()
every = pytest.mark.parametrize("chapter", CHAPTERS, ids=[one.name for one in CHAPTERS])


def test_the_eleven_chapters_are_in_order() -> None:
    assert [one.title for one in CHAPTERS] == list(TITLES)
    contents = re.findall(r'<li><a href="#(\w+)">([^<]+)</a>', PAGE.read_text())
    assert contents == [(one.name, one.title) for one in CHAPTERS]


@every
def test_a_chapter_is_short(chapter: Chapter) -> None:
    assert 80 < sum(len(text.split()) for text in chapter.paragraphs) <= MOST_WORDS


@every
def test_sentences_are_short(chapter: Chapter) -> None:
    words = [len(one.split()) for text in chapter.paragraphs for one in sentences(text)]
    assert fmean(words) <= 17 and max(words) <= LONGEST_SENTENCE


@every
def test_a_chapter_has_one_widget_and_its_module(chapter: Chapter) -> None:
    assert chapter.widgets == [chapter.name]
    assert (PAGE.parent / "chapters" / f"{chapter.name}.js").is_file()


@every
def test_the_python_gives_what_is_shown(chapter: Chapter) -> None:
    test = doctest.DocTestParser().get_doctest(chapter.python, {}, chapter.name, None, None)
    assert test.examples
    told: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert result.failed == 0, "".join(told)


@every
def test_the_linked_source_exists(chapter: Chapter) -> None:
    assert chapter.sources
    for link in chapter.sources:
        assert (ROOT / link.partition(":")[0]).is_file()
        assert link.rsplit(".", 1)[-1].rpartition(":")[2] in source_of(link)


def test_a_source_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match=r"tangram/sizing/cache_size\.py.*KVSize\.weight"):
        source_of("tangram/sizing/cache_size.py:KVSize.weight")


def test_paths_named_in_the_texts_exist() -> None:
    scripts = "\n".join(path.read_text() for path in PAGE.parent.rglob("*.js"))
    named = set(re.findall(r"\b(?:tangram|bench|tests|tools)/[\w./]+\.\w+", scripts))
    assert named and not [name for name in named if not (ROOT / name).is_file()]


def same(found: Any, expected: Any) -> bool:
    """Equal, where floats may differ in their last places between machines."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-9)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[k], expected[k]) for k in expected
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def test_the_data_is_current() -> None:
    pytest.importorskip("triton", reason="the kernels' tiles need Triton, which this system lacks")
    now = {name: json.loads(spell(content)) for name, content in data_files().items()}
    kept = {path.name: json.loads(path.read_text()) for path in DATA.glob("*.json")}
    assert now.keys() == kept.keys()
    assert [name for name in now if not same(kept[name], now[name])] == [], HINT


def test_every_data_file_is_written_and_read() -> None:
    kept = {path.stem for path in DATA.glob("*.json")}
    scripts = "\n".join(path.read_text() for path in PAGE.parent.rglob("*.js"))
    lists = re.findall(r"withData\(\[([^\]]+)\]|loadData\(([^)]+)\)", scripts)
    read_names = {name for found in lists for name in re.findall(r'"(\w+)"', "".join(found))}
    assert read_names == kept


def test_the_links_are_read_from_the_page() -> None:
    assert source_links() == [link for one in CHAPTERS for link in one.sources]


def test_both_schedules_serve_the_same_requests() -> None:
    """Each request to its end; sealing a chunk that decode has filled computes it again."""
    recorded = json.loads((DATA / "schedules.json").read_text())
    tokens = [
        {
            request: sum(n for _, rows in found["steps"] for r, _, n in rows if r == request)
            for request in range(len(recorded["requests"]))
        }
        for found in recorded["schedules"].values()
    ]
    assert len(tokens) == 2 and tokens[0] == tokens[1]
    for request, (prompt, answer) in enumerate(recorded["requests"]):
        assert (tokens[0][request] - (prompt + answer - 1)) in (0, 512)


def test_the_page_is_found_beside_its_parts() -> None:
    linked = re.findall(r'(?:href|src)="page/([^"]+)"', PAGE.read_text())
    assert linked and all((PAGE.parents[1] / name).is_file() for name in linked)
    imported = {
        (path.parent / name).resolve()
        for path in PAGE.parent.rglob("*.js")
        for name in re.findall(r'from "([^"]+)"', path.read_text())
    }
    assert all(Path(name).is_file() for name in imported)


def colours(path: Path) -> dict[tuple[str, str], str]:
    """The custom properties of each theme of a stylesheet."""
    rules = re.findall(r'(:root(?:\[data-theme="dark"\])?) \{(.*?)\}', path.read_text(), re.DOTALL)
    return {
        (theme, name): value
        for theme, body in rules
        for name, value in re.findall(r"--([\w-]+): ([^;]+);", body)
    }


def test_the_colours_are_those_of_the_chat_page() -> None:
    chat, learn = colours(PAGE.parents[1] / "style.css"), colours(PAGE.parent / "learn.css")
    common = chat.keys() & learn.keys()
    assert len(common) >= 12
    assert {name: learn[name] for name in common} == {name: chat[name] for name in common}
