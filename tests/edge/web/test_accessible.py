"""axe-core finds no serious fault on the page, in either theme."""

from __future__ import annotations

from typing import Any

import pytest

from tests.edge.web.browser import PHONE, ask, faults, open_compare, open_page, open_view, paste
from tests.edge.web.fake_server import FakeServer

pytestmark = pytest.mark.browser


def test_a_fault_is_found(page: Any) -> None:
    page.evaluate("() => document.body.append(document.createElement('img'))")
    assert [fault.split(":")[0] for fault in faults(page)] == ["image-alt"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_accessible(browser: Any, fake: FakeServer, theme: str) -> None:
    with open_page(browser, fake.url, color_scheme=theme) as watched:
        page = watched.page
        assert faults(page) == []
        paste(page, "some words " * 300)
        ask(page, "Write code please")
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_text("2 of 2").wait_for()
        page.get_by_role("button", name="Send").wait_for()
        ask(page, "Something hostile, with a table")
        page.get_by_text("Settings of this conversation").click()
        assert faults(page) == []
        page.get_by_role("button", name="Keys").click()
        assert faults(page) == []
        page.keyboard.press("Escape")
        page.get_by_role("button", name="API key").click()
        assert faults(page) == []
        page.keyboard.press("Escape")
        open_compare(page)
        page.get_by_label("Question").fill("What is dropped?")
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("They differ first").wait_for()
        assert faults(page) == []
        open_view(page, "Server")
        page.locator(".plot canvas").first.wait_for()
        assert faults(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_accessible_on_a_phone(browser: Any, fake: FakeServer, theme: str) -> None:
    with open_page(browser, fake.url, color_scheme=theme, **PHONE) as watched:
        page = watched.page
        ask(page, "Write code please")
        page.get_by_text("Settings of this conversation").click()
        assert faults(page) == []
        for drawer in ("Conversations", "Cache"):
            page.get_by_role("button", name=drawer, exact=True).click()
            assert faults(page) == []
        for view in ("Compare", "Server"):
            open_view(page, view)
            page.locator(".compare form, .plot canvas").first.wait_for()
            assert faults(page) == []
