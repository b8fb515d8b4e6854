"""Text that others have written stays text, wherever the page shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import answers, ask, open_compare, open_page, open_view, send
from tests.edge.web.fake_server import FakeServer, run_fake_page

pytestmark = pytest.mark.browser
HOSTILE = '<img src=x onerror="window.pwned = 1"><script>window.pwned = 2</script>\'"&lt;'
ANOTHER_HOST = "192.0.2.1"
ASK_ANOTHER = f"() => fetch('http://{ANOTHER_HOST}/asked').catch(String)"
CHAT = "**/v1/chat/completions"
# The places of elements that the page does not make itself, of handlers, and of links that run.
HARM = """() => {
  const made = "img, script, iframe, object, embed, svg, style, form[action], base, meta, link";
  const bad = [...document.body.querySelectorAll(made)];
  for (const element of document.body.querySelectorAll("*")) {
    for (const { name, value } of element.attributes) {
      const runs = ["href", "src", "action", "formaction", "srcdoc", "data"].includes(name);
      if (name.startsWith("on") || (runs && /^\\s*(javascript|vbscript|data):/i.test(value))) {
        bad.push(element);
      }
    }
  }
  return [window.pwned ?? "quiet", ...bad.map((element) => element.outerHTML)];
}"""


SCRIPT = """() => {
  const script = document.createElement("script");
  script.textContent = "window.pwned = 1";
  document.body.append(script);
}"""


def check_harmless(page: Any) -> None:
    page.wait_for_timeout(50)
    assert page.evaluate(HARM) == ["quiet"]


def test_the_check_finds_what_would_be_made(browser: Any, fake: FakeServer) -> None:
    html = "<svg onload=x></svg><a href=' javascript:x'>y</a>"
    with open_page(browser, fake.url, ignores=("Content Security Policy",)) as watched:
        page = watched.page
        page.evaluate("(html) => document.body.insertAdjacentHTML('beforeend', html)", html)
        assert len(page.evaluate(HARM)) == 4, "an element, its handler, and a link that runs"
        with page.expect_event("console"):  # a script is refused at once, a handler when it is due
            page.evaluate(SCRIPT)
        assert watched.errors, "the policy is the second line of defence"


def test_a_page_that_asks_another_host_is_noticed(browser: Any, fake: FakeServer) -> None:
    """Without the policy, which would not let it ask."""
    ignores = ("ERR_FAILED", "CORS")
    with (
        pytest.raises(AssertionError, match="the page asked another host"),
        open_page(browser, fake.url, ignores=ignores, bypass_csp=True) as watched,
    ):
        watched.page.route("**/asked", lambda route: route.abort())
        watched.page.evaluate(ASK_ANOTHER)


def test_the_policy_lets_nothing_ask_another_host(browser: Any, fake: FakeServer) -> None:
    """Then no request is made, but the console has an error."""
    with open_page(browser, fake.url, ignores=("Content Security Policy",)) as watched:
        passed: list[str] = []
        watched.page.route("**/asked", lambda route: (passed.append("here"), route.abort()))
        assert "Failed to fetch" in watched.page.evaluate(ASK_ANOTHER)
        assert passed == [] and any("connect-src" in error for error in watched.errors)


def test_titles_of_conversations(page: Any) -> None:
    ask(page, HOSTILE)
    title = HOSTILE[:59] + "…"
    assert page.locator(".list li .open").all_inner_texts() == [title]
    assert page.locator(".list li .open").get_attribute("title") == title
    page.get_by_role("button", name=f"Rename {title}", exact=True).click()
    page.get_by_label("Name of the conversation").fill(HOSTILE)
    page.keyboard.press("Enter")
    page.get_by_role("button", name=HOSTILE, exact=True).wait_for()
    assert page.locator(".list li .open").all_inner_texts() == [HOSTILE]
    page.get_by_label("Colours").select_option("conversation")
    pool = page.get_by_role("list", name="Conversations in the pool")
    pool.locator(".title", has_text=HOSTILE).wait_for()
    page.get_by_label("A square for each page").hover(position={"x": 3, "y": 3})
    page.get_by_text(f"Page 0: kept for nobody, “{HOSTILE}”").wait_for()
    asked: list[str] = []
    page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.get_by_role("button", name=f"Delete {HOSTILE}", exact=True).click()
    assert HOSTILE in asked[0]
    check_harmless(page)


def test_a_search(page: Any) -> None:
    page.get_by_label("Search conversations").fill(HOSTILE)
    page.get_by_text("No conversation has these words.").wait_for()
    page.get_by_label("Search conversations").fill("")
    ask(page, HOSTILE)
    page.get_by_label("Search conversations").fill("<IMG src=x")
    expect(page.locator(".list li .open")).to_have_count(1)
    page.get_by_label("Search conversations").fill("(.*[")
    page.get_by_text("No conversation has these words.").wait_for()
    check_harmless(page)


def given_file(content: bytes) -> dict[str, Any]:
    return {"name": HOSTILE, "mimeType": "text/plain", "buffer": content}


def test_names_and_texts_of_documents(page: Any, fake: FakeServer) -> None:
    files = page.get_by_label("Text files")
    files.set_input_files(given_file(b"\xff"))
    page.get_by_text(f"{HOSTILE} is not a text file in UTF-8.").wait_for()
    files.set_input_files(given_file(HOSTILE.encode()))
    page.get_by_role("button", name=f"Remove {HOSTILE}", exact=True).wait_for()
    ask(page, "What is in it?")
    chip = page.locator(".message .chips li")
    assert chip.locator("summary").inner_text().startswith(HOSTILE)
    chip.locator("summary").click()
    assert chip.locator("pre").inner_text() == HOSTILE
    assert f'Document "{HOSTILE}":\n{HOSTILE}' in fake.bodies[-1]["messages"][0]["content"]
    open_compare(page)
    page.get_by_label("Text files").set_input_files(given_file(b"A note."))
    page.locator(".compare .chips summary", has_text=HOSTILE).wait_for()
    check_harmless(page)


REFUSALS: dict[str, tuple[int, str]] = {
    "json": (400, json.dumps({"error": {"message": HOSTILE}})),
    "html": (500, f"<html><body>{HOSTILE}</body></html>"),
    "detail": (422, json.dumps({"detail": [{"msg": HOSTILE}]})),
    "object": (400, json.dumps({"error": {"message": {"type": "img", "props": {}}}})),
    "stream": (200, f"data: {json.dumps({'error': {'message': HOSTILE}})}\n\n"),
}


@pytest.mark.parametrize("form", REFUSALS)
def test_errors_of_the_server(browser: Any, fake: FakeServer, form: str) -> None:
    status, body = REFUSALS[form]
    kind = "text/event-stream" if status == 200 else "text/html"
    shown = HOSTILE if form in ("json", "html", "stream") else "[object Object]"
    with open_page(browser, fake.url, ignores=(str(status),)) as watched:
        page = watched.page
        page.route(CHAT, lambda one: one.fulfill(status=status, body=body, content_type=kind))
        send(page, "Anyone?")
        page.get_by_role("alert").get_by_text(shown).wait_for()
        open_compare(page)
        page.get_by_label("Question").fill("Anyone?")
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("alert").get_by_text(shown).nth(1).wait_for()
        check_harmless(page)


@pytest.mark.parametrize("path", ["models", "kv/model", "kv/history?*"])
def test_errors_beside_answers(browser: Any, fake: FakeServer, path: str) -> None:
    refusal = json.dumps({"error": {"message": HOSTILE}})
    with open_page(browser, fake.url, ignores=("500",)) as watched:
        page = watched.page
        page.route(f"**/v1/{path}", lambda one: one.fulfill(status=500, body=refusal))
        page.reload()
        if "history" in path:
            open_view(page, "Server")
        page.get_by_text(HOSTILE).first.wait_for()
        check_harmless(page)


def message(role: str, parent: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "parent": parent, "content": HOSTILE, **fields}


def write_export(path: Path, **fields: Any) -> Path:
    conversation = {"title": "Fruit", "messages": {}, "chosen": {}, "settings": {}, **fields}
    whole = {"format": "tangram-conversations", "version": 1, "conversations": [conversation]}
    path.write_text(json.dumps(whole))
    return path


def import_file(page: Any, file: Path) -> None:
    page.get_by_label("A file of conversations").set_input_files(file)
    page.get_by_text("1 conversations were imported.").wait_for()


def test_a_file_of_conversations(browser: Any, fake: FakeServer, tmp_path: Path) -> None:
    documents = [{"name": HOSTILE, "text": HOSTILE}]
    run = {"answerId": HOSTILE, "requestId": HOSTILE, "finish": HOSTILE}
    messages = {
        "a": message("user", None, documents=documents),
        "b": message("assistant", "a", thought=HOSTILE, fault=HOSTILE, run=run),
    }
    settings = {"system": HOSTILE, "stop": HOSTILE, "temperature": HOSTILE, "kv_scorer": HOSTILE}
    chosen = {"": "a", "a": "b"}
    file = write_export(
        tmp_path / "file.json",
        **{"title": HOSTILE, "messages": messages, "chosen": chosen, "settings": settings},
    )
    with open_page(browser, fake.url, ignores=("404",)) as watched:
        page = watched.page
        import_file(page, file)
        expect(page.locator(".list li .open", has_text=HOSTILE)).to_have_count(1)
        assert page.locator(".message .words").all_inner_texts()[0] == HOSTILE
        assert page.get_by_role("alert").all_inner_texts() == [HOSTILE]
        page.locator(".thought summary").click()
        assert page.locator(".thought .words").inner_text() == HOSTILE
        page.get_by_text("Settings of this conversation").click()
        expect(page.get_by_label("System prompt")).to_have_value(HOSTILE)
        check_harmless(page)


BROKEN_RUNS: dict[str, Any] = {
    "texts": {
        **dict.fromkeys(("firstTokenS", "decodeS", "tokensPerS", "sealedChunks"), HOSTILE),
        "usage": dict.fromkeys(("prompt_tokens", "completion_tokens", "kv_bytes"), HOSTILE),
    },
    "objects": {"usage": {"prompt_tokens_details": 5, "completion_tokens_details": [{}]}},
    "nothing": {},
    "a number": 7,
}


@pytest.mark.parametrize("run", BROKEN_RUNS.values(), ids=BROKEN_RUNS)
def test_figures_of_a_file_that_are_none(page: Any, tmp_path: Path, run: Any) -> None:
    messages = {"a": message("user", None), "b": message("assistant", "a", run=run, thought={})}
    chosen = {"": "a", "a": "b"}
    import_file(page, write_export(tmp_path / "file.json", messages=messages, chosen=chosen))
    page.reload()
    ask(page, "Still there?")
    assert len(answers(page)) == 2
    check_harmless(page)


@pytest.mark.parametrize("name", ["constructor", "null", "__proto__", "undefined", "toString"])
def test_ids_of_a_file_that_mean_something_to_browsers(
    page: Any, tmp_path: Path, name: str
) -> None:
    """The page would loop, or show what every object has, if it took them."""
    messages = {name: message("user", None), "b": message("assistant", name)}
    chosen = {"": name, name: "b", "b": "constructor", "toString": "b"}
    import_file(page, write_export(tmp_path / "file.json", messages=messages, chosen=chosen))
    ask(page, "Still there?")
    expect(page.locator(".message.user")).to_have_count(2)
    assert len(answers(page)) == 2
    empty = write_export(tmp_path / "empty.json", chosen={"": name})
    import_file(page, empty)
    page.get_by_text("Which words does a model have to remember?").wait_for()
    check_harmless(page)


def test_names_of_models_and_scorers(browser: Any) -> None:
    ways = ((1.0, None), (0.5, "keydiff"), (0.5, HOSTILE))
    with run_fake_page(ways=ways, model=HOSTILE) as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        page.get_by_text(f"{HOSTILE}, connected").wait_for(state="attached")
        page.get_by_text("Settings of this conversation").click()
        page.get_by_label("KV retention").select_option(label=f"0.5 – {HOSTILE}")
        ask(page, "Who are you?")
        assert (fake.bodies[-1]["model"], fake.bodies[-1]["kv_scorer"]) == (HOSTILE, HOSTILE)
        open_compare(page)
        page.get_by_label("Right").select_option(label=f"0.5 – {HOSTILE}")
        page.get_by_label("Question").fill("Who scores?")
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("They differ first").wait_for()
        expect(page.get_by_role("heading", name=f"0.5 – {HOSTILE}", exact=True)).to_have_count(1)
        check_harmless(page)


def test_tokens_in_the_cache(page: Any) -> None:
    ask(page, "<img/src=x/onerror='window.pwned=1'> <script>x</script>")
    page.locator(".cache .caption", has_text="tokens, ended").wait_for()
    page.get_by_label("Tokens, painted by the share").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.get_by_text("Token 1 “ <img/src=x/onerror='window.pwned=1'>”").wait_for()
    check_harmless(page)


def fence(language: str) -> str:
    return f"```{language}\n{HOSTILE}\n```"


LANGUAGES = ('"><img src=x onerror="window.pwned=1">', "constructor", "__proto__", "html", "js x=1")


def test_languages_of_code(page: Any) -> None:
    for language in LANGUAGES:
        says(page, fence(language))
        ask(page, "Write code please")
        assert page.locator(".markdown pre").last.inner_text().strip() == HOSTILE, language
    check_harmless(page)


def says(page: Any, text: str) -> None:
    """Every answer from now on is `text`."""
    chunk = {"id": None, "choices": [{"index": 0, "delta": {"content": text}}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.unroute(CHAT)
    page.route(CHAT, lambda one: one.fulfill(body=body, content_type="text/event-stream"))


MARKDOWN = (
    "[a](javascript:window.pwned=1)",
    "[a](&#106;avascript:window.pwned=1)",
    "[a](java\nscript:window.pwned=1)",
    "[a](vbscript:x) [b](data:text/html;base64,PHNjcmlwdD4=) <javascript:window.pwned=1>",
    "[a]\n\n[a]: javascript:window.pwned=1 'title'",
    "![a](javascript:window.pwned=1) ![b](data:image/svg+xml,<svg/onload=x>)",
    '[a](https://evil.example/ "x\\" onmouseover=\\"window.pwned=1")',
    "<details open ontoggle=window.pwned=1>x</details>\n<!-- --> <style>*{display:none}</style>",
    "<form action=//evil.example><input name=key><button>Send</button></form>",
    "<a href=javascript:window.pwned=1>x</a><math><mtext><img src=x onerror=x></mtext></math>",
    "| a |\n|--|\n| <svg><script>window.pwned=1</script></svg> |",
)


def test_html_in_markdown(page: Any) -> None:
    for text in MARKDOWN:
        says(page, text)
        ask(page, "Go on")
        assert page.locator(".markdown").last.inner_text().strip(), text
        check_harmless(page)


def test_a_dropped_file(page: Any) -> None:
    page.get_by_label("Question", exact=True).evaluate(
        """(area, name) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File(["text"], name));
          area.dispatchEvent(
            new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }),
          );
        }""",
        HOSTILE,
    )
    page.get_by_role("button", name=f"Remove {HOSTILE}", exact=True).wait_for()
    check_harmless(page)
