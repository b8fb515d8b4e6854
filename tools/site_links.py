"""Hooks of MkDocs: add pages from outside docs/ and /learn, and adapt links and scripts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from tools.learn_site import LINKS, site_files

ROOT = Path(__file__).parents[1]
# Pages of the site that are files of the tree's root.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"(!\[[^\]]*\]\()docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root, and the files of /learn."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for place, path in site_files().items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`markdown` with links to pages of the site; other files are named by their paths."""
    folder = "" if page.file.src_uri in PAGES.values() else "docs"
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(_in_site(folder), text) for text in parts[::2]]
    return _PICTURE.sub(r"\1", "".join(parts)) if not folder else "".join(parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """`output`, which loads Mermaid from the site if it has a picture for it.

    The theme would load it from another host.
    """
    if 'class="mermaid"' not in output:
        return output
    source = get_relative_url("vendor/mermaid/mermaid.min.js", page.url)
    return output.replace("</head>", f'<script src="{source}"></script></head>', 1)


def _in_site(folder: str) -> Callable[[re.Match[str]], str]:
    """A function that adapts a link of a file in `folder` to the site."""

    def replace(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or target.startswith("#"):
            return link[0]
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(folder, path))
        site = (PAGES | LINKS).get(place) or (
            place.removeprefix("docs/") if place.startswith("docs/") else None
        )
        if site is not None:
            return f"[{text}]({site}{anchor and '#' + anchor})"
        if not (ROOT / place).exists():
            return link[0]  # MkDocs reports it as broken
        return text if text.strip("`") == place else f"{text}: `{place}`"

    return replace
