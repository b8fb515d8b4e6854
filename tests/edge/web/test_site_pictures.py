"""A browser draws the site's diagrams with what the site itself has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs.test_site import ROOT, build


def test_diagrams_are_drawn_without_another_host(browser: Any, tmp_path: Path) -> None:
    ended = build(ROOT / "mkdocs.yml", tmp_path)
    assert ended.returncode == 0, ended.stderr
    pages = [path for path in tmp_path.glob("*.html") if 'class="mermaid"' in path.read_text()]
    assert pages
    for path in pages:
        page, asked = browser.new_page(), []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(path.as_uri())
        for number in range(path.read_text().count('class="mermaid"')):
            page.locator(".mermaid").nth(number).scroll_into_view_if_needed()
            page.locator("div.mermaid").nth(number).wait_for(timeout=60_000)
        assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        page.close()
