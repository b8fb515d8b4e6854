"""The files of the web page."""

from __future__ import annotations

from pathlib import Path

from tangram.serve.static_files import StaticFolder

FILES = StaticFolder(
    Path(__file__).parent / "static", {"/": "index.html", "/learn": "learn/index.html"}, "/page/"
)
