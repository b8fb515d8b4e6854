"""Web pages and their files, with headers that let a browser load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class StaticFolder:
    """The files of `folder`, served below `prefix`; some of them are pages with a path of their
    own.
    """

    folder: Path
    pages: Mapping[str, str]
    prefix: str

    def has(self, path: bytes) -> bool:
        """Whether `path`, as it came, is that of a page or lies below the prefix."""
        return path.decode("latin-1") in self.pages or path.startswith(self.prefix.encode())

    def mount(
        self, app: FastAPI, check: Callable[[Request], object] = lambda request: None
    ) -> None:
        """Add the routes to `app`. `check` raises for those who may not see the files."""
        files = StaticFiles(directory=self.folder)

        async def send(request: Request, path: str) -> Response:
            check(request)
            response = await files.get_response(path, request.scope)
            response.headers.update(HEADERS)
            return response

        def add_page(path: str, name: str) -> None:
            @app.get(path, include_in_schema=False, response_model=None)
            async def page(request: Request) -> Response:
                return await send(request, name)

        for path, name in self.pages.items():
            add_page(path, name)

        @app.get(self.prefix + "{path:path}", include_in_schema=False, response_model=None)
        async def file(path: str, request: Request) -> Response:
            return await send(request, path)
