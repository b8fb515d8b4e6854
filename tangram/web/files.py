"""The page's files."""

from __future__ import annotations

from pathlib import Path

from tangram.serve.static_files import StaticPages

FILES = StaticPages(
    Path(__file__).parent / "static", {"/": "index.html", "/learn": "learn/index.html"}, "/page/"
)
