"""The page's files, with headers that let a browser load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
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
PAGES = {"/": "index.html", "/learn": "learn/index.html"}
_FOLDER = "/page/"


def is_file(path: bytes) -> bool:
    """Whether `path`, as it came, is that of a file."""
    return path.decode("latin-1") in PAGES or path.startswith(_FOLDER.encode())


def add_files(app: FastAPI, check: Callable[[Request], object]) -> None:
    """Serve the files to those whom `check` does not refuse."""
    files = StaticFiles(directory=STATIC)

    async def send(request: Request, path: str) -> Response:
        check(request)
        response = await files.get_response(path, request.scope)
        response.headers.update(HEADERS)
        return response

    def serve_page(path: str, name: str) -> None:
        @app.get(path, include_in_schema=False, response_model=None)
        async def page(request: Request) -> Response:
            return await send(request, name)

    for path, name in PAGES.items():
        serve_page(path, name)

    @app.get(_FOLDER + "{path:path}", include_in_schema=False, response_model=None)
    async def file(path: str, request: Request) -> Response:
        return await send(request, path)
