"""The web page of a server of several engines: conversations without the cache beside them."""

from __future__ import annotations

from fastapi import FastAPI

from tangram.serve.extension import Extension
from tangram.web.files import FILES


class ChatWeb(Extension):
    """Serves its files, which hold no data: every client may have them."""

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
        """See `Extension`."""
        return FILES.has(path)
