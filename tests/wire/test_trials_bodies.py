"""Bodies of untrusted clients: far too many small things, halves of characters, fields that come
twice.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import CHAT, COMPLETIONS, MODEL, USER, chat_body, run_fake_server

RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
JSON = {"Content-Type": "application/json"}
BODY_BYTES = 15_600_000
# A stall of the whole server was seconds long; a busy machine has shorter ones of its own.
STALL_S = 1.0


def many(item: str, before: str, after: str = "]", size: int = BODY_BYTES) -> bytes:
    """`item` again and again, up to `size` bytes, in a chat unless `before` has a prompt or an
    input.
    """
    asked = (
        ""
        if '"prompt"' in before or '"messages"' in before
        else f'"messages":[{json.dumps(USER)}],'
    )
    asked = "" if '"input"' in before else asked
    items = ",".join([item] * (size // (len(item) + 1)))
    return f'{{"model":"{MODEL}",{asked}{before}{items}{after}}}'.encode()


def names(count: int) -> str:
    return ",".join(f'"{number:07d}":1' for number in range(count))


def calls(count: int, arguments: str) -> str:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return json.dumps([{"role": "assistant", "tool_calls": [call]}] * count)


LISTS = '{"a":[' + ",".join(["[]"] * 4000) + "]}"
CROWDS = {
    "prompts": (COMPLETIONS, lambda: many("[5]", '"prompt":[')),
    "texts": (COMPLETIONS, lambda: many('"ab"', '"prompt":[')),
    "tokens": (COMPLETIONS, lambda: many("12345", '"prompt":[')),
    "short tokens": (COMPLETIONS, lambda: many("5", '"prompt":[')),
    "fractions": (COMPLETIONS, lambda: many("1.5", '"prompt":[')),
    "messages": (CHAT, lambda: many(json.dumps(USER), '"messages":[')),
    "parts": (
        CHAT,
        lambda: many('{"type":"text","text":"a"}', '"messages":[{"role":"user","content":[', "]}]"),
    ),
    "items": (RESPONSES, lambda: many(json.dumps(USER), '"input":[')),
    "tools": (CHAT, lambda: many("{}", '"tools":[')),
    "labels": (CHAT, lambda: many("", f'"metadata":{{{names(1_200_000)}', "}", size=0)),
    "schema": (
        CHAT,
        lambda: many(
            "12345",
            '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[',
            "]}}}",
        ),
    ),
    "arguments": (CHAT, lambda: f'{{"model":"{MODEL}","messages":{calls(1200, LISTS)}}}'.encode()),
    "tokenize": (TOKENIZE, lambda: many(json.dumps(USER), '"messages":[')),
}


def serve_apart(ready: Any, url: Any) -> None:
    """A server in a process of its own: what its clients do must not look like a stall of it."""
    with run_fake_server() as server:
        url.put(server.url)
        ready.wait()


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[str, int]]:
    """The address of a server, and its process."""
    context = multiprocessing.get_context("spawn")
    done, urls = context.Event(), context.Queue()
    process = context.Process(target=serve_apart, args=(done, urls))
    process.start()
    try:
        yield urls.get(timeout=120), process.pid or 0
    finally:
        done.set()
        process.join()


def peak_mib(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@contextmanager
def watch_gaps(url: str) -> Iterator[list[float]]:
    """The seconds between the events of a stream."""
    gaps, over = [0.0], threading.Event()
    body = chat_body(stream=True, max_tokens=None, messages=[USER | {"content": "endless"}])

    def read() -> None:
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as response:
            last_s = time.monotonic()
            for _ in response.iter_lines():
                now_s = time.monotonic()
                gaps.append(now_s - last_s)
                last_s = now_s
                if over.is_set():
                    return
        assert over.is_set(), "the stream was cut"

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        time.sleep(0.3)
        gaps[:] = [0.0]
        yield gaps
        over.set()
        reading.result()


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_in_one_body_stops_no_stream_and_takes_little_memory(
    apart: tuple[str, int], name: str
) -> None:
    url, process = apart
    path, made = CROWDS[name]
    content = made()
    assert 8_000_000 < len(content) < 16_000_000

    def ask(_: int) -> httpx.Response:
        return httpx.post(url + path, content=content, headers=JSON, timeout=60)

    before_mib = peak_mib(process)
    with watch_gaps(url) as gaps, ThreadPoolExecutor(2) as pool:
        for response in pool.map(ask, range(2)):
            assert response.status_code == 400 and len(response.content) < 5000
    assert max(gaps) < STALL_S
    assert peak_mib(process) - before_mib < 400
