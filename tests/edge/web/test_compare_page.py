"""Compare over a fake engine: the form, both answers, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import ask, open_compare, open_page, open_view, paste
from tests.edge.web.fake_cache import RETENTIONS
from tests.edge.web.fake_server import FakeServer, run_fake_page
from tests.mentions import mentions

pytestmark = pytest.mark.browser
WORDS = "some words " * 200
WHOLE, SMALL = "1 – nothing dropped", "0.3 – keydiff"


def side(page: Any, name: str) -> Any:
    return page.get_by_role("article", name=f"Answer with {name}", exact=True)


def test_two_settings_are_compared(page: Any, fake: FakeServer) -> None:
    open_compare(page)
    page.get_by_label("Left").select_option(label="1 – nothing dropped")
    page.get_by_label("Right").select_option(label="0.3 – keydiff")
    page.get_by_label("Question").fill("What is dropped?")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("They differ first at word 9.").wait_for()
    expect(page.locator("mark")).to_have_text(["1.", "0.3."])
    bodies = fake.bodies[-2:]
    assert [body["kv_retention"] for body in bodies] == [RETENTIONS[0], RETENTIONS[2]]
    assert bodies[0]["cache_salt"] != bodies[1]["cache_salt"]
    assert all(body["temperature"] == 0 for body in bodies)
    expect(page.get_by_text("(100 %)")).to_have_count(2)  # nothing is sealed yet


def options_of(page: Any, label: str) -> list[str]:
    return page.get_by_label(label).locator("option").all_inner_texts()


def compare(page: Any, left: str, right: str, verdict: str) -> None:
    """Ask both sides, and wait until the page says `verdict`."""
    page.get_by_label("Left").select_option(label=left)
    page.get_by_label("Right").select_option(label=right)
    page.get_by_label("Question").fill("What is dropped?")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text(verdict, exact=True).wait_for()


def test_two_scorers_of_one_ratio_are_compared(browser: Any) -> None:
    ways = ((0.5, "keydiff"), (1.0, None), (0.5, "fastkvzip"), (0.3, "fastkvzip"))
    with run_fake_page(ways=ways) as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        open_compare(page)
        named = ["0.5 – keydiff", "1 – nothing dropped", "0.5 – fastkvzip", "0.3 – fastkvzip"]
        assert options_of(page, "Left") == options_of(page, "Right") == named
        compare(page, named[0], named[2], "They differ first at word 9.")
        expect(page.locator("mark")).to_have_text(["0.5.", "0.5"])
        fields = [
            {name: body[name] for name in ("kv_retention", "kv_scorer") if name in body}
            for body in fake.bodies
        ]
        assert fields == [{"kv_retention": 0.5}, {"kv_retention": 0.5, "kv_scorer": "fastkvzip"}]
        assert all("speculative" not in body for body in fake.bodies)
        open_view(page, "Chat")
        page.get_by_text("Settings of this conversation").click()
        page.get_by_label("KV retention").select_option(label="0.5 – fastkvzip")
        ask(page, "Who scores?")
        assert (fake.bodies[-1]["kv_retention"], fake.bodies[-1]["kv_scorer"]) == (0.5, "fastkvzip")
        page.get_by_label("KV retention").select_option(label="0.3 – fastkvzip")
        ask(page, "And now?")
        assert fake.bodies[-1]["kv_retention"] == 0.3 and "kv_scorer" not in fake.bodies[-1]


def test_a_lossless_server_is_compared_with_and_without_drafts(browser: Any) -> None:
    ways = ((1.0, None), (0.5, "keydiff"))
    phone = {"width": 360, "height": 740}
    with (
        run_fake_page(ways=ways, drafts=True) as fake,
        open_page(browser, fake.url, viewport=phone) as watched,
    ):
        page = watched.page
        open_compare(page)
        whole = "1 – nothing dropped"
        plain, drafted = f"{whole}, without drafts", f"{whole}, with drafts"
        assert options_of(page, "Left") == [drafted, plain, "0.5 – keydiff"]
        said = "Both answers are equal: drafts change the speed, and no word."
        compare(page, plain, drafted, said)
        expect(page.locator("mark")).to_have_count(0)
        # Drafts may come from earlier answers, so the side without them is asked last.
        assert [body["speculative"] for body in fake.bodies] == [True, False]
        counts = page.get_by_text("Drafts kept").locator("xpath=following-sibling::dd")
        expect(counts).to_have_text(["0 of 0", "7 of 9"])
        compare(page, plain, plain, "Both answers are equal.")
        wide = "() => document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(wide) == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_fields_stand_on_one_line(browser: Any, fake: FakeServer, theme: str) -> None:
    with open_page(browser, fake.url, color_scheme=theme) as watched:
        page = watched.page
        open_compare(page)
        fields = page.locator(".compare .row :is(button, input, select):visible")
        expect(fields).to_have_count(5)
        boxes = [field.bounding_box() for field in fields.all()]
        assert len({(box["y"], box["height"]) for box in boxes}) == 1


def test_documents_are_given_as_in_the_chat(page: Any, fake: FakeServer, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("A note.")
    open_compare(page)
    paste(page, WORDS)
    page.get_by_text("pasted text 1").wait_for()
    expect(page.get_by_label("Question")).to_have_value("")
    page.get_by_label("Text files").set_input_files(notes)
    page.get_by_text("notes.txt").wait_for()
    # A visible one would say: no file chosen.
    expect(page.locator("input[type=file]:visible")).to_have_count(0)
    page.get_by_label("Question").fill("What is in them?")
    asked = len(fake.bodies)
    page.keyboard.press("Enter")
    page.get_by_text("They differ first").wait_for()
    documents = f'Document "pasted text 1":\n{WORDS}\n\nDocument "notes.txt":\nA note.'
    contents = [body["messages"][0]["content"] for body in fake.bodies[asked:]]
    assert contents == [f"{documents}\n\nWhat is in them?"] * 2
    page.get_by_role("button", name="Remove pasted text 1").click()
    page.get_by_text("pasted text 1").wait_for(state="detached")
    page.wait_for_timeout(200)
    assert len(fake.bodies) == asked + 2, "taking a document away asks nothing"


def test_the_answers_stay_when_the_view_is_left(page: Any, fake: FakeServer) -> None:
    open_compare(page)
    page.get_by_label("Most tokens").fill("150")
    paste(page, WORDS)
    compare(page, SMALL, WHOLE, "They differ first at word 14.")
    shown = page.locator(".compare").inner_text()
    marked = page.locator("mark").all_inner_texts()
    open_view(page, "Chat")
    ask(page, "What is a page?")
    open_view(page, "Server")
    page.locator(".plot canvas").first.wait_for()
    open_view(page, "Compare")
    page.locator(".verdict").wait_for()
    assert page.locator(".compare").inner_text() == shown
    assert page.locator("mark").all_inner_texts() == marked == ["0.3.", "1."]
    labels = ("Question", "Most tokens", "Left", "Right")
    values = [page.get_by_label(label).input_value() for label in labels]
    assert values == ["What is dropped?", "150", SMALL, WHOLE]


def test_the_answers_grow_while_the_view_is_left(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        open_compare(page)
        page.get_by_label("Question").fill("This is slow")
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("button", name="Stop").wait_for()
        open_view(page, "Chat")
        page.get_by_role("button", name="Send").wait_for()
        fake.computed.set()
        open_view(page, "Compare")
        page.get_by_text("They differ first").wait_for()
        assert len(fake.bodies) == 2


def test_stop_stops_both(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        open_compare(page)
        page.get_by_label("Question").fill("an endless answer")
        page.get_by_label("Most tokens").fill("4096")
        page.get_by_role("button", name="Compare").click()
        page.locator(".words", has_text="again again again").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Compare").wait_for()
        expect(page.get_by_text("Stopped.", exact=True)).to_have_count(2)
        expect(page.locator(".verdict")).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)
        wait_for_end(page, fake)
        assert len(fake.bodies) == 1, "the other one was not asked for"


def test_escape_stops_the_second_and_the_first_stays(browser: Any) -> None:
    with run_fake_page(token_s=0.1) as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        open_compare(page)
        page.get_by_label("Question").fill("an endless answer")
        page.get_by_label("Most tokens").fill("12")
        page.get_by_role("button", name="Compare").click()
        side(page, SMALL).locator(".words", has_text="again").wait_for()
        page.keyboard.press("Escape")
        side(page, SMALL).get_by_text("Stopped.", exact=True).wait_for()
        expect(side(page, WHOLE).get_by_text("Stopped.")).to_have_count(0)
        expect(side(page, WHOLE).get_by_text("+ 12 tokens")).to_have_count(1)
        wait_for_end(page, fake)


def wait_for_end(page: Any, fake: FakeServer) -> None:
    """Wait until the server writes no answer any more."""
    for _ in range(100):
        if all(request.state == "ended" for request in fake.cache.requests.values()):
            return
        page.wait_for_timeout(50)
    raise AssertionError("the server still writes an answer")


def test_a_setting_that_is_served_no_more(browser: Any) -> None:
    """The page may not know yet that the server was started with other profiles."""
    with run_fake_page() as fake, open_page(browser, fake.url, ignores=("400",)) as watched:
        page = watched.page
        open_compare(page)
        compare(page, SMALL, WHOLE, "They differ first at word 9.")
        fake.cache.ways = ((1.0, None), (0.5, "keydiff"))
        page.get_by_role("button", name="Compare").click()
        refused = side(page, SMALL).get_by_role("alert")
        refused.wait_for()
        assert mentions(refused.inner_text(), "kv_retention 0.3 1.0, 0.5")
        side(page, WHOLE).get_by_text("with retention 1").wait_for()
        page.get_by_role("button", name="Compare").wait_for()
        expect(page.locator(".verdict, mark")).to_have_count(0)
        fake.tell("end", {})
        page.get_by_label("Left").locator("option", has_text=SMALL).wait_for(state="detached")
        expect(page.get_by_label("Left")).to_have_value(WHOLE)
        compare(page, "0.5 – keydiff", WHOLE, "They differ first at word 9.")


def test_a_key_that_is_wanted_is_asked_for(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url, ignores=("401",)) as watched:
        page = watched.page
        open_compare(page)
        page.get_by_label("Question").fill("What is dropped?")
        fake.key = "sesame"
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("dialog", name="API key").wait_for()
        page.get_by_text("no API key, or a wrong one").nth(1).wait_for()
