"""A conversation of 8K tokens stays smooth, measured in the browser.

The fake server streams faster than the embedded model and costs little. The nightly form has the
real one, which shares the processor's cores with the browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import psutil
import pytest

from tests.edge.web.browser import ROOT, open_page, paste, send
from tests.edge.web.fake_server import run_fake_page
from tests.edge.web.painted import SCRIPT
from tests.edge.wire.conftest import run_real_server

pytestmark = [pytest.mark.browser, pytest.mark.serial]
DOCUMENT_TOKENS = 8000
# Some 7,300 tokens of the embedded model, which leave space for an answer.
TEXT = "".join((ROOT / "docs" / name).read_text() for name in ("kv-cache.md", "architecture.md"))
CHARACTERS = 27_000
MEASURED_S = 5
MOST_MEASUREMENTS = 8
LEAST_FRAMES_PER_S = 30
# Of the processors' time, what a host may give to other machines in a measurement that judges.
MOST_STOLEN = 0.01
MOST_DELAY_MS = 100
# Notes when each event `request` was read from the stream, when the caption says how many tokens
# there are, and every frame. `painted.SCRIPT` notes each draw of the text.
CLOCK = """
(() => {
  window.events = [];
  window.captions = [];
  window.frames = [];
  const read = ReadableStreamDefaultReader.prototype.read;
  ReadableStreamDefaultReader.prototype.read = async function () {
    const given = await read.call(this);
    if (given.value) {
      const text = new TextDecoder().decode(given.value);
      for (const [, data] of text.matchAll(/event: request\\ndata: (.*)\\n/g)) {
        window.events.push([JSON.parse(data).tokens, performance.now()]);
      }
    }
    return given;
  };
  const note = () => {
    const caption = document.querySelector(".cache .caption")?.textContent ?? "";
    const tokens = Number(caption.split(" ")[0].replaceAll(",", ""));
    if (tokens !== window.captions.at(-1)?.[0]) window.captions.push([tokens, performance.now()]);
  };
  const all = { subtree: true, childList: true, characterData: true };
  new MutationObserver(note).observe(document, all);
  const frame = (now) => {
    window.frames.push(now);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})();
"""


@dataclass(frozen=True)
class Streaming:
    """The page while an answer streams: so many `events` of it come in a second, at least."""

    page: Any
    events: float


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.nightly)])
def streaming(browser: Any, request: pytest.FixtureRequest) -> Iterator[Streaming]:
    """The page while an answer to a question about 8,000 tokens streams."""
    with ExitStack() as stack:
        if request.param == "fake":
            document = " ".join(f"word{at}" for at in range(DOCUMENT_TOKENS))
            events, question = 20.0, "Answer long 5000"
            url = stack.enter_context(run_fake_page(token_s=1 / 60, pages=131_072)).url
        else:
            document, events, question = TEXT[:CHARACTERS], 5.0, "Write a long story."
            options = ("--kv-cache-gib", "0.5", "--max-model-len", "8192")
            # Its process imports for some time, which would disturb the form with the fake server.
            python = request.getfixturevalue("python")
            url = stack.enter_context(run_real_server(*options, python=python))
        page = stack.enter_context(open_page(browser, url)).page
        page.set_default_timeout(120_000)
        page.add_init_script(SCRIPT)
        page.add_init_script(CLOCK)
        page.reload()
        paste(page, document)
        send(page, question)
        page.locator(".cache .caption", has_text=re.compile("^[78],.* tokens, running")).wait_for()
        page.locator(".message.assistant .markdown", has_text=re.compile(r"\w")).wait_for()
        yield Streaming(page, events)
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Send").wait_for()


@pytest.fixture(scope="module")
def measured(streaming: Streaming) -> dict[str, list[Any]]:
    """The calmest of a few measurements: what else runs here can only make them worse.

    Skips if the host of this virtual machine gave its processors to others in all of them.
    """
    taken: list[dict[str, list[Any]]] = []
    while len(taken) < MOST_MEASUREMENTS:
        taken.append(now := measure(streaming.page))
        calm = worst_delay(now) <= MOST_DELAY_MS and count_undrawn(now) <= most_undrawn(now)
        if calm and frames_per_s(now) >= LEAST_FRAMES_PER_S:
            return now
    whole = [one for one in taken if one["stolen"][0] <= MOST_STOLEN]
    if not whole:
        least = min(one["stolen"][0] for one in taken)
        pytest.skip(f"the host took {least:.0%} of the processors and more while this was measured")
    return min(whole, key=worst_delay)


def measure(page: Any) -> dict[str, list[Any]]:
    names = ("events", "captions", "frames", "paintedAt")
    page.evaluate(f"() => [{', '.join(names)}].forEach((list) => (list.length = 0))")
    before = psutil.cpu_times()
    page.wait_for_timeout(1000 * MEASURED_S)
    after = psutil.cpu_times()
    # Only Linux tells of it.
    taken = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    stolen = taken / (sum(after) - sum(before))
    return {name: page.evaluate(f"() => window.{name}") for name in names} | {"stolen": [stolen]}


def test_frames_keep_coming_while_tokens_stream(measured: dict[str, list[Any]]) -> None:
    per_s = frames_per_s(measured)
    print(f"{per_s:.0f} frames/s, {len(measured['events']) / MEASURED_S:.0f} events/s")
    assert per_s >= LEAST_FRAMES_PER_S


def test_the_text_is_painted_soon_after_an_event(
    streaming: Streaming, measured: dict[str, list[Any]]
) -> None:
    assert count_undrawn(measured) <= most_undrawn(measured)
    assert len(measured["events"]) > streaming.events * MEASURED_S
    median, worst = quantiles(delays_of(measured), n=2)[0], worst_delay(measured)
    print(f"median {median:.0f} ms, 95th percentile {worst:.0f} ms")
    assert worst <= MOST_DELAY_MS


def frames_per_s(measured: dict[str, list[Any]]) -> float:
    frames: list[float] = measured["frames"]
    return 1000 * (len(frames) - 1) / (frames[-1] - frames[0])


def count_undrawn(measured: dict[str, list[Any]]) -> int:
    return len(measured["events"]) - len(delays_of(measured))


def most_undrawn(measured: dict[str, list[Any]]) -> float:
    """How many events may be drawn behind the end of the measurement."""
    return 1 + MOST_DELAY_MS / 1000 * len(measured["events"]) / MEASURED_S


def delays_of(measured: dict[str, list[Any]]) -> list[float]:
    """Milliseconds from each event to the draw that shows it."""
    return [
        drawn - at
        for tokens, at in measured["events"]
        if (drawn := first_draw(measured, tokens)) is not None
    ]


def worst_delay(measured: dict[str, list[Any]]) -> float:
    """The 95th percentile."""
    return quantiles(delays_of(measured), n=20)[-1]


def first_draw(measured: dict[str, list[Any]], tokens: int) -> float | None:
    """When the text was first drawn with at least `tokens`, in the browser's milliseconds."""
    told = next((at for shown, at in measured["captions"] if shown >= tokens), None)
    if told is None:
        return None
    return next((at for at in measured["paintedAt"] if at >= told), None)
