"""The cache beside the conversation, over a fake engine whose kept bits are known."""

from __future__ import annotations

import re
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from tests.edge.web.browser import WatchedPage, answers, ask, open_page, open_view, paste, send
from tests.edge.web.fake_cache import (
    CHUNK_TOKENS,
    DRAFT_RETENTION,
    KV_HEADS,
    LAYERS,
    RAW_TAIL,
    SEALED,
    SHARED,
    FakeRequest,
    budgets_of,
    kept_of,
)
from tests.edge.web.fake_server import FakeServer, run_fake_page
from tests.edge.web.painted import (
    FILLS,
    SCRIPT,
    Box,
    check_scale,
    filled_boxes,
    painted_tokens,
    rgb,
    spell,
    token_box,
)

pytestmark = pytest.mark.browser
# The colours that the map of pages has now.
POOL_COLOURS = """() => {
  const canvas = document.querySelector(".pool canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join());
  }
  return [...found];
}"""
# Notes every square of the map that is lit: its place, and how strongly.
LIGHTS = """
(() => {
  window.lights = [];
  const fill = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (x, y, ...size) {
    if (this.canvas.closest(".pool") && this.globalAlpha < 1) {
      window.lights.push([x, y, this.globalAlpha]);
    }
    return fill.call(this, x, y, ...size);
  };
})();
"""
# Counts the squares that the map of pages draws.
SQUARES = """
(() => {
  window.squares = 0;
  const fill = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (...box) {
    if (this.canvas.closest(".pool")) window.squares += 1;
    return fill.apply(this, box);
  };
})();
"""
# The colours of shares, as the text has them, too.
SCALE = """async (shares) => {
  const { shareGround } = await import("/page/app/cache/palette.js");
  return shares.map((share) => shareGround(share).match(/[0-9]+/g).map(Number));
}"""
FADE_MS = 700
DOCUMENT = " ".join(f"item{at}" for at in range(500))
HEADS = LAYERS * KV_HEADS
Head = tuple[int, int]
ALL_HEADS = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]


@pytest.fixture
def asked(page: Any, fake: FakeServer) -> FakeRequest:
    """A question about a long document, answered; its request."""
    page.add_init_script(SCRIPT)
    page.add_init_script(FILLS)
    page.reload()
    paste(page, DOCUMENT)
    ask(page, "What is item seven?")
    request = list(fake.cache.requests.values())[-1]
    page.get_by_text(f"{len(request.tokens)} tokens, ended").wait_for()
    page.wait_for_timeout(200)
    return request


def share(request: FakeRequest, position: int) -> float:
    """The share of heads that hold a token; those after the last chunk are not compressed."""
    chunk, at = divmod(position, CHUNK_TOKENS)
    if chunk >= request.chunks:
        return 1.0
    return float(kept_of(chunk, request.retention)[:, :, at].mean())


def held_by(request: FakeRequest, layer: int, head: int) -> list[bool]:
    """Whether a head holds each token; those after the last chunk are not compressed."""
    chunks = [kept_of(chunk, request.retention)[layer, head] for chunk in range(request.chunks)]
    sealed = [bool(kept) for chunk in chunks for kept in chunk]
    return sealed + [True] * (len(request.tokens) - len(sealed))


def grid_cells(page: Any) -> tuple[dict[Head, Box], dict[Head, Box]]:
    """The cells of the upper and of the lower grid: a column is a layer, a row a head."""
    boxes = filled_boxes(page, "heads")
    columns, rows = sorted({box.x for box in boxes}), sorted({box.y for box in boxes})
    assert (len(columns), len(rows), len(boxes)) == (LAYERS, 2 * KV_HEADS, 2 * HEADS)
    upper, lower = (
        {(columns.index(box.x), of_grid.index(box.y)): box for box in boxes if box.y in of_grid}
        for of_grid in (rows[:KV_HEADS], rows[KV_HEADS:])
    )
    return upper, lower


def test_every_token_is_painted_by_the_share_of_heads_that_keep_it(
    page: Any, asked: FakeRequest
) -> None:
    painted = painted_tokens(page, asked.tokens)
    assert len(painted) == len(asked.tokens)
    check_scale({at: share(asked, at) for at in range(len(asked.tokens))}, painted)


