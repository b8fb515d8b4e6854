"""A server that speaks what the page reads, over `FakeCache`. Words of the last question steer it:
`slow`, `endless`, `long N`, `hostile`, `code`, `broken` (the connection); otherwise the answer
repeats the question's end. With `drafts` in the conversation the usage tells of drafted tokens.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tangram.types import SamplingValues
from tangram.web.chat_alone import FILES
from tests.edge.web.fake_cache import (
    CHUNK_TOKENS,
    DEFAULT_RETENTION,
    DRAFT_RETENTION,
    KV_HEADS,
    LAYERS,
    WAYS,
    FakeCache,
    FakeRequest,
    Way,
    encode,
    kept_of,
    tokens_of,
)
from tests.running import run_app

MODEL = "fake-model"
WATCHED_S = 30.0  # until a page that was opened watches
SAMPLING = SamplingValues(temperature=0.2, top_p=0.9)
HOSTILE = """Look: <img src=x onerror="window.pwned = 1"> <script>window.pwned = 2</script>

[a link](javascript:window.pwned=3) and ![a picture](https://evil.example/x.png)

<iframe src="https://evil.example/"></iframe>

| a | b |
|:--|--:|
| <svg onload="window.pwned = 4"> | 2 |
"""
CODE = "Here it is:\n\n```python\ndef add(one, two):\n    return one + two  # a sum\n```\n\nDone."
POINTS = 360


@dataclass
class FakeServer:
    """What tests look at. `bodies` are the chats that were asked.

    Each begins at once, and is answered when `answering` is set; `slow` ones then await `computed`.
    """

    url: str = ""
    key: str | None = None
    token_s: float = 0.004
    pages: int = 900
    ways: tuple[Way, ...] = WAYS
    drafts: bool = False
    computed: threading.Event = field(default_factory=threading.Event)
    answering: threading.Event = field(default_factory=threading.Event)
    cache: FakeCache = field(init=False)
    model: str = MODEL
    max_model_len: int = 8192
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self.answering.set()
        self.cache = FakeCache(self.pages, self.ways, drafts=self.drafts)

    def tell(self, event: str, data: dict[str, Any]) -> None:
        """Send an event to all who watch, from another thread; "end" ends their streams.

        Waits until somebody does: a page that has been opened may not yet.
        """
        deadline = time.monotonic() + WATCHED_S
        while self.loop is None or not self.cache.watchers:
            assert time.monotonic() < deadline, "nobody watches"
            time.sleep(0.01)
        self.loop.call_soon_threadsafe(self.cache.tell, event, data)


def answer_to(body: dict[str, Any]) -> list[str]:
    asked = body["messages"][-1]["content"]
    words = asked.rpartition("\n\n")[2].split()  # documents stand before it
    if "endless" in words:
        return [" again"] * 100_000
    if "long" in words:
        many = int(words[words.index("long") + 1])
        return [f" word{at}" if at % 40 else f"\n\nParagraph **{at}**" for at in range(many)]
    if "hostile" in words:
        return tokens_of(HOSTILE)
    if "code" in words:
        return tokens_of(CODE)
    turn = sum(message["role"] == "user" for message in body["messages"])
    kept = body.get("kv_retention", DEFAULT_RETENTION)
    scorer = f" of {body['kv_scorer']}" if "kv_scorer" in body else ""
    return tokens_of(
        f"Answer {turn} to: {' '.join(asked.split()[-8:])}, with retention {kept}{scorer}."
    )


def make_app(server: FakeServer) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def guard(request: Request, go_on: Any) -> Response:
        path = request.url.path
        given = request.headers.get("authorization")
        if path.startswith("/v1") and server.key is not None and given != f"Bearer {server.key}":
            return JSONResponse({"error": {"message": "no API key, or a wrong one"}}, 401)
        server.loop = asyncio.get_running_loop()
        response: Response = await go_on(request)
        return response

    FILES.mount(app)
    _add_chat(app, server)
    _add_cache(app, server)
    return app


def _add_chat(app: FastAPI, server: FakeServer) -> None:
    @app.get("/v1/models")
    def models() -> Any:
        card = {"id": server.model, "object": "model", "max_model_len": server.max_model_len}
        card |= {"default_sampling": asdict(SAMPLING)}
        return {"object": "list", "data": [card]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        server.bodies.append(body)
        name = uuid.uuid4().hex
        text = "".join(f"<{each['role']}> {each['content']}\n" for each in body["messages"])
        retention = body.get("kv_retention", DEFAULT_RETENTION)
        ratios = [ratio for ratio, _ in server.cache.ways]
        if retention not in ratios:
            served = ", ".join(map(str, ratios))
            fault = f"kv_retention is {retention}, this server has {served}"
            return JSONResponse({"error": {"message": fault}}, 400)
        begun = server.cache.begin(
            f"chatcmpl-{name}", name, tokens_of(text), retention, body.get("kv_scorer")
        )
        if "drafts" in text.split() or server.drafts:
            plain = body.get("speculative") is False
            accepted, rejected = (0, 0) if plain else (7, 2)
            begun.drafted = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
        await wait_for(server.answering)
        stream = write_answer(server, begun, answer_to(body), body.get("max_tokens"))
        headers = {"x-request-id": name}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def wait_for(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.02)


async def write_answer(
    server: FakeServer, request: FakeRequest, answer: list[str], most: int | None
) -> AsyncIterator[str]:
    def frame(choices: list[Any], usage: Any = None) -> str:
        chunk = {"id": request.id, "choices": choices, "usage": usage}
        return f"data: {json.dumps(chunk)}\n\n"

    try:
        if "slow" in "".join(request.tokens[-2:]).split():
            await wait_for(server.computed)
        yield frame([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for token in answer[:most]:
            await asyncio.sleep(server.token_s)
            request.tokens.append(token)
            server.cache.step(request, chunks=int(len(request.tokens) % CHUNK_TOKENS == 0))
            yield frame([{"index": 0, "delta": {"content": token}}])
            if request.broken:
                raise ConnectionError("as a server that ends at once")
        reason = "stop" if most is None or most >= len(answer) else "length"
        yield frame([{"index": 0, "delta": {}, "finish_reason": reason}])
        yield frame([], request.usage())
        yield "data: [DONE]\n\n"
    finally:
        server.cache.end(request)


def _add_cache(app: FastAPI, server: FakeServer) -> None:
    cache = server.cache

    def find(name: str) -> FakeRequest:
        for request in cache.requests.values():
            if name in (request.id, request.request_id):
                return request
        raise HTTPException(404, f"no request {name}")

    @app.get("/v1/kv/model")
    def model() -> Any:
        return cache.model(server.model)

    @app.get("/v1/kv/pool")
    def pool() -> Any:
        return cache.pool()

    @app.get("/v1/kv/requests/{name}")
    def request(name: str, tokens_from: int = 0) -> Any:
        return find(name).describe(tokens_from)

    @app.get("/v1/kv/requests/{name}/kept")
    def tell_kept(name: str, chunk: int) -> Any:
        found = find(name)
        held, read = (
            encode(np.packbits(kept_of(chunk, retention), bitorder="little"))
            for retention in (found.retention, DRAFT_RETENTION)
        )
        return {
            "chunk": chunk,
            "begin": chunk * CHUNK_TOKENS,
            "layers": LAYERS,
            "kv_heads": KV_HEADS,
            "tokens": CHUNK_TOKENS,
            "bits": held,
            "draft_bits": read if found.drafts_recorded else None,
        }

    @app.get("/v1/kv/events")
    def events() -> StreamingResponse:
        return StreamingResponse(write_events(cache), media_type="text/event-stream")

    @app.get("/v1/kv/history")
    def history(seconds: int) -> Any:
        return make_history(seconds)


async def write_events(cache: FakeCache) -> AsyncIterator[str]:
    watcher: asyncio.Queue[Any] = asyncio.Queue()
    cache.watchers.add(watcher)
    try:
        yield f"event: hello\ndata: {json.dumps({'at': 0.0, 'last_steps': cache.steps[-400:]})}\n\n"
        while True:
            event, data = await watcher.get()
            if event == "end":
                return
            yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
    finally:
        cache.watchers.discard(watcher)


def make_history(seconds: int) -> dict[str, Any]:
    points = min(POINTS, seconds // 10)
    at = np.arange(points)
    wave = 50 + 40 * np.sin(at / 20)
    fields = {
        "throughput": wave * 20,
        "prompt_throughput": wave * 90,
        "ttft_p50": wave / 500,
        "ttft_p90": wave / 200,
        "tpot_p50": wave / 3000,
        "tpot_p90": wave / 1500,
        "queue": wave // 20,
        "running": wave // 8,
        "pages_held": wave * 5 // 1,
        "pages_cached": wave * 3 // 1,
        "pages_free": 900 - wave * 8 // 1,
        "cached_share": wave / 100,
    }
    return {"step_s": 10, "at": (at * 10).tolist()} | {k: v.tolist() for k, v in fields.items()}


@contextmanager
def run_fake_page(**fields: Any) -> Iterator[FakeServer]:
    """The server on a free port of the loopback, in a thread."""
    fake = FakeServer(**fields)
    with run_app(make_app(fake)) as running:
        fake.url = running.url
        yield fake
