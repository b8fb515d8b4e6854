"""Compare over the embedded model: two scorers of one ratio, lossless with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tangram.compress.library import find_shipped_profiles
from tests.edge.web.browser import ROOT, open_compare, open_page
from tests.edge.wire.conftest import run_real_server

pytestmark = pytest.mark.browser
PROFILES = ("smollm2.fastkvzip.model.c512.r0.25.json", "smollm2.fastkvzip.model.c512.r0.5.json")
PROFILES += ("smollm2.keydiff.model.c512.r0.5.json",)
DRAFTS = '{"method": "compressed_kv", "num_speculative_tokens": 4}'
WHOLE = "1 – nothing dropped"
FAST, KEYDIFF = "0.5 – fastkvzip", "0.5 – keydiff"


@pytest.fixture(scope="module")
def url(python: Sequence[str]) -> Iterator[str]:
    given = [
        part for name in PROFILES for part in ("--profile", str(find_shipped_profiles() / name))
    ]
    given += ["--kv-cache-gib", "0.3", "--speculative-config", DRAFTS]
    with run_real_server(*given, python=python) as url:
        yield url


@pytest.fixture(scope="module")
def page(browser: Any, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    document = tmp_path_factory.mktemp("compare") / "document.md"
    document.write_text((ROOT / "docs" / "kv-cache.md").read_text()[:2600])
    with open_page(browser, url) as watched:
        page = watched.page
        page.context.set_default_timeout(120_000)
        open_compare(page)
        page.get_by_label("Question").fill("What is this text about?")
        page.get_by_label("Text files").set_input_files(document)
        page.get_by_label("Most tokens").fill("16")
        yield page


def compare(page: Any, left: str, right: str) -> list[dict[str, str]]:
    """The figures of both sides, once both have ended."""
    page.get_by_label("Left").select_option(label=left)
    page.get_by_label("Right").select_option(label=right)
    page.get_by_role("button", name="Compare").click()
    sides = [
        page.get_by_role("article", name=f"Answer with {name}", exact=True)
        for name in (left, right)
    ]
    for side in sides:
        side.locator("dt", has_text="KV cache").wait_for()
    page.get_by_role("button", name="Compare").wait_for()
    return [
        dict(
            zip(
                side.locator("dt").all_inner_texts(),
                side.locator("dd").all_inner_texts(),
                strict=True,
            )
        )
        for side in sides
    ]


def share(figures: dict[str, str]) -> int:
    """The percentage of an uncompressed cache."""
    return int(figures["KV cache"].partition("(")[2].partition(" ")[0])


def test_every_served_way_is_offered(page: Any) -> None:
    ways = [f"{WHOLE}, with drafts", f"{WHOLE}, without drafts", "0.25 – fastkvzip", FAST, KEYDIFF]
    for label in ("Left", "Right"):
        expect(page.get_by_label(label).locator("option")).to_have_text(ways)


def test_two_scorers_hold_as_much_and_other_entries(page: Any) -> None:
    held = [share(figures) for figures in compare(page, FAST, KEYDIFF)]
    assert held[0] < 95 and abs(held[0] - held[1]) <= 2
    expect(page.locator(".verdict")).to_have_count(1)
    url = page.url.partition("#")[0]
    model = httpx.get(f"{url}v1/kv/model").json()
    budgets = {
        entry["scorer"]: entry["budgets"]
        for entry in model["retentions"]
        if entry["kv_retention"] == 0.5
    }
    assert budgets["fastkvzip"] != budgets["keydiff"]


def test_drafts_of_a_lossless_answer_change_no_word(page: Any) -> None:
    drafted, plain = compare(page, f"{WHOLE}, with drafts", f"{WHOLE}, without drafts")
    page.get_by_text("Both answers are equal: drafts change the speed, and no word.").wait_for()
    assert share(drafted) == share(plain) >= 100
    kept = int(drafted["Drafts kept"].split()[0])
    assert kept > 0 and plain["Drafts kept"] == "0 of 0"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("0.7 – keydiff", {"kv_retention": 0.7}),
        ("0.5 – snapkv", {"kv_retention": 0.5, "kv_scorer": "snapkv"}),
    ],
)
def test_what_the_server_refuses_stands_in_its_column(
    browser: Any, url: str, name: str, fields: dict[str, Any]
) -> None:
    """A page may still offer what the server had before it was started again."""
    ratio, _, scorer = name.partition(" – ")
    former = {"kv_retention": float(ratio), "scorer": scorer, "budgets": [], "drafted": False}

    def add_former(route: Any) -> None:
        model = httpx.get(f"{url}/v1/kv/model").json()
        model["retentions"].append({**former, "default": False})
        route.fulfill(json=model)

    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    asked = {"model": model, "messages": [{"role": "user", "content": "Who?"}], **fields}
    refused = httpx.post(f"{url}/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    with open_page(browser, url, ignores=("400",)) as watched:
        page = watched.page
        page.context.set_default_timeout(120_000)
        page.route("**/v1/kv/model", add_former)
        open_compare(page)
        page.reload()
        page.get_by_label("Question").fill("Who?")
        page.get_by_label("Most tokens").fill("4")
        refusal, answer = compare(page, name, FAST)
        assert refusal["Prompt + answer"] == "–" and "tokens" in answer["Prompt + answer"]
        message = refused.json()["error"]["message"]
        expect(page.get_by_role("alert")).to_have_text([message])
        side = page.get_by_role("article", name=f"Answer with {name}", exact=True)
        expect(side.get_by_role("alert")).to_have_count(1)
        expect(page.locator(".verdict")).to_have_count(0)