def test_a_token_names_its_heads_and_a_head_shows_its_tokens(page: Any, asked: FakeRequest) -> None:
    page.get_by_label("Tokens, painted by the share").focus()
    page.keyboard.press("Home")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    held = round(share(asked, 5) * HEADS)
    page.get_by_text(
        f"Token 5 “{spell(asked.tokens[5])}”: held by {held} of {HEADS} heads (sealed)"
    ).wait_for()
    page.get_by_text("Below: those that hold this token.").wait_for()
    page.get_by_label("KV heads by layer").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    check_head_is_shown(page, asked, 1, 2)


def check_head_is_shown(page: Any, request: FakeRequest, layer: int, head: int) -> None:
    """The page says what the head holds, and paints these tokens alone."""
    held, tokens = held_by(request, layer, head), len(request.tokens)
    page.get_by_text(f"Layer {layer}, head {head}: holds {sum(held)} of {tokens} tokens").wait_for()
    painted = painted_tokens(page, request.tokens)
    assert [painted[at] is not None for at in range(tokens)] == held


@pytest.mark.parametrize("grid", [0, 1], ids=["upper", "lower"])
def test_pointing_at_a_head_shows_its_tokens(page: Any, asked: FakeRequest, grid: int) -> None:
    canvas = page.get_by_label("KV heads by layer")
    for layer, head, share_of_cell in ((2, 1, 0.1), (LAYERS - 1, KV_HEADS - 1, 0.9)):
        canvas.hover(position=grid_cells(page)[grid][layer, head].place(share_of_cell))
        check_head_is_shown(page, asked, layer, head)
    page.mouse.move(0, 0)
    page.get_by_text("Point at a token or a head").wait_for()
    check_scale(
        {at: share(asked, at) for at in range(len(asked.tokens))},
        painted_tokens(page, asked.tokens),
    )


def test_pointing_at_a_token_marks_the_heads_that_hold_it(page: Any, asked: FakeRequest) -> None:
    accent = page.evaluate(
        "() => getComputedStyle(document.documentElement).getPropertyValue('--accent').trim()"
    )
    budgets = {head: box.colour for head, box in grid_cells(page)[0].items()}
    last = (asked.chunks - 1) * CHUNK_TOKENS + 3
    for position in (9, CHUNK_TOKENS + 20, last):
        box = token_box(page, asked.tokens, position)
        page.get_by_label("Tokens, painted by the share").hover(position=box.place())
        page.get_by_text(f"Token {position} “{spell(asked.tokens[position])}”: held by").wait_for()
        page.get_by_text("Below: those that hold this token.").wait_for()
        page.wait_for_timeout(100)
        upper, lower = grid_cells(page)
        chunk, at = divmod(position, CHUNK_TOKENS)
        kept = kept_of(chunk, asked.retention)[:, :, at]
        marked = {head: box.colour == accent for head, box in lower.items()}
        assert marked == {head: bool(kept[head]) for head in ALL_HEADS}
        assert len({lower[head].colour for head in ALL_HEADS if not kept[head]}) == 1
        assert {head: box.colour for head, box in upper.items()} == budgets


def test_the_grids_show_what_heads_may_keep_and_what_they_hold(
    page: Any, asked: FakeRequest
) -> None:
    budgets, tokens = np.array(budgets_of(asked.retention)), len(asked.tokens)
    allowed = [float(budgets[head]) / CHUNK_TOKENS for head in ALL_HEADS]
    held = [sum(held_by(asked, *head)) / tokens for head in ALL_HEADS]
    assert len(set(allowed)) > 12
    for cells, shares in zip(grid_cells(page), (allowed, held), strict=True):
        colours = [rgb(cells[head].colour) for head in ALL_HEADS]
        check_scale(dict(enumerate(shares)), dict(enumerate(colours)))
        assert [list(colour) for colour in colours] == page.evaluate(SCALE, shares)


