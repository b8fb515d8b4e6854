"""The page of several engines: conversations work, and the page says why there is no cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from tangram.link.linked_engine import LinkedEngine
from tangram.serve.http import build_app
from tangram.serve.options import ServerOptions
from tangram.web.chat_alone import ChatWeb
from tests.edge.web.browser import ask, open_page, open_view
from tests.edge.wire.conftest import free_port, wait_until
from tests.edge.wire.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine, port = FakeEngine(), free_port()
    app = build_app(
        LinkedEngine(engine),
        served_model_name="fake",
        options=ServerOptions(api_key=("sesame",)),
        web=ChatWeb(),
    )
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server has not started")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


def test_files_are_for_everyone_and_the_cache_is_refused_by_name(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        assert client.get("/").status_code == client.get("/learn").status_code == 200
        assert client.get("/v1/kv/model").status_code == 401
        for path in ("/v1/kv", "/v1/kv/model"):
            refused = client.get(path, headers={"Authorization": "Bearer sesame"})
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "several_engines"


@pytest.mark.browser
def test_a_conversation_goes_on_without_a_cache(browser: Any, url: str) -> None:
    refused: list[str] = []
    with open_page(browser, url, ("status of 40",)) as watched:
        page = watched.page
        page.on("response", lambda got: refused.append(got.url) if got.status == 404 else None)
        page.get_by_role("dialog").get_by_label("key").fill("sesame")
        page.keyboard.press("Enter")
        page.get_by_text("The cache cannot be shown: several engines answer here").wait_for()
        ask(page, "Hello")
        ask(page, "And again")
        open_view(page, "Compare")
        page.get_by_text("Settings cannot be compared: several engines").wait_for()
        time.sleep(1.5)  # longer than the first pauses between tries
        assert len(refused) == 1, "what is refused for good is not asked for again"
