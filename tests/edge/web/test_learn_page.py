"""/learn in a real browser: each chapter opens, and its widget computes what the Python does."""

from __future__ import annotations

# isort: off
import tests.interpreter  # noqa: F401, before Triton is imported

# isort: on
import json
import math
import re
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import expect

from bench.roofline import Ceiling, StepModel
from tangram.compress.profile import Profile
from tangram.serve.transport.static_files import HEADERS
from tangram.sizing.cache_size import fit, kv_size
from tangram.sizing.weight_size import Weights
from tangram.speculate.pace import expected_tokens
from tangram.web.chat_alone import FILES
from tangram_lab.naive import count_naive_positions
from tests.edge.web.browser import DESKTOP, PHONE, ROOT, WatchedPage, faults, open_page
from tests.running import run_app
from tools.learn_data import CARDS, PROFILES, shipped_profile, source_of
from tools.learn_schedule import count_steps
from tools.learn_site import FOLDER, site_files

pytestmark = pytest.mark.browser
CHAPTERS = 11


class PlainHostHandler(SimpleHTTPRequestHandler):
    """A plain web host, with the headers of the engine's own server."""

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def web_host(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PlainHostHandler, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/some/path/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder that `make site` makes, below some path of a web host."""
    root = tmp_path_factory.mktemp("site")
    for place, path in site_files().items():
        target = root / "some" / "path" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    with web_host(root) as url:
        yield f"{url}{FOLDER}/"


@pytest.fixture(scope="module")
def opened(browser: Any, site: str) -> Iterator[WatchedPage]:
    """The page with all widgets ready; at its end it has logged no error and asked no other host.

    Tests of a module share it, each in its own chapter.
    """
    with open_page(browser, site) as watched:
        wait_for_widgets(watched.page)
        yield watched


@pytest.fixture
def page(opened: WatchedPage) -> Any:
    return opened.page


def wait_for_widgets(page: Any) -> None:
    page.locator("[data-ready]").nth(CHAPTERS - 1).wait_for()
    page.get_by_text("Loading …").first.wait_for(state="detached")


def chapter(page: Any, name: str) -> Any:
    return page.locator(f"#{name} .widget")


def figure(widget: Any, name: str) -> str:
    """The value of a figure by its name."""
    found = widget.locator(".figures div", has=widget.page.get_by_text(name, exact=True)).first
    return str(found.locator("dd").inner_text())


def slide(widget: Any, label: str, *keys: str) -> None:
    """Move a slider by keys."""
    slider = widget.get_by_label(label, exact=True)
    slider.focus()
    for key in keys:
        slider.press(key)


def choose(widget: Any, label: str, option: str) -> None:
    widget.get_by_label(label, exact=True).select_option(label=option)


def row(widget: Any, head: str) -> list[str]:
    """The cells of the table row that begins with `head`."""
    found = widget.locator("tr", has=widget.page.locator(f'th[scope="row"]:text-is("{head}")'))
    return [str(cell) for cell in found.first.locator("th, td").all_inner_texts()]


def test_naive_decoding(page: Any) -> None:
    widget = chapter(page, "naive")
    assert figure(widget, "Positions, no cache") == "5,050"
    assert figure(widget, "Positions, KV cache") == "100"
    slide(widget, "Tokens", "End")
    assert figure(widget, "Positions, no cache") == "8,390,656"
    slide(widget, "Prompt tokens", "End")
    assert figure(widget, "Positions, no cache") == f"{count_naive_positions(2000, 4096):,}"
    measured = json.loads((ROOT / "bench" / "results" / "naive_decoding.json").read_text())
    seconds = statistics.median(measured["naive"]["seconds"])
    assert f"5,050 positions and {seconds:.1f} s without a cache" in widget.inner_text()


def test_the_cache_by_hand(page: Any) -> None:
    widget = chapter(page, "cache")
    for _ in range(4):
        widget.get_by_role("button", name="Next token").click()
    assert row(widget, "because")[-1] == "projected now"
    assert row(widget, "sky")[-1] == "read"
    assert float(figure(widget, "Largest difference")) < 1e-12
    assert figure(widget, "Projections of this step") == "1 instead of 5"


def test_what_it_costs(page: Any) -> None:
    widget = chapter(page, "cost")
    assert row(widget, "deepseek-v3")[2:] == ["70,272", "2.09 GiB"]
    choose(widget, "Model", "qwen3-32b")
    slide(widget, "Retention ratio ρ", "Home", *["ArrowRight"] * 3)
    size = kv_size("qwen3-32b", 32_768, retention=0.25)
    assert figure(widget, "A token") == f"{size.bytes_per_token:,} bytes"
    assert figure(widget, "Pages") == f"{size.pages:,}"
    assert figure(widget, "At ρ 0.25, at most") == f"{size.compressed_bytes / 2**30:.2f} GiB"
    h200 = next(card for card in CARDS if card["name"] == "H200")
    weights = Weights(read_parameters("qwen3-32b"), "bfloat16", "config.json")
    found = fit(size, weights, 0.9 * h200["memory_gib"])
    assert row(widget, "H200")[3:] == [f"{found.sequences:,}", f"{found.tokens:,}"]
    choose(widget, "Attention", "MHA: a KV head for each query head")
    assert figure(widget, "A token") == f"{8 * size.bytes_per_token:,} bytes"
    choose(widget, "Cache elements", "4-bit")
    assert figure(widget, "A token") == f"{2 * size.bytes_per_token:,} bytes"
    choose(widget, "Model", "kimi-k2")
    latent = kv_size("kimi-k2", 32_768, retention=0.25)
    assert figure(widget, "A page") == f"{latent.page_bytes / 4 / 1024} KiB"  # of 4 bits, not 16
    assert figure(widget, "Pages") == f"{latent.pages:,}"


def read_parameters(model: str) -> int:
    from tangram.model.config_json import read_config
    from tangram.sizing.weight_size import read_weights

    return read_weights(read_config(model), "bfloat16").parameters


def test_the_memory_wall(page: Any) -> None:
    widget = chapter(page, "wall")
    assert figure(widget, "Crossover batch, without a cache") == "296"
    slide(widget, "Batch", "Home", *["ArrowRight"] * 8)
    assert figure(widget, "FLOP per byte") == "256.0"
    assert figure(widget, "Limited by") == "memory bandwidth"
    slide(widget, "Batch", "ArrowRight")
    assert figure(widget, "Limited by") == "arithmetic"
    slide(widget, "Tokens of context each", "End")
    assert figure(widget, "Limited by") == "memory bandwidth"
    points = json.loads((site_files()[f"{FOLDER}/page/learn/data/roofline.json"]).read_text())
    assert len(points["kernels"]) > 50
    expect(widget.locator("circle.kernel")).to_have_count(len(points["kernels"]))
    expect(widget.locator("circle.whole")).to_have_count(2)
    legend = widget.locator(".legend").inner_text()
    assert "whole steps" in legend.split("measured: ")
    choose(widget, "Card", "H200")
    expect(widget.locator("circle.whole")).to_have_count(0)
    assert "H200 data sheet" in widget.inner_text()


# [value, place] of each tick of the chart's axes, and [cx, cy] of each circle by its kind.
CHART = """(svg) => {
  const ticks = (anchor, place) =>
    [...svg.querySelectorAll(`.axes g text[text-anchor="${anchor}"]`)].map((text) => [
      Number(text.textContent.replaceAll(",", "")),
      Number(text.parentElement.querySelector("line").getAttribute(place)),
    ]);
  const circles = {};
  for (const circle of svg.querySelectorAll("circle")) {
    const [cx, cy] = ["cx", "cy"].map((name) => Number(circle.getAttribute(name)));
    (circles[circle.getAttribute("class")] ??= []).push([cx, cy]);
  }
  return { intensity: ticks("middle", "x1"), teraflops: ticks("end", "y1"), circles };
}"""


def place_of(ticks: list[list[float]], value: float) -> float:
    """Where `value` stands on a logarithmic axis with `ticks`."""
    (low, begin), (high, end) = ticks[0], ticks[-1]
    return begin + math.log(value / low) / math.log(high / low) * (end - begin)


def test_points_stand_where_the_axes_say(page: Any) -> None:
    widget = chapter(page, "wall")
    choose(widget, "Card", "H100 SXM")
    chart = widget.locator("svg.chart").evaluate(CHART)
    data = json.loads(site_files()[f"{FOLDER}/page/learn/data/roofline.json"].read_text())
    shown = chart["circles"]["kernel"]
    assert len(shown) == len(data["kernels"]) > 50
    for circle, point in zip(shown, data["kernels"], strict=True):
        assert circle == pytest.approx(
            [
                place_of(chart["intensity"], point["intensity"]),
                place_of(chart["teraflops"], point["flops_per_s"] / 1e12),
            ]
        )


def test_prefill_is_limited_by_arithmetic(page: Any) -> None:
    widget = chapter(page, "wall")
    choose(widget, "Card", "H100 SXM")
    choose(widget, "Step", "prefill: one prompt")
    expect(widget.get_by_label("Batch", exact=True)).to_have_count(0)
    card = next(one for one in CARDS if one["name"] == "H100 SXM")
    ceiling = Ceiling(card["flops_per_s"], card["bytes_per_s"])
    model = StepModel.of("llama-3.1-8b")
    for keys, tokens, bound in (
        (["Home", "ArrowRight"], 128, "memory bandwidth"),
        (["Home", *["ArrowRight"] * 5], 2048, "arithmetic"),
    ):
        slide(widget, "Prompt tokens", *keys)
        flops, read = model.prefill(tokens)
        intensity = flops / read
        assert figure(widget, "FLOP per byte") == f"{intensity:.1f}"
        assert figure(widget, "Limited by") == bound
        most = tokens / ceiling.seconds(flops, read)
        assert figure(widget, "Tokens/s at most") == f"{most:,.0f}"
        chart = widget.locator("svg.chart").evaluate(CHART)
        assert chart["circles"]["step"] == [
            pytest.approx(
                [
                    place_of(chart["intensity"], intensity),
                    place_of(chart["teraflops"], ceiling.attainable(intensity) / 1e12),
                ]
            )
        ]
    choose(widget, "Step", "decode: a token each")
    slide(widget, "Tokens of context each", "Home")  # as the page begins
    expect(widget.get_by_label("Batch", exact=True)).to_have_count(1)


def test_tiled_attention(page: Any) -> None:
    widget = chapter(page, "tiles")
    slide(widget, "Tokens", "Home")
    choose(widget, "Side of a tile", "16")
    assert figure(widget, "Tiles of the matrix") == "16"
    assert figure(widget, "Computed").startswith("10 ")
    expect(widget.locator("rect.hidden")).to_have_count(6)


def test_online_softmax(page: Any) -> None:
    widget = chapter(page, "softmax")
    widget.get_by_label("Scores, up to eight").fill("0 0 1000 0")
    choose(widget, "Scores in a tile", "2")
    widget.get_by_role("button", name="Next tile").click()
    assert row(widget, "2–3")[2:4] == ["1000.0000", "0.0000"]
    assert figure(widget, "Accumulator / sum") == "2.0000"
    assert figure(widget, "Softmax of the whole row") == "2.0000"
    widget.get_by_label("Scores, up to eight").fill("one two")
    expect(widget.get_by_role("alert")).to_be_visible()
    widget.get_by_label("Scores, up to eight").fill("1 2 3")


def test_which_kernel_on_which_card(page: Any) -> None:
    widget = chapter(page, "kernels")
    assert row(widget, "Launches overlap")[1] == "yes"
    assert "gathered" in row(widget, "Later chunks")[1]
    choose(widget, "Card", "A100 80 GB")
    choose(widget, "Cache", "FP8")
    assert row(widget, "Cache")[1] == "FP8, converted by integer arithmetic"
    choose(widget, "Card", "T4")
    assert "uses the CPU" in widget.inner_text()


def test_paging(page: Any) -> None:
    widget = chapter(page, "paging")
    choose(widget, "Model", "qwen3-4b")
    slide(widget, "Conversations", "Home", "ArrowRight")
    slide(widget, "Tokens at the start of all", "Home", *["PageUp"] * 2)
    shared = int(widget.get_by_label("Tokens at the start of all").input_value())
    size = kv_size("qwen3-4b", shared + 300, retention=0.25)
    separate = int(figure(widget, "Pages, each for itself").split(" = ")[0].replace(",", ""))
    assert separate == 2 * size.pages
    found = int(figure(widget, "Prompt tokens found, from the second on").replace(",", ""))
    in_tail = shared // 512 == (shared + 300) // 512
    assert found == (shared // 16 * 16 if in_tail else shared // 512 * 512)


def test_batching(page: Any) -> None:
    widget = chapter(page, "batching")
    recorded = json.loads((ROOT / "bench" / "results" / "schedules.json").read_text())
    for kind, found in recorded["schedules"].items():
        assert row(widget, kind)[2] == str(len(found["steps"]))
    bars = [
        (float(bar.get_attribute("x")), float(bar.get_attribute("y")))
        for bar in widget.locator("svg.replay").first.locator("rect").all()
    ]
    begun = [min(x for x, other in bars if other == y) for y in sorted({y for _, y in bars})]
    assert begun == sorted(begun), "a line is a request, in the order of their start"
    sealed = sum(
        kind == "seal"
        for found in recorded["schedules"].values()
        for step in found["steps"]
        for _, kind, _ in step["rows"]
    )
    expect(widget.locator("rect.seal")).to_have_count(sealed)
    assert ("sealing" in widget.locator(".legend").inner_text()) == (sealed > 0)
    widget.get_by_label("Your own answers, in tokens").fill("6 2 3 9 1")
    slide(widget, "Places in the batch", "Home", "ArrowRight")
    table = widget.locator("table").last
    for kind in ("continuous", "static"):
        steps = count_steps([6, 2, 3, 9, 1], 2, kind)  # type: ignore[arg-type]
        cells = table.locator("tr", has_text=kind).locator("td").all_inner_texts()
        assert cells[0] == str(len(steps))
        assert cells[1] == f"{100 * sum(map(len, steps)) / (2 * len(steps)):.0f} %"
    slide(widget, "Second", "Home")
    assert "4 sequences run" in widget.locator("figcaption").first.inner_text()
    second = widget.get_by_label("Second", exact=True)
    widget.get_by_role("button", name="Replay").click()
    page.wait_for_function("(slider) => slider.value > 0", arg=second.element_handle())
    widget.get_by_role("button", name="Pause").click()
    expect(widget.get_by_role("button", name="Replay")).to_be_visible()
    stopped = second.input_value()
    page.wait_for_timeout(100)
    expect(second).to_have_value(stopped)


def test_a_chunk_that_decode_has_filled_is_marked_where_it_is_sealed(
    browser: Any, site: str
) -> None:
    def add_seal(route: Any) -> None:
        recorded = route.fetch().json()
        (_, rows), *_ = recorded["schedules"]["continuous"]["steps"]
        rows[0][1] = "seal"
        route.fulfill(json=recorded)

    with open_page(browser, site) as watched:
        watched.page.route("**/data/schedules.json", add_seal)
        watched.page.reload()
        wait_for_widgets(watched.page)
        widget = chapter(watched.page, "batching")
        expect(widget.locator("rect.seal")).to_have_count(1)
        expect(widget.locator(".legend")).to_contain_text("sealing a chunk")


def test_speculation(page: Any) -> None:
    widget = chapter(page, "speculation")
    slide(widget, "Drafts γ", "End")
    slide(widget, "Acceptance a", "End")
    assert figure(widget, "Tokens of an iteration") == f"{expected_tokens(0.99, 16)[16]:.2f}"
    slide(widget, "Acceptance a", "Home")
    assert figure(widget, "Tokens of an iteration") == "1.00"
    assert figure(widget, "Best number of drafts").startswith("0:")


def test_compressed_caches(page: Any) -> None:
    widget = chapter(page, "compression")
    profile = shipped_profile(PROFILES[0])
    assert kept_pages(widget) == pages_of(profile)
    heads = widget.get_by_label("Budgets of heads")
    slide(heads, "Retention ratio ρ", *["ArrowRight"] * 10)
    larger = profile.model_copy(update={"kv_retention": 0.35}).with_pages(16, 4)
    assert kept_pages(widget) == pages_of(larger)
    even, balanced = widget.get_by_label("Ahead-of-time balancing"), "Workers busy, by budgets"
    busy = [int(figure(even, n).split()[0]) for n in ("Workers busy, equal parts", balanced)]
    assert busy[0] < busy[1] <= 100


def kept_pages(widget: Any) -> dict[tuple[int, int], int]:
    """By layer and head, as the grid's titles say."""
    titles = widget.locator("svg.grid title").all_text_contents()
    found = [re.fullmatch(r"layer (\d+), head (\d+): (\d+) of 32 pages", one) for one in titles]
    return {(int(one[1]), int(one[2])): int(one[3]) for one in found if one is not None}


def pages_of(profile: Profile) -> dict[tuple[int, int], int]:
    pairs = zip(profile.groups, profile.sealed_pages, strict=True)
    return {head: pages for group, pages in pairs for head in group}


def test_the_reader_edits_the_tree(page: Any) -> None:
    widget = chapter(page, "compression").get_by_label("Shared prefixes in one plan")
    text = widget.get_by_label("Conversations of a batch, as a tree")
    text.fill("2 chunks\n  1 conversation, 476 entries\n  1 conversation, 176 entries")
    slide(widget, "Entries a head keeps of a chunk", "End")
    # The worked example of tangram/plan/packing.py.
    assert figure(widget, "Entries read, each row alone") == "2,700"
    assert figure(widget, "Entries read, packed where it pays") == "1,676"
    text.fill("2 chunks\n  many conversations")
    assert "line 2" in widget.get_by_role("alert").inner_text()
    text.fill("1 chunk\n  2 conversations, 5 entries")
    expect(widget.get_by_role("alert")).to_have_count(0)


def test_source_opens_by_keyboard(page: Any) -> None:
    summary = page.locator("#cost details summary").first
    summary.focus()
    summary.press("Enter")
    code = page.locator("#cost details pre").first
    code.wait_for()
    page.locator("#cost details pre", has_text="def uncompressed_bytes").wait_for()
    assert code.inner_text() == source_of("tangram/sizing/cache_size.py:KVSize.uncompressed_bytes")


def test_the_contents_lead_to_the_chapters(page: Any) -> None:
    assert not page.get_by_text("Talk to the model").is_visible(), "a static site has no model"
    expect(page.locator("nav li a")).to_have_count(CHAPTERS)
    for link in page.locator("nav a").all():
        expect(page.locator(str(link.get_attribute("href")))).to_have_count(1)


@pytest.mark.parametrize("view", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["wall", "compression"])
def test_a_link_to_a_chapter_lands_there(
    browser: Any, site: str, view: dict[str, Any], name: str
) -> None:
    """Widgets above it come after the browser's own jump, and are thousands of pixels high."""
    held: list[Any] = []
    with open_page(browser, "about:blank", **view) as watched:
        page = watched.page
        page.route(
            "**/chapters/*.js",
            lambda route: route.continue_() if len(held) == CHAPTERS else held.append(route),
        )
        page.goto(f"{site}#{name}")
        while len(held) < CHAPTERS:
            page.wait_for_timeout(20)
        for module in held:
            module.continue_()
        wait_for_widgets(page)
        wait_until_at_top(page, name)
        watched.hosts.clear()  # `open_page` began at no host


def wait_until_at_top(page: Any, name: str) -> None:
    """Wait until the chapter begins at the top of the window."""
    page.wait_for_function(
        "(name) => Math.abs(document.getElementById(name).getBoundingClientRect().top) < 40",
        arg=name,
    )


def test_the_reader_is_not_drawn_back_to_the_chapter_of_the_address(
    browser: Any, site: str
) -> None:
    with open_page(browser, f"{site}#paging") as watched:
        page = watched.page
        wait_for_widgets(page)
        wait_until_at_top(page, "paging")
        page.mouse.wheel(0, -3000)
        page.wait_for_function(
            "() => document.getElementById('paging').getBoundingClientRect().top > 2000"
        )
        page.locator("#kernels details summary").first.click()  # the page grows
        page.locator("#kernels details pre").first.wait_for()
        place = "() => document.getElementById('paging').getBoundingClientRect().top"
        assert page.evaluate(place) > 100
        page.get_by_role("link", name="The memory wall").click()
        wait_until_at_top(page, "wall")


@contextmanager
def own_server() -> Iterator[str]:
    """The engine's own files and headers, without an engine."""
    app = FastAPI(docs_url=None, redoc_url=None)
    FILES.mount(app)
    with run_app(app) as running:
        yield f"{running.url}/learn"


def test_the_server_has_the_same_page(browser: Any) -> None:
    with own_server() as url, open_page(browser, url) as watched:
        wait_for_widgets(watched.page)
        assert figure(chapter(watched.page, "naive"), "Positions, no cache") == "5,050"
        talk = watched.page.get_by_role("link", name="Talk to the model")
        assert talk.evaluate("(link) => link.href") == url.removesuffix("learn")


def test_a_picture_of_the_page(
    browser: Any, site: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`--pictures` makes the one of README and docs."""
    made = request.config.getoption("pictures")
    target = (ROOT / "docs" / "pictures" if made else tmp_path) / "learn.png"
    size = {"width": 1200, "height": 860}
    still = {"viewport": size, "color_scheme": "light", "reduced_motion": "reduce"}
    with open_page(browser, site, **still) as watched:
        wait_for_widgets(watched.page)
        widget = chapter(watched.page, "wall")
        slide(widget, "Batch", "Home", *["ArrowRight"] * 5)
        slide(widget, "Tokens of context each", "Home", *["ArrowRight"] * 4)
        widget.evaluate("(one) => { document.activeElement.blur(); one.scrollIntoView(); }")
        watched.page.screenshot(path=target)
    assert target.stat().st_size > 20_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width_and_theme(browser: Any, site: str, scheme: str) -> None:
    size = {"width": 360, "height": 740}
    with open_page(browser, site, viewport=size, color_scheme=scheme) as watched:
        page = watched.page
        wait_for_widgets(page)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
        ground = "() => getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        page.get_by_role("button", name="Dark or light").click()
        assert page.evaluate(ground) != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_no_serious_fault(
    browser: Any, site: str, scheme: str, view: dict[str, Any]
) -> None:
    with open_page(browser, site, color_scheme=scheme, **view) as watched:
        wait_for_widgets(watched.page)
        for details in watched.page.locator("details summary").all():
            details.click()
        watched.page.locator("details pre").last.wait_for()
        assert faults(watched.page) == []