def test_the_text_shows_what_drafts_read(browser: Any) -> None:
    """Speculation with a compressed cache holds everything; its drafts read less."""
    with run_fake_page(drafts=True) as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        page.add_init_script(SCRIPT)
        page.reload()
        page.get_by_text("Settings of this conversation").click()
        page.get_by_label("KV retention").select_option("1 – nothing dropped")
        paste(page, DOCUMENT)
        ask(page, "What is item seven?")
        (request,) = fake.cache.requests.values()
        tokens = range(len(request.tokens))
        page.get_by_text(f"{len(tokens)} tokens, ended").wait_for()
        page.wait_for_timeout(200)
        check_scale(dict.fromkeys(tokens, 1.0), painted_tokens(page, request.tokens))
        page.get_by_label("Shown").select_option("what drafts read")
        page.get_by_text("entries read by drafts").wait_for()
        request.retention = DRAFT_RETENTION
        check_scale({at: share(request, at) for at in tokens}, painted_tokens(page, request.tokens))


def test_an_answer_without_drafts_says_so(browser: Any) -> None:
    """Nothing is drafted where entries are dropped: the text shows what is held."""
    with run_fake_page(drafts=True) as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        page.add_init_script(SCRIPT)
        page.reload()
        page.get_by_label("Shown").select_option("what drafts read")
        paste(page, DOCUMENT)
        ask(page, "What is item seven?")
        (request,) = fake.cache.requests.values()
        tokens = range(len(request.tokens))
        page.get_by_text(f"{len(tokens)} tokens, ended").wait_for()
        undrafted = page.get_by_text("This answer has no drafts, because its cache drops entries.")
        undrafted.wait_for()
        expect(page.get_by_text("entries held of")).to_have_count(1)
        expect(page.get_by_text("read by drafts")).to_have_count(0)
        check_scale({at: share(request, at) for at in tokens}, painted_tokens(page, request.tokens))
        page.get_by_text("Settings of this conversation").click()
        page.get_by_label("KV retention").select_option("1 – nothing dropped")
        ask(page, "And item eight?")
        page.get_by_text("entries read by drafts").wait_for()
        expect(undrafted).to_have_count(0)


def test_a_token_in_host_memory_says_so(page: Any, asked: FakeRequest, fake: FakeServer) -> None:
    asked.host_chunks.add(1)
    with page.expect_response(f"**/v1/kv/requests/{asked.id}*"):
        fake.tell("request", asked.event())
    page.wait_for_timeout(200)
    text = page.get_by_label("Tokens, painted by the share")
    for position, place in ((9, ""), (CHUNK_TOKENS + 20, ", in host memory")):
        text.hover(position=token_box(page, asked.tokens, position).place())
        held = round(share(asked, position) * HEADS)
        page.get_by_text(
            f"Token {position} “{spell(asked.tokens[position])}”: "
            f"held by {held} of {HEADS} heads (sealed){place}",
            exact=True,
        ).wait_for()
    check_scale(
        {at: share(asked, at) for at in range(len(asked.tokens))},
        painted_tokens(page, asked.tokens),
    )


def test_pointing_at_a_token_names_it(page: Any, asked: FakeRequest) -> None:
    page.locator(".text-map").evaluate("(e) => (e.scrollTop = 0)")
    page.get_by_label("Tokens, painted by the share").hover(position={"x": 15, "y": 15})
    page.get_by_text(f"Token 0 “{asked.tokens[0]}”").wait_for()


def test_a_touch_chooses_until_the_next(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url, has_touch=True) as watched:
        page = watched.page
        ask(page, "What is a page?")
        page.locator(".cache .caption", has_text="tokens, ended").wait_for()
        (request,) = fake.cache.requests.values()
        page.get_by_label("Tokens, painted by the share").tap(position={"x": 15, "y": 15})
        page.get_by_text(f"Token 0 “{request.tokens[0]}”").wait_for()
        steps = page.get_by_label("The last 400 steps")
        box = steps.bounding_box()
        steps.tap(position={"x": box["width"] - 1, "y": box["height"] - 2})
        page.get_by_text(f"Step {fake.cache.steps[-1]['n']}: ").wait_for()


