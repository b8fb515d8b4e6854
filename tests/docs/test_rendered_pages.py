"""Tables of docs pages are those of the raw figures; templates say what a table shows."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from bench.render import __main__ as command
from bench.render.page import (
    DOCS,
    RESULTS,
    TEMPLATES,
    Page,
    page_names,
    page_path,
    read_blocks,
    stale,
    write_blocks,
)
from bench.render.template_filters import groups, number, short, spread, table


@cache
def render_pages(name: str) -> dict[str, str]:
    return Page(name).blocks()


@pytest.mark.parametrize("name", page_names())
def test_a_page_says_what_the_result_files_say(name: str) -> None:
    text = page_path(name).read_text(encoding="utf-8")
    assert stale(text, render_pages(name)) == [], "run python -m bench.render"
    assert render_pages(name) and write_blocks(text, render_pages(name)) == text


@pytest.mark.parametrize("name", page_names())
def test_a_page_and_its_template_have_the_same_blocks(name: str) -> None:
    page, template = page_path(name), TEMPLATES / f"{name}.md"
    blocks = {path: set(read_blocks(path.read_text(encoding="utf-8"))) for path in (page, template)}
    assert blocks[page] == blocks[template] == set(render_pages(name))


def test_every_page_with_blocks_has_a_template() -> None:
    paths = [path for path in DOCS.rglob("*.md") if read_blocks(path.read_text(encoding="utf-8"))]
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in paths}
    assert names | {"README"} == set(page_names())


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The pages, to be written."""
    shutil.copy(page_path("README"), tmp_path)
    return Path(shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("pictures")))


def test_the_command_writes_what_is_old_and_nothing_else(
    docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in RESULTS.glob("http_*.json"):
        shutil.copy(path, tmp_path)
    page, folder = docs / "load.md", ["--docs", str(docs), "--results", str(tmp_path)]
    whole = page.read_text(encoding="utf-8")
    page.write_text(whole.replace("broken laws | none", "broken laws | some", 1), encoding="utf-8")
    assert command.main(["load", "--check", *folder]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{page}: overload is not up to date"]
    assert page.read_text(encoding="utf-8") != whole
    assert command.main(["performance", "--check", *folder]) == 0
    assert command.main(folder) == 0
    assert capsys.readouterr().out.splitlines() == [f"{page}: overload"]
    assert page.read_text(encoding="utf-8") == whole
    assert command.main(["--check", *folder]) == 0 and not capsys.readouterr().out


def test_a_page_without_a_template_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["nowhere"])
    assert "there is no template of page nowhere" in capsys.readouterr().err


def test_what_has_no_result_file_is_left_as_it_is(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "http_load.json").write_text((RESULTS / "http_load.json").read_text())
    assert list(Page("load", tmp_path).blocks()) == ["load"]
    before = {path: path.read_text(encoding="utf-8") for path in docs.glob("*.md")}
    assert command.main(["--docs", str(docs), "--results", str(tmp_path)]) == 0
    assert {path: path.read_text(encoding="utf-8") for path in docs.glob("*.md")} == before


def test_a_table_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- nowhere -->"):
        write_blocks("a page", {"nowhere": "a table"})


def test_a_figure_that_is_missing_from_its_file_is_an_error(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "http_load.json").read_text())
    del result["figures"]["requests_per_s"]
    (tmp_path / "http_load.json").write_text(json.dumps(result))
    with pytest.raises(Exception, match="requests_per_s"):
        Page("load", tmp_path).blocks()


def test_a_table_leaves_out_rows_without_a_figure() -> None:
    rows = "| a | b | c |\n\n| x | 1\n  | 2 |\n| y | – |  |\n| x | 1 | 2 |\n"
    assert table(rows) == "| a | b | c |\n| --- | ---: | ---: |\n" + "| x | 1 | 2 |\n" * 2
    assert table(rows, 2, once=True) == "| a | b | c |\n| --- | --- | ---: |\n| x | 1 | 2 |\n"
    assert table("| a | b |\n| x | – |") == ""
    with pytest.raises(ValueError, match="a row has 3 cells, its header 2"):
        table("| a | b |\n| x | 1 | 2 |")


def test_numbers_and_groups() -> None:
    shown = [short(value) for value in (1234.5, 98.76, 9.876, 0.01234)]
    assert shown == ["1,234", "98.8", "9.88", "0.0123"]
    assert number(0.123, ".1%") == "12.3%" and number(0.5, "g", "ρ ") == "ρ 0.5"
    assert spread([0.3, 0.1, 0.2], ".0f", 1e3) == "200 (100–300)"
    assert number(None, ".1%") == "–" and number(None, missing="-") == "-"
    rows = [{"at": {"b": 2}, "a": 1}, {"at": {"b": 1}, "a": 1}, {"at": {"b": 2}, "a": 3}]
    assert list(groups(rows, "at.b")) == [2, 1] and groups(rows, "a", "at.b")[3, 2] == rows[2:]
