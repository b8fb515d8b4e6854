"""What an empty page proposes: a document, questions about it, and the cache that they fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import PHONE, STATIC, answers, open_page, open_view
from tests.edge.web.fake_cache import TOKEN_BYTES, FakeRequest
from tests.edge.web.fake_server import FakeServer, run_fake_page

pytestmark = pytest.mark.browser
LOGBOOK = (STATIC / "demo_document.md").read_text()
QUESTIONS = [
    "Who is the head keeper?",
    "How often does the comet come back?",
    "How high is the hill?",
]
UNITS = {"KiB": 2**10, "MiB": 2**20}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    """With a pool that the logbook fits into."""
    with run_fake_page(pages=20_000) as server:
        yield server


def choose(page: Any, question: str) -> None:
    page.get_by_role("button", name=question).click()
    page.locator(".message.user", has_text=question).wait_for()
    page.get_by_role("button", name="Send").wait_for()


def test_one_click_asks_about_the_sample_and_shows_its_cache(page: Any, fake: FakeServer) -> None:
    expect(page.get_by_role("heading", name="Which words does a model have")).to_be_visible()
    expect(page.get_by_text("The panel beside colours")).to_be_visible()
    expect(page.get_by_text("Then open Cache")).to_be_hidden()
    proposed = page.locator(".questions button")
    expect(proposed).to_have_text(QUESTIONS)
    choose(page, QUESTIONS[0])
    document = f'Document "A winter\'s logbook":\n{LOGBOOK}'
    (asked,) = fake.bodies[-1]["messages"]
    assert asked["content"] == f"{document}\n\n{QUESTIONS[0]}"
    page.locator(".cache .caption", has_text="tokens, ended").wait_for()
    expect(proposed).to_have_text(QUESTIONS[1:])
    choose(page, QUESTIONS[2])
    assert [each["role"] for each in fake.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert fake.bodies[-1]["messages"][2]["content"] == QUESTIONS[2]
    expect(proposed).to_have_text(QUESTIONS[1:2])
    assert len(answers(page)) == 2


def test_a_phone_is_told_of_no_panel_and_has_the_cache_one_click_away(
    browser: Any, fake: FakeServer
) -> None:
    with open_page(browser, fake.url, **PHONE) as watched:
        page = watched.page
        expect(page.get_by_text("The panel beside")).to_be_hidden()
        expect(page.get_by_text("Then open Cache")).to_be_visible()
        choose(page, QUESTIONS[0])
        page.get_by_role("button", name="Show its cache").click()
        expect(page.get_by_role("heading", name="Text in the cache")).to_be_visible()
        page.locator(".cache .caption", has_text="tokens, ended").wait_for()


def test_while_the_text_is_read_the_page_says_how_far(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        page.get_by_label("Question", exact=True).fill("This is slow")
        page.keyboard.press("Enter")
        page.get_by_text("reading: ").wait_for()
        fake.computed.set()
        page.get_by_role("button", name="Send").wait_for()
        expect(page.get_by_text("reading: ")).to_have_count(0)


def test_compare_begins_with_the_sample(page: Any, fake: FakeServer) -> None:
    open_view(page, "Compare")
    page.get_by_text("A winter's logbook").wait_for()
    expect(page.get_by_label("Question")).to_have_value(QUESTIONS[1])
    asked = len(fake.bodies)
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("× the KV cache").wait_for()
    contents = [body["messages"][0]["content"] for body in fake.bodies[asked:]]
    assert len(contents) == 2 and all(LOGBOOK in content for content in contents)
    figures = page.locator(".figures dd", has_text="(").all_inner_texts()
    held = [float(number) * UNITS[unit] for number, unit, *_ in map(str.split, figures)]
    said = page.get_by_text("Left beside right:").inner_text()
    assert float(said.split()[3]) == pytest.approx(held[0] / held[1], rel=0.05)
    for words in ("× the time to the first token", "× the speed."):
        assert words in said


def test_what_was_begun_in_compare_is_not_replaced(page: Any) -> None:
    open_view(page, "Compare")
    page.get_by_role("button", name="Remove A winter's logbook").click()
    page.get_by_label("Question").fill("What is a page?")
    open_view(page, "Chat")
    open_view(page, "Compare")
    expect(page.get_by_label("Question")).to_have_value("What is a page?")
    expect(page.get_by_text("A winter's logbook")).to_have_count(0)


def test_a_cache_larger_than_the_whole_has_its_reason_beside_it(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lambda request: len(request.tokens) * TOKEN_BYTES  # noqa: E731
    reason = "as pages and chunks of windows are held whole"
    monkeypatch.setattr(FakeRequest, "held_bytes", whole)
    choose(page, QUESTIONS[0])
    expect(page.locator(".run")).to_contain_text("100 %")
    expect(page.get_by_text(reason)).to_have_count(0)
    monkeypatch.setattr(FakeRequest, "held_bytes", lambda request: 27 * whole(request) // 25)
    choose(page, QUESTIONS[1])
    expect(page.locator(".run").last).to_contain_text(f"108 %, {reason}")
    expect(page.locator(".cache .detail", has_text=f"108 %, {reason}")).to_have_count(1)
    expect(page.get_by_text("Where a turn holds more than the whole")).to_have_count(1)
    open_view(page, "Compare")
    # The sample is read first: an empty question is not sent.
    expect(page.get_by_label("Question")).to_have_value(QUESTIONS[1])
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("× the KV cache").wait_for()
    expect(page.locator(".figures dd", has_text=f"(108 %, {reason})")).to_have_count(2)


def test_where_the_sample_does_not_fit_it_is_not_proposed(browser: Any) -> None:
    with run_fake_page(max_model_len=2048) as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        expect(page.get_by_text("this server has at most 2048 tokens")).to_be_visible()
        expect(page.get_by_text("Write your own question below")).to_be_visible()
        expect(page.locator(".questions button")).to_have_count(0)
        open_view(page, "Compare")
        expect(page.get_by_label("Question")).to_have_value("")
        expect(page.get_by_role("button", name="Remove A winter's logbook")).to_have_count(0)
