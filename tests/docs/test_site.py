"""The pages build as a site, each has its place there, and no link leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.render.page import read_blocks
from tools.learn_site import site_files

ROOT = Path(__file__).parents[2]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ended = build(ROOT / "mkdocs.yml", folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in site.glob("*.html")}


def test_every_page_is_built(site: Path) -> None:
    expected = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert expected | {"index", "contributing", "changelog"} <= set(pages(site))


def test_learn_is_there_with_all_that_it_loads(site: Path) -> None:
    files = site_files()
    assert len(files) > 30
    for place, path in files.items():
        assert (site / place).read_bytes() == path.read_bytes(), place


def test_every_picture_is_there(site: Path) -> None:
    pictures = {
        source
        for text in pages(site).values()
        for source in re.findall(r'<img[^>]* src="([^"]+)"', text)
    }
    assert len(pictures) > 5
    assert not [source for source in pictures if not (site / source).is_file()]


def test_no_link_leaves_the_site_for_a_file_of_the_tree(site: Path) -> None:
    targets = {
        target for text in pages(site).values() for target in re.findall(r'href="([^"]+)"', text)
    }
    assert not [
        target for target in targets if target.startswith("..") or target.endswith((".md", ".json"))
    ]
    assert "<code>bench/results/busy_laptop.json</code>" in pages(site)["cpu"]


class Loads(HTMLParser):
    """Where a page loads its parts from."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.sources.append(given["href"] or "")
        elif tag != "a" and "src" in given:
            self.sources.append(given["src"] or "")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    """The theme loads Mermaid from another host unless a page has it already."""
    for name, text in pages(site).items():
        sources = Loads(text).sources
        assert sources and not [one for one in sources if "//" in one], name
        assert ("vendor/mermaid/mermaid.min.js" in sources) == ('class="mermaid"' in text), name
    assert 'class="mermaid"' in pages(site)["structure"]


@pytest.mark.parametrize("sign", ["\n- ", "\n* ", "\n1. ", "\n|"])
def test_no_list_or_table_stays_text(site: Path, sign: str) -> None:
    """On the site, unlike elsewhere, a list begins after an empty line."""
    texts = [
        (name, text)
        for name, page in pages(site).items()
        for text in re.findall(r"<p>(.*?)</p>", page, re.DOTALL)
    ]
    assert not [(name, text[:80]) for name, text in texts if sign in text]


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "one.md").write_text("[two](two.md)\n")
    config = re.sub(
        r"^nav:.*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    config = re.sub(r"^(hooks|docs_dir|site_dir):.*\n", "", config, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(config + "nav: [one.md]\n")
    ended = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert ended.returncode and "two.md" in ended.stderr


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    for rendered in read_blocks(text).values():
        text = text.replace(rendered, "")
    assert len(text.split()) <= 700
