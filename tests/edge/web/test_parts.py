"""Modules of the page by themselves, in the browser that runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.edge.web.fake_cache import encode
from tests.edge.web.fake_server import FakeServer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def module_page(browser: Any, fake: FakeServer) -> Any:
    page = browser.new_page()
    page.goto(fake.url)
    return page


def test_events_come_whole_however_the_stream_is_cut(module_page: Any) -> None:
    stream = 'event: step\r\ndata: {"n": 1}\r\n\r\n: nothing new\n\ndata: é\ndata: two\n\n'
    found = module_page.evaluate(
        """async ([stream, size]) => {
          const { readEvents } = await import("/page/app/sse.js");
          const bytes = new TextEncoder().encode(stream);
          const body = new ReadableStream({
            start(controller) {
              for (let at = 0; at < bytes.length; at += size) {
                controller.enqueue(bytes.slice(at, at + size));
              }
              controller.close();
            },
          });
          const events = [];
          for await (const event of readEvents(body)) events.push(event);
          return events;
        }""",
        [stream, 1],
    )
    assert found == [{"event": "step", "data": '{"n": 1}'}, {"event": "message", "data": "é\ntwo"}]


@pytest.mark.parametrize(
    ("held", "whole", "said"),
    [
        (54, 100, "54 %"),
        (100, 100, "100 %"),
        (108, 100, "108 %, as pages and chunks of windows are held whole"),
    ],
)
def test_more_than_all_is_told_with_its_reason(
    held: int, whole: int, said: str, module_page: Any
) -> None:
    found = module_page.evaluate(
        """async (usage) => (await import("/page/app/format.js")).percentHeld(usage)""",
        {"kv_bytes": held, "kv_bytes_uncompressed": whole},
    )
    assert found == said


def test_heads_with_a_window_hold_the_chunks_that_it_reaches(module_page: Any) -> None:
    """Two layers of one head, the second with a window of 5 tokens; chunks of 4, three sealed."""
    kept = np.zeros((2, 4), bool)
    kept[0, 1] = kept[1] = True
    found = module_page.evaluate(
        """async (bits) => {
          const { RequestCache } = await import("/page/app/cache/request_cache.js");
          const model = {
            layers: 2, kv_heads: 1, chunk_tokens: 4, full_layers: [0], windows: [null, 5],
          };
          const cache = new RequestCache(model);
          const tokens = Array.from({ length: 14 }, (_, id) => ({ id, text: "a" }));
          const chunks = [0, 1, 2].map((index) => (
            { index, begin: 4 * index, end: 4 * index + 4, recorded: true, in: "device" }
          ));
          cache.take({ tokens, state: "ended", chunks, raw: { begin: 12, end: 13 } });
          for (const { index, begin } of chunks) {
            const shape = { layers: 2, kv_heads: 1, tokens: 4 };
            cache.takeKept(index, { chunk: index, begin, ...shape, bits });
          }
          const positions = tokens.map(({ id }) => id);
          return {
            held: [...cache.heldByRow()],
            window: positions.map((at) => cache.keeps(1, at)),
            shares: positions.map((at) => cache.share(at)),
          };
        }""",
        encode(np.packbits(kept, bitorder="little")),
    )
    assert found["held"] == [3 * 1 + 1, 4 + 1]
    assert found["window"] == [False] * 8 + [True] * 5 + [None]
    assert found["shares"] == [0, 1, 0, 0] * 3 + [1, None]


@pytest.mark.parametrize(
    ("state", "place", "there"),
    [("ended", "device", 6), ("ended", "host", 4), ("ended", "gone", 0), ("running", "host", 6)],
)
def test_the_tail_of_an_ended_request_goes_before_the_chunk(
    module_page: Any, state: str, place: str, there: int
) -> None:
    found = module_page.evaluate(
        """async ([state, place]) => {
          const { RequestCache, spellKind } = await import("/page/app/cache/request_cache.js");
          const model = {
            layers: 1, kv_heads: 1, chunk_tokens: 4, full_layers: [0], windows: [null],
          };
          const cache = new RequestCache(model);
          const tokens = Array.from({ length: 6 }, (_, id) => ({ id, text: "a" }));
          const chunks = [{ index: 0, begin: 0, end: 4, recorded: true, in: place }];
          cache.take({ tokens, state, chunks, raw: { begin: 4, end: 6 } });
          return [cache.cachedTokens, spellKind(cache.kinds[5])];
        }""",
        [state, place],
    )
    tail = "not compressed" if there == 6 else "no longer in the cache"
    assert found == [there, tail]


def test_a_late_answer_is_not_taken_for_the_request_that_is_shown_now(module_page: Any) -> None:
    texts = module_page.evaluate(
        """async () => {
          const { CacheWatch } = await import("/page/app/cache/watch.js");
          const { api } = await import("/page/app/api.js");
          const answers = {};
          api.request = (name) => new Promise((resolve) => {
            answers[name] = () => resolve({
              tokens: [{ id: 0, text: name }], state: "running", chunks: [],
              raw: { begin: 0, end: 1 },
            });
          });
          const watch = new CacheWatch();
          const model = { layers: 1, kv_heads: 1, full_layers: [0], windows: [null] };
          watch.status.set({ model });
          watch.show("one");
          watch.show("two");
          answers.one();
          while (answers.two === undefined) await new Promise((done) => setTimeout(done, 5));
          answers.two();
          while (watch.cache === null) await new Promise((done) => setTimeout(done, 5));
          return watch.cache.texts;
        }"""
    )
    assert texts == ["two"]


def test_promised_pages_are_painted_over_those_that_can_be_had(module_page: Any) -> None:
    states = np.array([3, 0, 5, 2, 0], np.uint8)
    painted = module_page.evaluate(
        """async ([states, owners]) => {
          const { Pool } = await import("/page/app/cache/pool.js");
          const pool = new Pool();
          pool.take({
            states, owners, host_used: 0, host_total: 0, promised: 3, conversations: [],
          });
          pool.change({ changes: [[3, 0, 0]], host_used: 0, promised: 4 }, 0);
          return [...pool.painted()];
        }""",
        [encode(states), encode(np.zeros(5, np.uint16))],
    )
    assert painted == [3, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [("a b c", "a b c", None), ("a b c", "a x c", 2), ("a b", "a b c", 3), ("", "a", 1)],
)
def test_the_first_word_that_differs(module_page: Any, one: str, other: str, at: int) -> None:
    found = module_page.evaluate(
        """async (texts) => {
          const { firstDifference } = await import("/page/app/compare/first_difference.js");
          return firstDifference(...texts);
        }""",
        [one, other],
    )
    assert found == at


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ("a b  c\n", "a x", [("a ", "b", "  c\n"), ("a ", "x", "")]),
        ("\n a b", "a", [("\n a ", "b", ""), ("a", "", "")]),
        ("a  b ", "a b", [("a  b ", "", ""), ("a b", "", "")]),
    ],
)
def test_the_mark_has_the_word_alone(
    module_page: Any, one: str, other: str, parts: list[tuple[str, str, str]]
) -> None:
    found = module_page.evaluate(
        """async (texts) => {
          const { splitAtDifference } = await import("/page/app/compare/first_difference.js");
          return splitAtDifference(...texts).map(({ same, word, rest }) => [same, word, rest]);
        }""",
        [one, other],
    )
    assert [tuple(each) for each in found] == parts