def test_the_turns_table_says_what_was_reused(
    page: Any, asked: FakeRequest, fake: FakeServer
) -> None:
    ask(page, "And item eight?")
    second = list(fake.cache.requests.values())[-1]
    row = page.locator(".turns tbody tr").nth(1)
    sealed = str(second.chunks - second.cached_tokens // CHUNK_TOKENS)
    row.locator('[data-name="sealed"]').get_by_text(sealed, exact=True).wait_for()
    assert second.cached_tokens >= 400, "most of the document"
    cells = {name: row.locator(f'[data-name="{name}"]') for name in ("reused", "computed")}
    assert cells["reused"].inner_text() == str(second.cached_tokens)
    assert cells["computed"].inner_text() == str(second.prompt_tokens - second.cached_tokens)


def test_both_texts_are_shown_where_a_prompt_has_lost_its_prefix(page: Any) -> None:
    ask(page, "Why was nothing reused?")
    expect(page.get_by_text("computed again")).to_have_count(0)
    ask(page, "It has diverged ?")
    page.get_by_text("61,204 tokens were computed again").wait_for()
    earlier, now = (page.get_by_label(f"{side}, around token 41") for side in ("Earlier", "Now"))
    assert earlier.locator(".words").inner_text() == "Today is Monday. <b>Help</b> with"
    assert earlier.locator("mark").inner_text() == "Monday."
    assert now.locator("mark").inner_text() == "Tuesday."


def test_the_turns_table_says_how_many_drafts_were_kept(page: Any) -> None:
    ask(page, "With drafts please")
    page.get_by_role("columnheader", name="Drafts kept").wait_for()
    assert page.locator(".turns tbody td").last.inner_text() == "7 of 9"


def test_the_pages_are_counted_by_state(page: Any, asked: FakeRequest, fake: FakeServer) -> None:
    states = fake.cache.states
    kept = page.locator('.counts [data-state="5"] b')
    page.wait_for_timeout(400)
    assert kept.inner_text() == str((states == 5).sum())
    assert page.locator('.counts [data-state="host"]').inner_text() == "in host memory 3 of 50"
    send(page, "an endless answer")
    page.wait_for_function("() => document.querySelector('[data-state=\"2\"] b').innerText > 0")
    page.get_by_role("button", name="Stop").click()


def test_every_state_of_a_page_is_counted(page: Any, asked: FakeRequest, fake: FakeServer) -> None:
    """Promised pages are those that requests will still take of what can be had."""
    cache = fake.cache
    used = np.flatnonzero(cache.states != 0)[:6]
    cache.states[:] = 0
    cache.states[used] = [RAW_TAIL, SEALED, SEALED, SHARED, SHARED, SHARED]
    cache.owners[used] = asked.number
    cache.tell("lost", {})  # it reads the pool again
    free = cache.pages - len(used)
    counts = {0: free - cache.promised, 1: cache.promised, 2: 1, 3: 2, 4: 3, 5: 0}
    for state, count in counts.items():
        page.locator(f'.counts [data-state="{state}"] b', has_text=spell_count(count)).wait_for()
    page.get_by_label("A square for each page").focus()
    chosen, names = page.locator(".detail", has_text=re.compile("^Pages? [0-9]")), set[str]()
    for _ in range(int(used[-1]) + 2):
        page.keyboard.press("ArrowRight")
        names.add(chosen.inner_text().partition(": ")[2].partition(",")[0])
    assert {"raw tail", "sealed", "shared by several", "promised"} <= names


def spell_count(count: int) -> re.Pattern[str]:
    return re.compile(f"^{count:,}$")


def test_the_prompt_is_shown_while_it_is_computed(page: Any, fake: FakeServer) -> None:
    """The server may tell of a request before the page has its name."""
    paste(page, DOCUMENT)
    send(page, "This is slow")
    page.locator(".cache .caption", has_text="tokens, running").wait_for()
    assert answers(page) == [""]
    fake.computed.set()
    page.get_by_role("button", name="Send").wait_for()


def test_a_request_that_began_before_the_page_listens_is_shown(browser: Any) -> None:
    """No event tells of it any more, and its answer comes after all that the page asks."""
    with run_fake_page() as fake, open_page(browser, fake.url) as watched:
        page, held = watched.page, list[Any]()
        ask(page, "What is a page?")
        page.route("**/v1/kv/events", lambda route: held.append(route))
        with page.expect_request("**/v1/kv/events"):
            fake.tell("end", {})
        fake.answering.clear()
        send(page, "This is slow")
        for _ in range(500):
            if len(fake.cache.requests) == 2:
                break
            page.wait_for_timeout(20)
        with page.expect_response("**/v1/kv/pool"):
            held[0].continue_()
        page.wait_for_timeout(200)  # the answer of the pool is read
        fake.answering.set()
        page.locator(".cache .caption", has_text="tokens, running").wait_for()
        fake.computed.set()
        page.get_by_role("button", name="Send").wait_for()


def test_a_stopped_turn_has_its_row(page: Any, fake: FakeServer) -> None:
    paste(page, DOCUMENT)
    send(page, "an endless answer")
    page.locator(".markdown", has_text="again again again").wait_for()
    page.keyboard.press("Escape")
    row = page.locator(".turns tbody tr").first
    row.wait_for()
    request = list(fake.cache.requests.values())[-1]
    assert row.locator('[data-name="computed"]').inner_text() == str(
        request.prompt_tokens - request.cached_tokens
    )
    shown = page.locator(".message.assistant .run").inner_text()
    assert shown.startswith(f"{request.output_tokens} tokens") and "stopped" in shown


def test_an_answer_that_the_server_has_forgotten_says_so(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url, ignores=("404",)) as watched:
        ask(watched.page, "What is a page?")
        fake.cache.requests.clear()
        watched.page.reload()
        watched.page.get_by_text("The server has forgotten this answer's cache.").wait_for()


def test_conversations_have_colours_that_are_named(browser: Any) -> None:
    """Their pages keep the colour when the answer has ended."""
    with run_fake_page() as fake, open_page(browser, fake.url) as watched:
        page = watched.page
        paste(page, DOCUMENT)
        ask(page, "What is item seven?")
        page.get_by_role("button", name="New conversation").first.click()
        ask(page, "Another subject")
        one, other = (len(request.pages) for request in fake.cache.requests.values())
        page.get_by_label("Colours").select_option("conversation")
        key = page.get_by_role("list", name="Conversations in the pool").get_by_role("listitem")
        key.filter(has_text="Another subject (shown above)").wait_for()
        page.wait_for_timeout(1000)  # the last changes have faded
        assert [text.strip() for text in key.all_inner_texts()] == [
            f"Another subject (shown above) {other}",
            f"What is item seven? {one}",
        ]
        page.get_by_label("A square for each page").hover(position={"x": 3, "y": 3})
        page.get_by_text("Page 0: kept for nobody, “What is item seven?”").wait_for()
        page.mouse.move(0, 0)
        page.wait_for_timeout(100)
        colours = page.evaluate(POOL_COLOURS)
        assert len(colours) == 3, "free, and one for each conversation"


def lights_after(page: Any, ms: int) -> list[list[float]]:
    """What the map lights while its clock goes on by `ms`."""
    page.evaluate("() => (window.lights.length = 0)")
    page.clock.run_for(ms)
    found: list[list[float]] = page.evaluate("() => window.lights")
    return found


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_a_page_that_changes_lights_up_and_fades(browser: Any, motion: str) -> None:
    """Where less motion is wanted it has its new colour at once."""
    with (
        run_fake_page() as fake,
        open_page(browser, fake.url, ignores=("getImageData",), reduced_motion=motion) as watched,
    ):
        page = watched.page
        page.clock.install(time=0)
        page.add_init_script(LIGHTS)
        page.reload()
        ask(page, "What is a page?")
        page.locator(".cache .caption", has_text="tokens, ended").wait_for()
        page.clock.pause_at(3_600_000)
        assert lights_after(page, FADE_MS) == [], "all of before has faded"
        before = page.evaluate(POOL_COLOURS)
        fake.tell("pool", {"changes": [[40, 3, 9]], "host_used": 3, "promised": 0})
        first: list[list[float]] = []
        for _ in range(200):
            first = lights_after(page, 20)
            if first or page.evaluate(POOL_COLOURS) != before:
                break
        if motion == "reduce":
            assert first == []
        else:
            places = {(x, y) for x, y, _ in first}
            assert len(places) == 1, "the page that has changed, and no other"
            fading = [*first, *lights_after(page, FADE_MS // 2)]
            shown = [alpha for _, _, alpha in fading]
            assert {(x, y) for x, y, _ in fading} == places and len(shown) > 10
            assert shown == sorted(shown, reverse=True) and shown[0] > 0.9 > 0.6 > shown[-1]
            lights_after(page, FADE_MS // 2)
        assert lights_after(page, FADE_MS) == []
        new = set(page.evaluate(POOL_COLOURS)) - set(before)
        assert new == {"0,114,178"}, "sealed"


@pytest.mark.parametrize("ratio", [1, 1.25])  # pixels of the screen for one of the page
def test_the_map_draws_what_changed_and_shows_what_it_would_if_drawn_anew(
    browser: Any, ratio: float
) -> None:
    """A pool has thousands of squares: drawing all of them for each event costs frames."""
    with (
        run_fake_page() as fake,
        open_page(browser, fake.url, reduced_motion="reduce", device_scale_factor=ratio) as watched,
    ):
        page = watched.page
        page.add_init_script(SQUARES)
        page.reload()
        ask(page, "What is a page?")
        page.wait_for_timeout(300)
        squares = page.evaluate("() => window.squares = 0")
        picture = "() => document.querySelector('.pool canvas').toDataURL()"
        before = page.evaluate(picture)
        for changes, promised in (
            ([[at, 3, 9] for at in range(60, 80)], 7),
            ([[at, 0, 0] for at in range(65, 70)], 0),
        ):
            fake.tell("pool", {"changes": changes, "host_used": 3, "promised": promised})
            page.wait_for_function("(old) => window.squares > old", arg=squares)
            page.wait_for_timeout(100)
            squares = page.evaluate("() => window.squares")
        assert squares < 60, "20, 7 promised, 5 free again, and 7 no longer promised"
        changed = page.evaluate(picture)
        assert changed != before
        page.get_by_label("A square for each page").hover(position={"x": 3, "y": 3})
        page.mouse.move(0, 0)
        page.wait_for_function("(old) => window.squares > old + 900", arg=squares)
        page.wait_for_timeout(100)
        assert page.evaluate(picture) == changed


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_nothing_blinks_where_less_motion_is_wanted(
    browser: Any, fake: FakeServer, motion: str
) -> None:
    with open_page(browser, fake.url, reduced_motion=motion) as watched:
        page = watched.page
        send(page, "an endless answer")
        page.locator(".cursor").wait_for()
        moving = page.evaluate(
            "() => document.getAnimations().map((each) => each.animationName ?? 'a transition')"
        )
        assert moving == ([] if motion == "reduce" else ["blink"])
        page.get_by_role("button", name="Stop").click()


def test_the_map_is_drawn_before_anything_happens(browser: Any) -> None:
    with run_fake_page() as fake, open_page(browser, fake.url) as watched:

        def answer_late(route: Any) -> None:
            watched.page.wait_for_timeout(500)  # the frame of the map has its size before
            route.continue_()

        watched.page.route("**/v1/kv/pool", answer_late)
        watched.page.reload()
        watched.page.wait_for_function(
            "() => parseInt(document.querySelector('.pool canvas')?.style.height) > 50"
        )
        watched.page.wait_for_timeout(100)
        assert len(watched.page.evaluate(POOL_COLOURS)) == 2, "free and promised"


def test_the_steps_are_told(page: Any, asked: FakeRequest, fake: FakeServer) -> None:
    page.get_by_label("The last 400 steps").focus()
    page.keyboard.press("ArrowLeft")
    last = fake.cache.steps[-1]
    page.get_by_text(f"Step {last['n']}: ").wait_for()
    page.get_by_text("1 decode rows with 1 tokens").wait_for()


def test_a_step_names_its_chunks_tails_moves_and_drafts(
    page: Any, asked: FakeRequest, fake: FakeServer
) -> None:
    told = fake.cache.steps[-1] | {
        **{"n": 4711, "seconds": 0.25, "decode_rows": 3, "decode_tokens": 7},
        **{"chunks": 2, "tail_tokens": 31, "moves": 5, "drafted": 4, "accepted": 3},
    }
    fake.tell("step", told)
    page.get_by_label("The last 400 steps").focus()
    for part in (
        "Step 4711: ",
        "3 decode rows with 7 tokens",
        "2 chunks",
        "31 tail tokens",
        "5 moves",
        "3 of 4 drafts accepted",
    ):
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowRight")
        page.get_by_text(part).first.wait_for()


STEP = {
    **{"at": 0.0, "decode_rows": 1, "decode_tokens": 0, "chunks": 0, "tail_tokens": 0},
    **{"moves": 0, "drafted": 0, "accepted": 0},
}
# The longest is cut: its bar is as high as that of the longest but one.
STEPS = [
    STEP
    | {"n": 1, "seconds": 0.01, "decode_tokens": 3, "chunks": 2, "tail_tokens": 31, "moves": 5},
    STEP | {"n": 2, "seconds": 0.02, "decode_tokens": 7, "tail_tokens": 21},
    STEP | {"n": 3, "seconds": 0.03},
    STEP | {"n": 4, "seconds": 0.04, "decode_tokens": 1},
    STEP | {"n": 5, "seconds": 0.9, "moves": 2},
]


def test_a_bar_is_as_high_as_its_time_and_divided_by_what_it_computed(
    page: Any, asked: FakeRequest, fake: FakeServer
) -> None:
    fake.tell("hello", {"at": 0.0, "last_steps": STEPS})
    page.wait_for_function("() => window.filled.timeline.length === 9")  # of 4, 2, 1, 1 and 1 parts
    boxes = filled_boxes(page, "timeline")
    canvas = page.get_by_label("The last 400 steps").bounding_box()
    colours = page.locator('section[aria-label="Steps"] .counts i').evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each).backgroundColor)"
    )
    named = [
        "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour))
        for colour in colours
    ]
    columns = sorted({box.x for box in boxes})
    assert len(columns) == len(STEPS)
    assert columns[-1] + boxes[-1].width == pytest.approx(canvas["width"], abs=1), "the newest"
    for x, step in zip(columns, STEPS, strict=True):
        bar = [box for box in boxes if box.x == x]
        height = canvas["height"] * min(1, step["seconds"] / 0.04)
        weights = [
            step["decode_tokens"],
            step["chunks"] * CHUNK_TOKENS,
            step["tail_tokens"],
            step["moves"],
        ]
        parts = {
            colour: height * weight / sum(weights)
            for colour, weight in zip(named, weights, strict=True)
            if weight
        }
        shown = {box.colour: box.height for box in bar}
        if parts:
            assert shown == pytest.approx(parts)
        else:
            assert list(shown.values()) == pytest.approx([height])
        bottoms = [canvas["height"], *(box.y for box in bar)]
        assert [box.y + box.height for box in bar] == pytest.approx(bottoms[:-1]), "one on another"


def test_the_server_view_shows_the_last_hour(page: Any) -> None:
    open_view(page, "Server")
    page.get_by_role("img", name="Throughput, tokens/s over time").locator("canvas").wait_for()
    expect(page.locator(".plot canvas")).to_have_count(6)
    assert page.locator('[data-field="queue"]').inner_text() == "0"


def test_the_server_view_begins_without_numbers(watched: WatchedPage, fake: FakeServer) -> None:
    page = watched.page
    fields = httpx.get(f"{fake.url}/v1/kv/history?seconds=600").json()
    empty = {name: [] if isinstance(value, list) else value for name, value in fields.items()}
    quiet = {name: [None] if name.startswith("t") else [0] for name in fields} | {"step_s": 1}
    answers = iter([empty | {"step_s": 1}, quiet | {"at": [10]}])
    page.route("**/v1/kv/history*", lambda route: route.fulfill(json=next(answers, quiet)))
    open_view(page, "Server")
    page.locator('[data-field="running"]', has_text="–").wait_for()
    page.locator('[data-field="running"]', has_text="0").wait_for()
    assert page.locator('[data-field="ttft_p50"]').inner_text() == "–"


def test_the_server_view_ends_without_a_trace(page: Any) -> None:
    for name in ("Server", "Compare", "Server", "Chat"):
        open_view(page, name)
        page.wait_for_timeout(300)  # its charts are drawn, and cleaned up after the next frame
    page.get_by_label("Question", exact=True).wait_for()


def test_a_lost_connection_comes_back(page: Any, asked: FakeRequest, fake: FakeServer) -> None:
    """A watcher that missed events asks for the pool again."""
    free = int((fake.cache.states == 0).sum())
    fake.cache.states[-1] = 3
    fake.tell("lost", {})
    page.wait_for_function(
        "(free) => document.querySelector('[data-state=\"0\"] b').innerText == free", arg=free - 6
    )
    fake.cache.states[-1] = 0
