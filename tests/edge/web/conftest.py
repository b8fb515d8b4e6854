"""One Chromium for each file of tests: Playwright's loop must not outlive a file, because other
tests run loops of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.edge.web.browser import CHROMIUM, NO_CHROMIUM, TIMEOUT_MS, WatchedPage, open_page
from tests.edge.web.fake_server import FakeServer, run_fake_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's sandbox cannot start.
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with run_fake_page() as server:
        yield server


@pytest.fixture
def watched(browser: Any, fake: FakeServer) -> Iterator[WatchedPage]:
    """The page in a fresh profile; at its end it has logged no error and asked no other host."""
    with open_page(browser, fake.url) as opened:
        yield opened


@pytest.fixture
def page(watched: WatchedPage) -> Any:
    return watched.page
