"""Talking on the page, in a real browser over a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import (
    WatchedPage,
    answers,
    ask,
    open_page,
    open_view,
    paste,
    questions,
    send,
)
from tests.edge.web.fake_server import FakeServer, run_fake_page

pytestmark = pytest.mark.browser
WORDS = " ".join(f"line{at}" for at in range(400))


def test_an_answer_streams_and_a_reload_keeps_the_conversation(page: Any) -> None:
    ask(page, "What is a page?")
    assert answers(page) == ["Answer 1 to: What is a page?, with retention 0.5."]
    ask(page, "And a chunk?")
    page.reload()
    page.get_by_role("button", name="Send").wait_for()
    assert questions(page) == ["What is a page?", "And a chunk?"]
    assert len(answers(page)) == 2
    expect(page.get_by_role("button", name="What is a page?", exact=True)).to_be_visible()


def test_code_is_highlighted_and_can_be_copied(page: Any) -> None:
    ask(page, "Write code please")
    assert page.locator(".markdown .hljs-keyword").first.inner_text() == "def"
    page.get_by_role("button", name="Copy this code").click()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == "def add(one, two):\n    return one + two  # a sum\n"


def test_hostile_answers_are_text(page: Any) -> None:
    ask(page, "Something hostile")
    ask(page, "<img src=x onerror='window.pwned = 5'> <b>bold</b>")
    page.wait_for_timeout(200)
    assert page.evaluate("() => window.pwned") is None
    assert '<img src=x onerror="window.pwned = 1">' in answers(page)[0]
    assert questions(page)[1] == "<img src=x onerror='window.pwned = 5'> <b>bold</b>"
    expect(
        page.locator(".message img, .message script, .message iframe, .message svg")
    ).to_have_count(0)
    links = page.locator(".message a")
    targets = [links.nth(at).get_attribute("href") for at in range(links.count())]
    assert set(targets) == {"https://evil.example/x.png", "https://evil.example/"}
    assert "javascript:window.pwned=3" in answers(page)[0]


def test_stop_keeps_what_has_come(page: Any) -> None:
    send(page, "an endless answer")
    page.locator(".markdown", has_text="again again again").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    shown = answers(page)[0]
    assert "stopped" in page.locator(".message.assistant .run").inner_text()
    page.wait_for_timeout(200)
    assert answers(page)[0] == shown


def test_a_connection_that_breaks_keeps_what_has_come(browser: Any) -> None:
    with (
        run_fake_page() as fake,
        open_page(browser, fake.url, ignores=("ERR_INCOMPLETE_CHUNKED_ENCODING",)) as watched,
    ):
        page = watched.page
        ask(page, "Is it broken")
        page.get_by_role("alert").get_by_text("The connection ended before the answer").wait_for()
        assert answers(page)[0].startswith("Answer")


def test_an_answer_whose_tab_was_left_says_that_it_is_not_finished(page: Any) -> None:
    send(page, "an endless answer")
    page.locator(".markdown", has_text="again again again").wait_for()
    page.wait_for_timeout(1300)  # it is saved every second
    page.reload()
    page.locator(".message.assistant .run", has_text="not finished").wait_for()
    assert "again again" in answers(page)[0]


def test_edit_and_regenerate_make_branches(page: Any, fake: FakeServer) -> None:
    ask(page, "First words")
    ask(page, "Second words")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("The question, to change it").fill("Other words")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send").wait_for()
    assert questions(page) == ["Other words"]
    assert answers(page) == ["Answer 1 to: Other words, with retention 0.5."]
    page.get_by_role("button", name="Previous branch").click()
    assert questions(page) == ["First words", "Second words"]
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_text("2 of 2").last.wait_for()
    page.get_by_role("button", name="Send").wait_for()
    asked = [message["content"] for message in fake.bodies[-1]["messages"]]
    first_answer = "Answer 1 to: First words, with retention 0.5."
    assert asked == ["First words", first_answer, "Second words"]
    assert len(answers(page)) == 2
    page.reload()
    page.get_by_text("2 of 2").last.wait_for()


def test_a_long_paste_and_a_text_file_are_documents(
    page: Any, fake: FakeServer, tmp_path: Path
) -> None:
    paste(page, WORDS)
    page.get_by_text("pasted text 1").wait_for()
    expect(page.get_by_label("Question", exact=True)).to_have_value("")
    notes, picture = tmp_path / "notes.txt", tmp_path / "picture.png"
    notes.write_text("A note.")
    picture.write_bytes(b"\x89PNG\0\xff")
    page.get_by_label("Text files").set_input_files([notes, picture])
    page.get_by_text("picture.png is not a text file in UTF-8.").wait_for()
    ask(page, "What is in them?")
    assert questions(page) == ["What is in them?"]
    expect(page.locator(".message .chips li")).to_have_count(2)
    sent = fake.bodies[-1]["messages"][0]["content"]
    documents = f'Document "pasted text 1":\n{WORDS}\n\nDocument "notes.txt":\nA note.'
    assert sent == f"{documents}\n\nWhat is in them?"


def test_settings_are_sent_and_kept_with_the_conversation(page: Any, fake: FakeServer) -> None:
    page.get_by_text("Settings of this conversation").click()
    numbers = {
        "Temperature": 0.25,
        "Top p": 0.9,
        "Top k": 40,
        "Min p": 0.05,
        "Presence penalty": -0.5,
        "Frequency penalty": 0.5,
        "Repetition penalty": 1.1,
        "Most tokens of an answer": 4,
        "Seed": 7,
    }
    for label, value in numbers.items():
        page.get_by_label(label).fill(str(value))
    page.get_by_label("Stop before").fill("END\nSTOP HERE")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("KV retention").select_option("0.3")
    ask(page, "How?")
    body = fake.bodies[-1]
    assert body["stop"] == ["END", "STOP HERE"] and body["kv_retention"] == 0.3
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    names += ("repetition_penalty", "max_tokens", "seed")
    assert [body[name] for name in names] == list(numbers.values())
    assert "cut by its limit" in page.locator(".message.assistant .run").inner_text()
    page.reload()
    page.get_by_text(", connected").wait_for(state="attached")  # then the ratios are known
    page.get_by_text("Settings of this conversation").click()
    expect(page.get_by_label("Top k")).to_have_value("40")
    expect(page.get_by_label("KV retention")).to_have_value("0.3")


def test_an_empty_setting_shows_what_the_server_takes(page: Any) -> None:
    page.get_by_text("Settings of this conversation").click()
    shown = {
        "Temperature": "0.2; 0 is greedy",
        "Top p": "0.9",
        "Top k": "off",
        "Most tokens of an answer": "the context's rest",
        "Seed": "none",
    }
    for label, text in shown.items():
        expect(page.get_by_label(label)).to_have_attribute("placeholder", text)


def test_a_setting_out_of_range_is_not_sent(page: Any, fake: FakeServer) -> None:
    page.get_by_text("Settings of this conversation").click()
    page.get_by_label("Temperature").fill("7")
    ask(page, "How hot?")
    assert "temperature" not in fake.bodies[-1]
    expect(page.get_by_text("it must lie in 0 to 2")).to_be_visible()


def test_conversations_are_found_renamed_and_deleted(page: Any) -> None:
    ask(page, "About apples")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "About pears")
    listed = page.locator(".list li .open")
    expect(listed).to_have_text(["About pears", "About apples"])
    page.get_by_role("heading", name="Tangram").click()
    page.locator("body").press("/")
    page.keyboard.type("answer apples")
    expect(listed).to_have_text(["About apples"])
    page.get_by_role("button", name="Rename About apples").click()
    page.get_by_label("Name of the conversation").fill("Fruit")
    page.keyboard.press("Enter")
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Fruit", exact=True).wait_for()
    expect(listed).to_have_text(["About pears", "Fruit"])
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete About pears").click()
    page.get_by_text("About pears").first.wait_for(state="detached")
    page.reload()
    page.get_by_role("button", name="Fruit", exact=True).wait_for()
    expect(listed).to_have_text(["Fruit"])


def test_an_export_can_be_imported(page: Any, tmp_path: Path) -> None:
    ask(page, "Keep this")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())["conversations"]
    assert [each["title"] for each in exported] == ["Keep this"]
    page.get_by_label("A file of conversations").set_input_files(file)
    page.get_by_text("1 conversations were imported.").wait_for()
    expect(page.locator(".list li .open")).to_have_text(["Keep this", "Keep this"])
    assert questions(page) == ["Keep this"]
    file.write_text('{"format": "something else"}')
    page.get_by_label("A file of conversations").set_input_files(file)
    page.get_by_text("The file has no conversations of this page.").wait_for()


def test_one_conversation_is_exported_alone(page: Any, tmp_path: Path) -> None:
    ask(page, "Keep this")
    page.get_by_role("button", name="New conversation").first.click()
    ask(page, "Not that")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export Keep this", exact=True).click()
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    (exported,) = json.loads(file.read_text())["conversations"]
    assert exported["title"] == "Keep this"
    texts = [message["content"] for message in exported["messages"].values()]
    assert texts == ["Keep this", "Answer 1 to: Keep this, with retention 0.5."]


def test_a_file_that_would_hang_or_break_the_page_is_refused(page: Any, tmp_path: Path) -> None:
    question = {"role": "user", "content": "Round and round", "documents": []}
    first, second = {**question, "parent": "b"}, {**question, "parent": "a"}
    broken = [
        ({"a": first, "b": second}, "Conversation 1 has a message without its place."),
        ({"a": {**question, "parent": None, "content": 7}}, "a message without text."),
        ({"a": {**question, "parent": None, "role": "tool"}}, "a message of neither side."),
    ]
    file = tmp_path / "broken.json"
    for messages, sentence in broken:
        conversation = {"title": "x", "messages": messages, "chosen": {"": "a"}, "settings": {}}
        whole = {"format": "tangram-conversations", "version": 1, "conversations": [conversation]}
        file.write_text(json.dumps(whole))
        page.get_by_label("A file of conversations").set_input_files(file)
        page.get_by_text(sentence).wait_for()
    ask(page, "Still there?")


def test_two_tabs_do_not_lose_turns_of_each_other(page: Any, fake: FakeServer) -> None:
    ask(page, "From the first tab")
    other = page.context.new_page()
    other.goto(fake.url)
    other.get_by_text(", connected").wait_for(state="attached")
    ask(other, "From the second tab")
    page.get_by_text("Answer 2 to: From the second tab").wait_for()
    ask(page, "From the first again")
    other.get_by_text("Answer 3 to: From the first again").wait_for()
    assert questions(other) == questions(page) != []


def test_a_key_is_required_and_stays_in_this_tab(browser: Any) -> None:
    with run_fake_page(key="sesame") as locked:
        context = browser.new_context()
        page = context.new_page()
        page.goto(locked.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        dialog.get_by_label("Key", exact=True).wait_for()
        dialog.get_by_label("Key", exact=True).fill("sesame")
        dialog.get_by_role("button", name="Use this key").click()
        page.get_by_text(", connected").wait_for(state="attached")
        ask(page, "Open")
        assert answers(page) == ["Answer 1 to: Open, with retention 0.5."]
        page.reload()
        page.get_by_text(", connected").wait_for(state="attached")
        other = context.new_page()
        other.goto(locked.url)
        other.get_by_role("dialog", name="API key").wait_for()
        assert other.evaluate("() => localStorage.getItem('tangram.key')") is None
        context.close()


def test_a_failure_is_told_and_asked_again(watched: WatchedPage) -> None:
    page = watched.page
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "Anyone?")
    page.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
    page.unroute("**/v1/chat/completions")
    assert [error.split(" (")[0] for error in watched.errors] == [
        "Failed to load resource: net::ERR_FAILED"
    ]
    watched.errors.clear()
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Answer 1 to: Anyone?").wait_for()


def test_a_server_that_comes_back_with_another_model_is_asked_for_that(
    watched: WatchedPage, fake: FakeServer
) -> None:
    page = watched.page
    page.get_by_text(", connected").wait_for(state="attached")
    fake.model = "another-model"
    fake.tell("end", {})
    page.get_by_text("another-model, connected").wait_for()
    ask(page, "Who are you?")
    assert fake.bodies[-1]["model"] == "another-model"


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_pages_need_no_sideways_scrolling(
    browser: Any, fake: FakeServer, width: int
) -> None:
    with open_page(browser, fake.url, viewport={"width": width, "height": 740}) as watched:
        page = watched.page
        ask(page, "On a phone with code")
        for drawer in (None, "Conversations", "Cache"):
            if drawer is not None:
                page.get_by_role("button", name=drawer, exact=True).click()
            page.wait_for_timeout(100)
            assert overflow(page) == 0
        expect(page.get_by_role("heading", name="Text in the cache")).to_be_visible()
        for view in ("Compare", "Server"):
            open_view(page, view)
            page.wait_for_timeout(300)
            assert overflow(page) == 0


def overflow(page: Any) -> int:
    """Pixels by which the page is wider than the window."""
    return page.evaluate(
        "() => Math.max(document.documentElement.scrollWidth - innerWidth,"
        " ...[...document.querySelectorAll('main')].map((e) => e.scrollWidth - e.clientWidth))"
    )


def test_dark_and_light_follow_the_system_until_chosen(browser: Any, fake: FakeServer) -> None:
    with open_page(browser, fake.url, color_scheme="dark") as watched:
        page = watched.page
        theme = "() => document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "dark"
        page.get_by_role("button", name="Switch between dark and light").click()
        assert page.evaluate(theme) == "light"
        page.reload()
        assert page.evaluate(theme) == "light"


def test_keys_are_listed_and_work(page: Any) -> None:
    page.get_by_role("heading", name="Tangram").click()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").get_by_text("stop the answer").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Control+Enter")
    page.get_by_role("button", name="Send").wait_for()
    assert questions(page) == ["One line\nand another"]
