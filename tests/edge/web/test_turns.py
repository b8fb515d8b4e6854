"""A conversation over a document with the embedded model, as the page shows it.

`--pictures` writes what the page looks like to docs/pictures, and what /learn begins with.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import (
    ROOT,
    STATIC,
    answers,
    ask,
    open_compare,
    open_page,
    open_view,
    paste,
    send,
)
from tests.edge.web.painted import SCRIPT, check_scale, painted_tokens
from tests.edge.wire.conftest import run_real_server, wait_until

pytestmark = pytest.mark.browser
TEXT = (STATIC / "demo_document.md").read_text()
# Characters of the document that is pasted, which fill one chunk. The sample is the whole document.
PASTED = 3000
LEAST_TOKENS = {"pasted": 600, "sample": 2800}
# What the page proposes to ask of its sample, and what is in a right answer.
RIGHT = {
    "Who is the head keeper?": "Ingrid Solheim",
    "How often does the comet come back?": "eighty-four years",
    "How high is the hill?": "640 metres",
}
QUESTIONS = tuple(RIGHT)
KEY = "sesame"
PICTURE = {"width": 1280, "height": 1340}
README_PICTURE = {"width": 1280, "height": 640}
# Keeps a copy of each streamed answer, as the server sent it.
COPIES = """
(() => {
  window.copies = [];
  const ask = window.fetch;
  window.fetch = async (...given) => {
    const response = await ask(...given);
    if (String(given[0]).includes("/chat/")) {
      response.clone().text().then((text) => window.copies.push(text), () => {});
    }
    return response;
  };
})();
"""


@dataclass
class ShownTurns:
    """The page after three turns, and what the server answered to each."""

    page: Any
    url: str
    kind: str
    ids: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)

    def get(self, path: str) -> Any:
        answer = httpx.get(
            f"{self.url}/v1/kv/{path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        )
        answer.raise_for_status()
        return answer.json()

    def note(self, stream: str) -> None:
        """Keep the id and the usage of a streamed answer."""
        lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        self.ids.append(chunks[0]["id"])
        self.usages.append(chunks[-1]["usage"])


@pytest.fixture(
    scope="module", params=["pasted", pytest.param("sample", marks=pytest.mark.nightly)]
)
def talked(
    browser: Any, python: Sequence[str], request: pytest.FixtureRequest
) -> Iterator[ShownTurns]:
    # More chunks look better on pictures.
    kind = "sample" if request.config.getoption("pictures") else request.param
    with (
        run_real_server("--api-key", KEY, "--kv-cache-gib", "0.25", python=python) as url,
        open_page(browser, url, ignores=("401",)) as watched,
    ):
        page = watched.page
        page.context.set_default_timeout(120_000)
        page.add_init_script(SCRIPT)
        page.add_init_script(COPIES)
        page.reload()
        give_key(page)
        page.get_by_text("Settings of this conversation").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens of an answer").fill("24")
        page.get_by_text("Settings of this conversation").click()
        talked = ShownTurns(page, url, kind)
        if kind == "pasted":
            paste(page, TEXT[:PASTED])
        for question in QUESTIONS:
            if kind == "pasted":
                ask(page, question)
            else:
                choose_sample(page, question)
        for stream in page.evaluate("() => window.copies.splice(0)"):
            talked.note(stream)
        yield talked


def choose_sample(page: Any, question: str) -> None:
    """Ask what the page proposes, and wait until the answer has ended."""
    page.get_by_role("button", name=question).click()
    page.get_by_role("article", name="You").filter(has_text=question).wait_for()
    page.get_by_role("button", name="Send").wait_for(timeout=300_000)


def give_key(page: Any) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use this key").click()
    page.get_by_text(", connected").wait_for(state="attached")


def test_pictures(talked: ShownTurns, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of the page in light and dark, of its top, and of a passage of the text in the cache."""
    page, window = talked.page, talked.page.viewport_size
    made = request.config.getoption("pictures")
    folder = ROOT / "docs" / "pictures" if made else tmp_path
    page.set_viewport_size(PICTURE)
    page.wait_for_timeout(1000)
    for theme in ("dark", "light"):
        if page.evaluate("() => document.documentElement.dataset.theme") != theme:
            page.get_by_role("button", name="Switch between dark and light").click()
        page.locator(".text-map").evaluate("(e) => (e.scrollTop = 0)")
        page.wait_for_timeout(500)
        page.screenshot(path=folder / f"page_{theme}.png")
        assert (folder / f"page_{theme}.png").stat().st_size > 50_000
        text = page.locator(".text-map")
        text.evaluate("(e) => (e.scrollTop = 390)")
        page.wait_for_timeout(500)
        text.screenshot(path=(STATIC / "learn" if made else tmp_path) / f"kept_{theme}.png")
    page.screenshot(path=folder / "page_top.png", clip={"x": 0, "y": 0, **README_PICTURE})
    page.set_viewport_size(window)


