"""The files of the web page, alone or as the page of a server of several engines."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from tangram.serve.extension import Extension
from tangram.serve.transport.static_files import StaticFolder

FILES = StaticFolder(
    Path(__file__).parent / "static", {"/": "index.html", "/learn": "learn/index.html"}, "/page/"
)


class ChatWeb(Extension):
    """Serves the files, which hold no data: every client may have them.

    Conversations have no cache beside them.
    """

    reason = (
        "several engines answer here, and the page shows the cache of one; the metrics "
        "tangram_replica_… tell of each"
    )
    code = "several_engines"

    def mount(self, app: FastAPI, *, locked: bool) -> None:
        """Add the files, too."""
        FILES.mount(app)
        super().mount(app, locked=locked)

    def is_open(self, path: bytes) -> bool:
        """See `Extension`: files hold no data."""
        return FILES.has(path)
