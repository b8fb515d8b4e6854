"""Chromium for the page's tests, and what every page must not do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "tangram" / "web" / "static"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NO_CHROMIUM = "there is no Chromium here: apt-get install chromium runs these tests"

DESKTOP: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {
    **{"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
    **{"is_mobile": True, "has_touch": True},
}
TIMEOUT_MS = 60_000  # for what a busy machine shows late
SERIOUS = ("serious", "critical")


@dataclass
class WatchedPage:
    """A browser's page, with all that it logged and asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@contextmanager
def open_page(
    browser: Any, url: str, ignores: tuple[str, ...] = (), **options: Any
) -> Iterator[WatchedPage]:
    """A fresh browser profile at `url`. At its end: no error in the console but those with one of
    `ignores`, and no other host was asked.
    """
    context = browser.new_context(**{**DESKTOP, "accept_downloads": True, **options})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(TIMEOUT_MS)
    watched = WatchedPage(context.new_page())
    watched.page.on("console", lambda message: _note(watched, message))
    watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
    context.on("request", lambda request: watched.hosts.add(urlsplit(request.url).netloc))
    try:
        watched.page.goto(url)
        yield watched
        wrong = [error for error in watched.errors if not any(part in error for part in ignores)]
        assert not wrong, wrong
        assert watched.hosts <= {urlsplit(url).netloc, ""}, "the page asked another host"
    finally:
        context.close()


def _note(watched: WatchedPage, message: Any) -> None:
    if message.type in ("error", "warning"):
        watched.errors.append(f"{message.text} ({message.location.get('url', '')})")


def open_view(page: Any, name: str) -> None:
    """Open a view, and wait for it and for what the server tells it.

    Another view may have fields of the same names.
    """
    page.get_by_role("link", name=name).click()
    page.locator('nav [aria-current="page"]', has_text=name).wait_for()
    page.get_by_text("Waiting for the server.").wait_for(state="hidden")


def open_compare(page: Any) -> None:
    """Open Compare for the first time, and take away the sample that it begins with."""
    open_view(page, "Compare")
    page.get_by_role("button", name="Remove A winter's logbook").click()
    page.get_by_label("Question").fill("")


def ask(page: Any, question: str) -> None:
    """Send a question and wait until its answer has ended."""
    send(page, question)
    page.get_by_role("button", name="Send").wait_for()


def send(page: Any, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    page.get_by_role("article", name="You").filter(has_text=question).last.wait_for()


def paste(page: Any, text: str) -> None:
    """Paste `text` into the question, as a user does."""
    page.evaluate("(text) => navigator.clipboard.writeText(text)", text)
    page.get_by_label("Question", exact=True).focus()
    page.keyboard.press("Control+V")


def answers(page: Any) -> list[str]:
    """The texts of the answers that are shown."""
    return page.locator(".message.assistant .markdown").all_inner_texts()


def questions(page: Any) -> list[str]:
    return page.locator(".message.user .words").all_inner_texts()


def faults(page: Any) -> list[str]:
    """Serious faults that axe-core finds, each with its first place."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:120]}"
        for fault in found
        if fault["impact"] in SERIOUS
    ]