def test_the_model_answers_what_the_page_proposes(talked: ShownTurns) -> None:
    given = dict(zip(QUESTIONS, answers(talked.page), strict=True))
    text = TEXT if talked.kind == "sample" else TEXT[:PASTED]
    asked = {question: right for question, right in RIGHT.items() if right in text}
    assert len(asked) >= 2
    assert [question for question, right in asked.items() if right not in given[question]] == []


def test_reuse_shown_equals_usage(talked: ShownTurns) -> None:
    rows = talked.page.locator(".turns tbody tr")
    expect(rows).to_have_count(len(QUESTIONS))
    assert len(answers(talked.page)) == len(QUESTIONS)
    for at, usage in enumerate(talked.usages):
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        shown = {
            name: int(rows.nth(at).locator(f'[data-name="{name}"]').inner_text().replace(",", ""))
            for name in ("reused", "computed", "sealed")
        }
        assert shown["reused"] == reused
        assert shown["computed"] == usage["prompt_tokens"] - reused
        told = talked.get(f"requests/{talked.ids[at]}")
        assert told["cached_tokens"] == reused
        chunk_tokens = talked.get("model")["chunk_tokens"]
        assert shown["sealed"] == told["sealed_chunks"] - reused // chunk_tokens
    first, *later = (usage["prompt_tokens_details"]["cached_tokens"] for usage in talked.usages)
    # The document is reused.
    assert first == 0 and all(reused > LEAST_TOKENS[talked.kind] for reused in later)


def test_time_and_memory_of_a_turn_are_shown(talked: ShownTurns) -> None:
    rows = talked.page.locator(".turns tbody tr")
    for at, usage in enumerate(talked.usages):
        shown = {
            name: rows.nth(at).locator(f'[data-name="{name}"]').inner_text()
            for name in ("first", "rate", "held", "whole")
        }
        assert shown["held"] == f"{usage['kv_bytes'] / 2**20:.1f} MiB"
        assert shown["whole"] == f"{usage['kv_bytes_uncompressed'] / 2**20:.1f} MiB"
        assert usage["kv_bytes"] < usage["kv_bytes_uncompressed"]
        number, unit = shown["first"].split()
        assert float(number) > 0 and unit in ("ms", "s") and float(shown["rate"]) > 0


def kept_shares(talked: ShownTurns, name: str, told: dict[str, Any]) -> dict[int, float]:
    """Position → share of the heads that hold its token, as the API says."""
    shares = dict.fromkeys(range(told["raw"]["begin"], told["raw"]["end"]), 1.0)
    for chunk in told["chunks"]:
        kept = talked.get(f"requests/{name}/kept?chunk={chunk['index']}")
        raw = np.frombuffer(base64.b64decode(kept["bits"]), np.uint8)
        shape = kept["layers"] * kept["kv_heads"], kept["tokens"]
        bits = np.unpackbits(raw, count=shape[0] * shape[1], bitorder="little").reshape(shape)
        shares |= dict(enumerate(bits.mean(0).tolist(), kept["begin"]))
    return shares


def test_painted_tokens_are_those_that_heads_keep(talked: ShownTurns) -> None:
    name = talked.ids[-1]
    told = talked.get(f"requests/{name}")
    tokens = [token["text"] for token in told["tokens"]]
    talked.page.get_by_text(f"{len(tokens):,} tokens, ended").wait_for()
    talked.page.wait_for_timeout(500)
    shares = kept_shares(talked, name, told)
    painted = painted_tokens(talked.page, tokens)
    assert len(painted) == len(tokens) and len(shares) > LEAST_TOKENS[talked.kind]
    assert min(shares.values()) < 0.5, "some tokens are dropped by most heads"
    check_scale(shares, painted)
    assert all(painted[at] is None for at in range(len(tokens)) if at not in shares)


def test_a_head_shows_the_tokens_it_keeps(talked: ShownTurns) -> None:
    page, name = talked.page, talked.ids[-1]
    page.get_by_label("KV heads by layer").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("Layer 0, head 0: holds").wait_for()
    kept = talked.get(f"requests/{name}/kept?chunk=0")
    raw = np.frombuffer(base64.b64decode(kept["bits"]), np.uint8)
    bits = np.unpackbits(raw, bitorder="little")[: kept["tokens"]]
    tokens = [token["text"] for token in talked.get(f"requests/{name}")["tokens"]]
    painted = painted_tokens(page, tokens)
    assert [painted[at] is not None for at in range(kept["tokens"])] == bits.astype(bool).tolist()
    page.get_by_label("Question", exact=True).focus()


