"""/docs in a real browser: what the server answers is shown, with a key and without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import DESKTOP, PHONE, open_page
from tests.edge.wire.conftest import EngineServer, run_page_server

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    with run_page_server() as server:
        yield server


def open_endpoint(page: Any, path: str) -> Any:
    """The part of the page that tells of an endpoint, opened."""
    found = page.locator(".opblock", has=page.locator(f'[data-path="{path}"]'))
    found.locator(".opblock-summary").click()
    found.locator(".opblock-body").wait_for()
    return found


def execute(endpoint: Any) -> str:
    """Send the request that is filled in; the status of the answer."""
    endpoint.get_by_role("button", name="Execute").click()
    status = endpoint.locator(".live-responses-table .response .response-col_status")
    return str(status.inner_text().split()[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_endpoint_is_shown(
    browser: Any, server: EngineServer, view: dict[str, Any], scheme: str
) -> None:
    """`open_page` sees that no other host is asked, and that the policy refuses nothing."""
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    with open_page(browser, f"{server.url}/docs", color_scheme=scheme, **view) as watched:
        page = watched.page
        shown = page.locator(".opblock-summary-path")
        expect(shown).to_have_count(sum(map(len, paths.values())))
        assert {text.replace("\u200b", "") for text in shown.all_inner_texts()} == paths.keys()
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= view["viewport"]["width"]
        ground = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        dark = (
            sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 128 and ground != "rgba(0, 0, 0, 0)"
        )
        assert dark == (scheme == "dark")


def test_an_example_is_sent_and_its_answer_shown(browser: Any, server: EngineServer) -> None:
    with open_page(browser, f"{server.url}/docs") as watched:
        assert execute(open_endpoint(watched.page, "/v1/models")) == "200"
        chat = open_endpoint(watched.page, "/v1/chat/completions")
        assert execute(chat) == "200"
        chat.locator(".examples-select select").select_option(label="An answer as a stream")
        assert execute(chat) == "200"
        expect(chat.locator(".live-responses-table")).to_contain_text("[DONE]")


def test_a_stream_without_an_end_is_not_sent(browser: Any, server: EngineServer) -> None:
    with open_page(browser, f"{server.url}/docs") as watched:
        events = open_endpoint(watched.page, "/v1/kv/events")
        expect(events.get_by_text("This stream has no end")).to_be_visible()
        expect(events.get_by_role("button", name="Execute")).to_have_count(0)


def test_a_server_with_keys_asks_for_one(browser: Any) -> None:
    with (
        run_page_server("sesame") as server,
        open_page(browser, f"{server.url}/docs", ignores=("401",)) as watched,
    ):
        page = watched.page
        field, show = page.get_by_label("API key"), page.get_by_role("button", name="Show the API")
        field.fill("simsalabim")
        show.click()
        expect(page.get_by_role("alert")).to_contain_text("API key")
        field.fill("sesame")
        show.click()
        assert execute(open_endpoint(page, "/v1/chat/completions")) == "200"
        expect(field).to_be_hidden()
        page.goto(f"{server.url}/")  # the chat page has the same key
        page.get_by_text(", connected").wait_for(state="attached")