def test_reload_keeps_the_conversation_and_its_cache(talked: ShownTurns) -> None:
    before = answers(talked.page)
    talked.page.reload()
    talked.page.get_by_text(", connected").wait_for(state="attached")
    talked.page.locator(".cache .caption", has_text="tokens, ended").wait_for()
    assert answers(talked.page) == before
    expect(talked.page.locator(".turns tbody tr")).to_have_count(len(QUESTIONS))


def test_an_answer_written_again_and_an_edited_question_reuse_the_document(
    talked: ShownTurns,
) -> None:
    """The last question is asked twice more, in branches beside the first answer."""
    page, computed = talked.page, []
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_text("2 of 2").last.wait_for()
    page.get_by_role("button", name="Send").wait_for()
    computed.append(check_last_turn(talked))
    page.get_by_role("button", name="Edit").last.click()
    page.get_by_label("The question, to change it").fill("And a page?")
    page.keyboard.press("Enter")
    page.locator(".message.user", has_text="And a page?").wait_for()
    page.get_by_role("button", name="Send").wait_for()
    computed.append(check_last_turn(talked))
    assert all(0 < tokens < 512 for tokens in computed), "the document is not computed again"
    page.get_by_role("button", name="Previous branch").last.click()
    page.locator(".message.user", has_text=QUESTIONS[-1]).wait_for()
    expect(page.locator(".turns tbody tr")).to_have_count(len(QUESTIONS))


def check_last_turn(talked: ShownTurns) -> int:
    """The row of the newest turn says what the server answered; the tokens it computed."""
    talked.page.wait_for_function("() => window.copies.length > 0")
    talked.note(talked.page.evaluate("() => window.copies.pop()"))
    usage = talked.usages.pop()
    talked.ids.pop()
    row = talked.page.locator(".turns tbody tr").nth(len(QUESTIONS) - 1)
    reused = usage["prompt_tokens_details"]["cached_tokens"]
    assert row.locator('[data-name="reused"]').inner_text() == f"{reused:,}"
    assert row.locator('[data-name="computed"]').inner_text() == (
        f"{usage['prompt_tokens'] - reused:,}"
    )
    return int(usage["prompt_tokens"] - reused)


@pytest.fixture(scope="module")
def streaming(talked: ShownTurns) -> Any:
    """The page while a long answer is being written."""
    page = talked.page
    page.get_by_text("Settings of this conversation").click()
    page.get_by_label("Most tokens of an answer").fill("2000")
    page.get_by_text("Settings of this conversation").click()
    send(page, "Write a long story.")
    page.locator(".message.assistant .markdown").last.get_by_text("e").first.wait_for()
    return page


def test_stop_ends_the_request(streaming: Any) -> None:
    page = streaming
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    page.locator(".cache .caption", has_text="tokens, ended").wait_for()
    assert "stopped" in page.locator(".message.assistant .run").last.inner_text()


def test_two_retentions_are_compared(talked: ShownTurns, tmp_path: Path) -> None:
    page = talked.page
    open_compare(page)
    document = tmp_path / "document.md"
    document.write_text(TEXT[:PASTED])
    page.get_by_label("Text files").set_input_files(document)
    page.get_by_label("Question").fill("What is this text about?")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("Left").select_option(label="1 – nothing dropped")
    page.get_by_label("Right").select_option(label="0.5 – fastkvzip")
    page.get_by_role("button", name="Compare").click()
    page.locator(".verdict").wait_for()
    shares = page.locator(".figures dd", has_text="%").all_inner_texts()
    held = [int(text.partition("(")[2].partition(" ")[0]) for text in shares]
    assert held[0] >= 100 > held[1], "the left drops nothing, the right something"


def test_the_server_view_has_the_engine_s_numbers(talked: ShownTurns) -> None:
    page = talked.page
    open_view(page, "Server")
    page.locator(".plot canvas").first.wait_for()
    fields = ("running", "queue", "pages_held", "pages_cached", "pages_free")

    def agrees() -> bool:
        history = talked.get("history?seconds=3600")
        shown = {
            name: page.locator(f'[data-field="{name}"]').inner_text().replace(",", "")
            for name in fields
        }
        told = {name: history[name][-1] for name in fields}
        return told["running"] == 0 and shown == {name: str(told[name]) for name in fields}

    wait_until(agrees, "the figures shown are not those of the engine")
    history = talked.get("history?seconds=3600")
    assert sum(history["throughput"]) > 0 and sum(history["prompt_throughput"]) > 0
    assert any(value for value in history["ttft_p90"])
    assert history["pages_cached"][-1] > 0
